# SPDX-License-Identifier: Apache-2.0
"""
What it costs that something is told of tickets and requests.

*a span*, in CPU time of the thread that tells: taking note of the begin and the end of a stage on the loop (``event_wait``),
of all four of a save (the others are on copy threads), and its end, which a copy thread
tells as well. Beside it one edge of the ring, and a whole ring made into a line, which
happens once in ten seconds at most.

*prompts* and *256 decoding*, on the real engine (``trace_side``): rounds that are traced
against rounds that are not, in turn. *cpu* is what the engine's thread and all of ours
computed. Of the rounds' own differences others on the machine make a part; tracing's share
is what was computed within its calls, and the clock's time for each, so that it is less.

Each once with standard error (the default, where a ticket has no line) and once with a log
directory, where it has one. Run ``python -m benchmarks.trace_cost``.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks import trace_side
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.sides import Side, ours
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function
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
TARGETS = {"stderr, on the loop": "<= 2", "stderr, an edge": "<= 0.5"}
ENGINE_TARGET = "<= 1"


class Heard(Listener):
    """Has a recorder hear of edges and ends, as a pipeline does."""

    def __init__(self, recorder: Recorder) -> None:
        self.mark = recorder.ring.mark
        self.ended = recorder.ended  # type: ignore[method-assign]


def tickets(recorder: Recorder, log: Log) -> list[Ticket]:
    """Return saves of which nothing has been told."""
    packer = KeyPacker(bytes(16), GroupId(0), ShardId(0))
    keys = tuple(packer.pack([bytes([at]) * 32 for at in range(BLOCKS)]))
    span = BlockSpan(GroupId(0), tuple(BlockId(at) for at in range(BLOCKS)), keys)
    listener = Heard(recorder)
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


def told_into(directory: str, rounds: int) -> dict[str, list[float]]:
    """Return the costs with one log."""
    found: dict[str, list[float]] = {}
    log = open_log(LogConfig(directory=directory), "worker-0").bind(rank=0)
    mailbox: Mailbox[Notice] = Mailbox()
    recorder = Recorder(Counters(), mailbox, log)
    for _ in range(rounds):
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
        recorder.ring.dump("measured")
        spent = (time.thread_time() - started) * 1e6
        found.setdefault("a whole ring", []).append(spent)
        mailbox.drain()
    close_log(log)
    return found


def of_spans(scale: Scale) -> Told:
    """Measure what is told of one span."""
    with tempfile.TemporaryDirectory() as folder:
        for side, directory in (("stderr", ""), ("a directory", folder)):
            found = told_into(directory, 3 if scale.is_quick else ROUNDS)
            for name, spent in found.items():
                what = f"{side}, {name}"
                yield Figure.over("a span", what, "us", spent, TARGETS.get(what, ""))


def of_engine(work: str, scale: Scale) -> Told:
    """Measure rounds of the real engine, traced and not."""
    samples = 2 if scale.is_quick else scale.rounds or 8
    to_directory = Side(
        MEMORY, lambda home: ours(log={"directory": str(home / "log")})(home)
    )
    for name, side in (("stderr", Side(MEMORY, ours())), ("a directory", to_directory)):
        with side.ready() as config:
            told = run_function(
                trace_side.traced,
                timeout=1800.0,
                kv_transfer_config=config,
                work=work,
                samples=samples,
            )
        yield from _figures(work, name, told)


def _figures(
    work: str, name: str, told: dict[str, list[dict[str, float]]]
) -> Iterator[Figure]:
    is_default = name == "stderr"
    for of in ("time", "cpu"):
        pairs = zip(told["traced"], told["not traced"], strict=True)
        values = [one[of] / other[of] for one, other in pairs]
        yield Figure.over(work, f"{name}, traced / not traced, {of}", "ratio", values)
    shares = [100 * one["tracing"] / one["cpu"] for one in told["timed"]]
    target = ENGINE_TARGET if is_default else ""
    yield Figure.over(work, f"{name}, tracing's share of cpu", "%", shares, target)


CASES: dict[str, Callable[[Scale], Told]] = {
    "a span": of_spans,
    **{name: functools.partial(of_engine, name) for name in trace_side.WORK},
}


if __name__ == "__main__":
    main("trace_cost", CASES)
