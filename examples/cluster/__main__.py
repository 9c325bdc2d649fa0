# SPDX-License-Identifier: Apache-2.0
"""
Show a small cluster on one machine: two engines, a router, and one store below both.

Each engine is a machine of its own: it has its own slab, and an agent that spills to a Mooncake
Store (or, with ``--share``, to a directory that both mount). A router follows the KV events of
both. A prompt is asked, asked again, and asked with another ending: the router sends all three
to the engine that holds it. Then that engine is killed, and the other one is asked: it has never
seen the prompt, and gets it from the store. The exit status is 0 only if every answer is the one
of the first time, and each prefix came from where it should.

Run as ``python -m examples.cluster``.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from examples.cluster.router import Engine, Router
from examples.kv_mirror import Subscription
from tests.e2e.engine import connector_config
from tests.e2e.models import LLAMA, make_model
from tests.e2e.server import serve

BLOCK = 32
PREFIX = 512
"""Tokens of the prompt that are asked for again and again."""
ANSWER = 12
LIMIT_S = 300.0
PATIENCE_S = 60.0
"""With a tier. A machine that runs all of this beside other work is slow, and nothing else."""
TIMEOUT = {"fetch": PATIENCE_S, "tier": PATIENCE_S}
_LOG_LINES = 40
Row = dict[str, Any]


def main() -> int:
    """Start everything, ask, print the table, and say what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m examples.cluster")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--share", type=Path, help="a directory instead of Mooncake")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="ucm-cluster-", dir="/dev/shm", ignore_cleanup_errors=True
                )
            )
        )
        if options.share:
            tier = {"type": "files", "path": str(options.share)}
        else:
            tier = stack.enter_context(_mooncake(place))
        rows = _show(place, tier)
        problems = judge(rows)
        if problems:
            _print_logs(place)
    _print_table(rows)
    if options.json:
        result = {"ok": not problems, "problems": problems, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"cluster {'failed' if problems else 'passed'}")
    return 1 if problems else 0


def judge(rows: list[Row]) -> list[str]:
    """Return what is not as it must be; nothing if all is well."""
    cold, again, other, moved, control = rows
    checks = {
        "cold: something was there already": cold["cached"] == 0,
        "again: another engine was asked": again["engine"] == cold["engine"],
        "again: the prefix was computed again": again["cached"] >= PREFIX - BLOCK,
        "another ending: another engine was asked": other["engine"] == cold["engine"],
        "another ending: the prefix was computed again": other["cached"] >= PREFIX,
        "engine killed: it was asked": moved["engine"] != cold["engine"],
        "engine killed: the prefix was computed again": moved["cached"]
        >= PREFIX - BLOCK,
        "never seen: something was there": control["cached"] == 0,
        "again: other tokens": again["text"] == cold["text"],
        "engine killed: other tokens": moved["text"] == cold["text"],
    }
    return [problem for problem, holds in checks.items() if not holds]


