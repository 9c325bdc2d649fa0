# SPDX-License-Identifier: Apache-2.0
"""Logs to read: lines by hand, and lines that the real pipeline writes."""

import json
from pathlib import Path

import numpy as np

from tests.rig import KEYSPACE_DIGEST, LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, order
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.tracing import close_log, open_log

T0 = 1.79e9
"""When the runs by hand began, in Unix time."""


def line(event, after_s=0.0, **said):
    """Return what a line says, as a program would write it."""
    return {"v": 1, "event": event, "timestamp_s": T0 + after_s, "level": "info"} | said


def ended(request="r1", begin=0.0, end=1.0, **said):
    """Return the line of a life that has ended."""
    told = {
        "role": "scheduler",
        "request_id": request,
        "life": 1,
        "began_s": T0 + begin,
    }
    told |= {"prompt_tokens": 100, "computed_tokens": 0, "loaded_tokens": 64}
    return line("request.ended", end, **told | {"outcome": "finished"} | said)


def settled(request="r1", number=1, begin=0.1, end=0.2, direction="save", **said):
    """Return the line of a ticket that has two stages of equal length."""
    half = (end - begin) / 2
    names = ("gather", "commit") if direction == "save" else ("fetch", "scatter")
    edges = [[names[0], 0.0, half], [names[1], half, end - begin]]
    told = {"role": "worker-0", "requests": [request], "num_requests": 1}
    told |= {"ticket": number, "direction": direction, "accepted_s": T0 + begin}
    told |= {"blocks": 4, "committed": 4, "nbytes": 4096, "outcome": "committed"}
    return line("ticket.settled", end, **told | {"edges": edges} | said)


def missed(request="r1", after_s=0.01, **said):
    """Return the line of a look-up that found 36 tokens of 100."""
    told = {"request_id": request, "life": 1, "found_tokens": 36, "wanted_tokens": 100}
    told |= {"block": 3, "group": 0, "key": "00ff", "reason": "evicted", "detail": ""}
    return line("prefix.missed", after_s, **told | {"role": "scheduler"} | said)


def write(path: Path, *lines: dict) -> Path:
    """Write lines to a file and return it."""
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run_of(directory: Path) -> Path:
    """Write the logs of a scheduler and a worker: three requests, one of them aborted."""
    directory.mkdir()
    write(
        directory / "ucm-scheduler-7.jsonl",
        missed("r1"),
        ended("r1", 0.0, 1.0, miss="evicted", first_missing=3),
        line("prefix.matched", 0.06, request_id="r2", external_tokens=64),
        ended("r2", 0.05, 0.9, outcome="aborted", load_failure="deadline"),
        ended("r3", 0.3, 1.2, preemptions=2),
    )
    write(
        directory / "ucm-worker-0-8.jsonl",
        settled("r1", 1, 0.1, 0.3, released_s=0.1),
        settled("r2", 2, 0.06, 0.2, "load", outcome="failed", reason="deadline"),
        settled("r3", 3, 0.4, 0.4, outcome="refused", committed=0, edges=[]),
    )
    return directory


def real_run(directory: Path) -> Path:
    """Save and load on the real pipeline, with its log in a directory."""
    config = UCMConfig.from_mapping({"log": {"directory": str(directory)}})
    log = open_log(config.log, "worker-0")
    device, counters = CPUDevice(NUM_BLOCKS), Counters()
    memory = np.zeros((NUM_ROWS, NUM_BLOCKS, 512), np.uint8)
    device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
    store = MemoryStore(capacity_blocks=64, block_bytes=LAYOUT.max_block_bytes)
    runtime = Runtime(
        store, device, layout=LAYOUT, config=config, counters=counters, log=log
    )
    runtime.start()
    for number, direction in enumerate((Direction.SAVE, Direction.LOAD), 1):
        asked = order(number, direction, range(4), range(4), request=f"r{number}")
        runtime.submit(KEYSPACE_DIGEST, [asked], device.lease(None))
        assert runtime.flush(60.0)
        runtime.poll()
    runtime.close()
    close_log(log)
    return directory
