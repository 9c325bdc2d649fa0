# SPDX-License-Identifier: Apache-2.0
"""
What it costs that something is told of tickets, in CPU time of the thread that tells.

For each span: taking note of the begin and the end of a stage on the loop (``event_wait``),
of all four of a save (the others are on copy threads), and its end, which a copy thread
tells as well. Once with standard error (the default, where a ticket has no line) and once
with a log directory, where it has one. Beside it one edge of the ring, and a whole ring
made into a line, which happens once in ten seconds at most. Run
``python -m benchmarks.trace_cost``.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

from ucm.blocks import BlockId, BlockSpan, GroupId, KeyPacker, Owner, RowId, ShardId
from ucm.blocks import TransferId as Number
from ucm.config import LogConfig
from ucm.devices.events import DoneFence
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline import stage
from ucm.pipeline.items import Item
from ucm.pipeline.recorder import Notice, Recorder
from ucm.pipeline.tickets import Direction, Listener, Outcome, OutcomeKind, Ticket
from ucm.tracing import Log, close_log, open_log

STAGES = ("event_wait", "gather", "transfer", "commit")
BLOCKS = 16
ROUNDS, CALLS = 9, 2000
TARGET_US = 2.0
EDGE_TARGET_US = 0.5


class Told(Listener):
    """Has a recorder hear of edges and ends, as a pipeline does."""

    def __init__(self, recorder: Recorder) -> None:
        self.mark = recorder.ring.mark
        self.ended = recorder.ended  # type: ignore[method-assign]


def tickets(recorder: Recorder, log: Log) -> list[Ticket]:
    """Return saves of which nothing has been told."""
    packer = KeyPacker(bytes(16), GroupId(0), ShardId(0))
    keys = tuple(packer.pack([bytes([at]) * 32 for at in range(BLOCKS)]))
    span = BlockSpan(GroupId(0), tuple(BlockId(at) for at in range(BLOCKS)), keys)
    listener = Told(recorder)
    return [
        Ticket(
            transfer_id=Number(number),
            direction=Direction.SAVE,
            owners=(Owner("chatcmpl-0123456789abcdef", 1, BLOCKS),),
            span=span,
            row_ids=(RowId(0),),
            block_bytes=1 << 16,
            accepted_at=time.monotonic(),
            deadline=time.monotonic() + 60,
            listener=listener,
            log=log,
        )
        for number in range(CALLS)
    ]


def measured(calls: Callable[[], None]) -> float:
    """Return CPU microseconds of one of a round's calls."""
    started = time.thread_time()
    calls()
    return (time.thread_time() - started) / CALLS * 1e6


def tell_stages(items: list[Item], stages: tuple[str, ...]) -> None:
    """Take note of the stages of each."""
    for item, name in itertools.product(items, stages):
        begun = stage._begun(name, item)  # noqa: SLF001 - what is measured
        stage._ended(name, item, begun)  # noqa: SLF001


def end_all(given: list[Ticket]) -> None:
    """Give each its last word."""
    outcome = Outcome(OutcomeKind.COMMITTED, committed=BLOCKS)
    for ticket in given:
        ticket.end(outcome)


def mark_all(recorder: Recorder) -> None:
    """Take note of edges."""
    mark, now = recorder.ring.mark, time.monotonic()
    for number in range(CALLS):
        mark((now, number, "gather", "begin"))


def told_into(directory: str) -> dict[str, list[float]]:
    """Return the costs with one log."""
    found: dict[str, list[float]] = {}
    log = open_log(LogConfig(directory=directory), "worker-0").bind(rank=0)
    mailbox: Mailbox[Notice] = Mailbox()
    recorder = Recorder(Counters(), mailbox, log)
    for _ in range(ROUNDS):
        given = tickets(recorder, log)
        items = [Item(ticket, ticket.row_ids, DoneFence()) for ticket in given]
        cases = {
            "on the loop": lambda items=items: tell_stages(items, STAGES[:1]),
            "four stages": lambda items=items: tell_stages(items, STAGES),
            "the end": lambda given=given: end_all(given),
            "an edge": lambda: mark_all(recorder),
        }
        for name, case in cases.items():
            found.setdefault(name, []).append(measured(case))
        started = time.thread_time()
        recorder.ring.dump()
        spent = (time.thread_time() - started) * 1e6
        found.setdefault("a whole ring", []).append(spent)
        mailbox.drain()
    close_log(log)
    return found


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {"standard error": told_into(""), "a directory": told_into(folder)}
    targets = {"on the loop": TARGET_US, "an edge": EDGE_TARGET_US}
    for side, found in sides.items():
        for name, spent in found.items():
            middle, least = statistics.median(spent), min(spent)
            target = f"  (target {targets[name]})" if name in targets else ""
            print(f"{side:>15} {name:>13}: {middle:8.2f} us, least {least:.2f}{target}")


if __name__ == "__main__":
    main()