def _show(place: Path, tier: dict[str, object]) -> list[Row]:
    model = make_model(LLAMA, place / "models")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as starts:
        print("starting two engines; about a minute", flush=True)
        machines = [_Machine(place, number, model, tier) for number in (0, 1)]
        for machine in machines:
            stack.callback(machine.close)
        for started in [starts.submit(machine.start) for machine in machines]:
            started.result()
        engines = [machine.engine for machine in machines]
        url = stack.enter_context(_served(Router(engines)))
        prompt = [3 + (7919 * i + i * i // 7) % 500 for i in range(PREFIX)]
        rows = [_ask(url, "cold", prompt), _ask(url, "again", prompt)]
        rows.append(_ask(url, "another ending", [*prompt, 9, 8, 7]))
        holder = next(one for one in machines if one.engine.name == rows[0]["engine"])

        def is_shared() -> bool:  # an engine publishes when it steps
            _ask(url, "again", prompt)
            return holder.engine.shares() >= PREFIX // BLOCK

        _until(is_shared)
        holder.kill()
        rows.append(_ask(url, "engine killed", prompt))
        rows.append(_ask(url, "never seen", prompt[::-1]))
    return rows


class _Machine:
    """An engine with a slab of its own, as if it were alone."""

    def __init__(
        self, place: Path, number: int, model: Path, tier: dict[str, object]
    ) -> None:
        self.name = f"engine {number}"
        self._place = place / str(number)
        self._place.mkdir()
        self._model, self._tier = model, tier
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Start it, and listen to its events."""
        publish, replay = (f"ipc://{self._place}/{what}" for what in ("pub", "replay"))
        events = {
            "enable_kv_cache_events": True,
            "endpoint": publish,
            "replay_endpoint": replay,
        }
        config: dict[str, Any] = connector_config(
            path=str(self._place / "slab"), capacity="64MiB"
        )
        config["kv_connector_extra_config"] |= {
            "tiers": [self._tier],
            "kv_events": "node",
            "timeout": TIMEOUT,
        }
        self._server = self._stack.enter_context(
            serve(
                self._model,
                *("--block-size", str(BLOCK), "--served-model-name", "model"),
                *("--kv-events-config", json.dumps(events)),
                log=self._place / "log",
                kv_transfer_config=config,
                env={"PYTHONHASHSEED": "0"},
                is_forked=True,  # the engine is imported once, and not six times
            )
        )
        self.engine = Engine(self.name, self._server.url, Subscription(publish, replay))
        self._stack.callback(self.engine.close)
        # It serves before its agent is there, and computes what only tiers have by then.
        _until(lambda: self._server.samples("vllm:ucm_agent_up") == [1.0])

    def kill(self) -> None:
        """End it without a word."""
        os.killpg(os.getpgid(self._server.pid), signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        self._stack.close()


def _ask(url: str, row: str, prompt: list[int]) -> Row:
    began = time.monotonic()
    asked = {"model": "model", "prompt": prompt, "max_tokens": ANSWER}
    asked |= {"temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        told = json.load(answer)
    details = told["usage"].get("prompt_tokens_details") or {}
    return {
        "row": row,
        "engine": answer.headers["x-engine"],
        "prompt": len(prompt),
        "cached": details.get("cached_tokens") or 0,
        "seconds": round(time.monotonic() - began, 3),
        "text": told["choices"][0]["text"],
    }


@contextlib.contextmanager
def _served(router: Router) -> Iterator[str]:
    """Serve the router on a thread of its own; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(router.app(), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def _mooncake(place: Path) -> Iterator[dict[str, object]]:
    """Run a master and a node; yields what a tier in them is set to."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    master = [str(Path(sys.executable).with_name("mooncake_master"))]
    master += ["-rpc_address", "127.0.0.1", "-rpc_port", address.partition(":")[2]]
    master += ["-enable_metric_reporting=false", "-metrics_host", "127.0.0.1"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((place / "mooncake.log").open("wb"))
        node = [sys.executable, "-m", "examples.cluster.node", "--master", address]
        processes = []
        for command in (master, node):
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)

        def told() -> str:
            return (place / "mooncake.log").read_text(errors="replace")

        def is_known() -> bool:  # one may end at once, as without its libraries
            return "ready" in told() or any(each.poll() for each in processes)

        with contextlib.suppress(TimeoutError):
            _until(is_known)
        if "ready" not in told():
            text = told()[-2000:]
            sys.exit(f"no Mooncake here; --share DIRECTORY does without.\n{text}")
        yield {"type": "mooncake", "master": address, "timeout": PATIENCE_S}


def _until(is_so: Callable[[], bool]) -> None:
    """
    Wait until something is so.

    Raises:
        TimeoutError: It is not.
    """
    until = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError("what was waited for has not come")
        time.sleep(0.05)


def _print_logs(place: Path) -> None:
    """Print what the engines and their agents have logged of themselves, the end of it."""
    for log in sorted(place.glob("*/**/*log*")):
        if log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            print(f"\n{log.relative_to(place)}:")
            print("\n".join(line[:400] for line in lines[-_LOG_LINES:]))


def _print_table(rows: list[Row]) -> None:
    print(f"\n{'':16}{'engine':>10}{'prompt':>8}{'cached':>8}{'seconds':>9}")
    for row in rows:
        cells = f"{row['engine']:>10}{row['prompt']:>8}{row['cached']:>8}"
        print(f"{row['row']:16}{cells}{row['seconds']:>9.3f}")


if __name__ == "__main__":
    sys.exit(main())
