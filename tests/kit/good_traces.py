# SPDX-License-Identifier: Apache-2.0
"""Hand-made traces in which all is well."""

import itertools
from typing import Any

from tests.kit.lockstep import QueueBounds
from tests.kit.lockstep_tickets import CHAINS, OPTIONAL

Event = dict[str, Any]
Trace = list[Event]
NBYTES = 100
_OF_ONE = ("request_id", "generation")
BOUNDS = QueueBounds(tickets=2, nbytes=9 * NBYTES)


def worker(event: str, number: int = 0, direction: str = "save", **keys: Any) -> Event:
    """Return an event of rank 0, of a ticket if it has a number."""
    ids = {"transfer_id": number, "direction": direction, "request_id": "r"}
    ids |= {"generation": 1} if number else {}
    process = {"event": event, "process": "worker-0", "rank": 0}
    return process | (ids if number else {}) | keys


def scheduler(event: str, **keys: Any) -> Event:
    """Return an event of the scheduler."""
    return {"event": event, "process": "scheduler"} | keys


def accepted(number: int, direction: str = "save", blocks: int = 4) -> Event:
    """Return the acceptance of a ticket behind an empty queue."""
    told = {"blocks": blocks, "nbytes": blocks * NBYTES}
    queue = {"queue_tickets": 0, "queue_nbytes": 0}
    return worker("ticket.accepted", number, direction, **told, **queue)


def settled(
    number: int, direction: str, outcome: str, reason: str = "", **blocks: int
) -> Event:
    """Return the last word on a ticket of four blocks."""
    told = {"blocks": 4, "nbytes": 4 * NBYTES, "committed": 0, "skipped": 0} | blocks
    return worker(
        "ticket.settled", number, direction, outcome=outcome, reason=reason, **told
    )


def stage(number: int, direction: str, name: str, *within: Event) -> Trace:
    """Return a stage with what happens in it."""
    start, end = (
        worker(f"stage.{word}", number, direction, stage=name)
        for word in ("started", "finished")
    )
    return [start, *within, end]


def released(number: int, direction: str = "save") -> Event:
    """Return the moment in which the blocks of a ticket are given back."""
    return worker("source.released", number, direction)


def through(number: int, direction: str, *, waits: bool) -> Trace:
    """Return a ticket that passes every stage and is committed."""
    giving_back = "publish"
    if direction == "save":
        giving_back = "gather_wait" if waits else "gather"
    trace = [accepted(number, direction)]
    for name in CHAINS[direction]:
        if waits or name not in OPTIONAL:
            within = [released(number, direction)] if name == giving_back else []
            trace += stage(number, direction, name, *within)
    return [*trace, settled(number, direction, "committed", committed=4)]


def process(*tickets: Trace, failed: bool = False, **closed: Any) -> Trace:
    """Return a worker's whole trace with these tickets one after the other."""
    died = [worker("runtime.failed", error="stuck")] if failed else []
    end = {"abandoned": 0, "quiet": True} | closed
    return [
        worker("runtime.started"),
        *itertools.chain(*tickets),
        *died,
        worker("runtime.closed", **end),
    ]


def refused(number: int) -> Trace:
    """Return a ticket that the queue refuses."""
    refusal = accepted(number) | {"event": "ticket.refused", "reason": "queue_tickets"}
    end = settled(number, "save", "refused", "queue_tickets")
    return [refusal, released(number), end]


def cancelled(number: int) -> Trace:
    """Return a ticket that is taken back while it waits."""
    end = settled(number, "save", "cancelled", "recycled")
    return [accepted(number), released(number), end]


def failed_load(number: int) -> Trace:
    """Return a load of which a block is lost."""
    return [
        accepted(number, "load"),
        *stage(number, "load", "event_wait"),
        worker("stage.started", number, "load", stage="fetch"),
        worker("stage.failed", number, "load", stage="fetch", error="lost"),
        released(number, "load"),
        settled(number, "load", "failed", "evicted"),
    ]


def torn(number: int) -> Trace:
    """Return a save whose deadline passes while it copies, and whose copy ends late."""
    end = settled(number, "save", "cancelled", "deadline") | {"torn": "deadline"}
    return [
        accepted(number),
        *stage(number, "save", "event_wait"),
        *stage(number, "save", "gather"),
        worker("stage.started", number, stage="gather_wait"),
        end,
        released(number),
        worker("stage.finished", number, stage="gather_wait"),
    ]


def lossy(number: int) -> Trace:
    """Return a save one of whose blocks the engine overwrites while it copies."""
    end = settled(number, "save", "cancelled", "recycled", committed=3) | {"lost": 1}
    return [*through(number, "save", waits=False)[:-1], end]


def shared(trace: Trace) -> Trace:
    """Let every ticket of a trace carry blocks of several requests."""
    return [
        {key: word for key, word in each.items() if key not in _OF_ONE}
        | ({"requests": ["r", "s"], "num_requests": 2} if "request_id" in each else {})
        for each in trace
    ]


def stuck(number: int) -> Trace:
    """Return a save whose copy never ends."""
    return [
        accepted(number),
        *stage(number, "save", "event_wait"),
        worker("stage.started", number, stage="gather"),
        worker("hold.quarantined", number),
        settled(number, "save", "failed", "stuck"),
    ]


def late(number: int) -> Trace:
    """Return a load that another thread settles while its copy is about to begin."""
    return [
        accepted(number, "load"),
        *stage(number, "load", "event_wait"),
        *stage(number, "load", "fetch"),
        released(number, "load"),
        settled(number, "load", "cancelled", "closed"),
        worker("stage.started", number, "load", stage="scatter"),
    ]


def engine() -> Trace:
    """Return a scheduler and one worker: two holds that end, one told of too late."""
    holds = [
        scheduler("hold.taken", hold_id=number, blocks=4, ranks_left=1)
        for number in (1, 2, 3)
    ]
    return [
        scheduler("scheduler.started"),
        *holds,
        *process(
            through(1, "save", waits=False), refused(2), through(3, "save", waits=True)
        ),
        scheduler("hold.released", hold_id=1, rank=0),
        scheduler("hold.released", hold_id=2, rank=0),
        scheduler("prefix.matched", computed_tokens=0, external_tokens=32),
        scheduler("scheduler.closed", holds=1),
    ]


def given_up() -> Trace:
    """Return a scheduler and a worker that gives a hold up."""
    return [
        scheduler("scheduler.started"),
        scheduler("hold.taken", hold_id=1, blocks=4, ranks_left=1),
        *process(stuck(1), failed=True, quiet=False),
        scheduler("hold.quarantined", hold_id=1, rank=0),
        scheduler("scheduler.closed", holds=0),
    ]


def confused() -> Trace:
    """Return a scheduler that cannot make sense of a report."""
    return [
        scheduler("scheduler.started"),
        scheduler("hold.taken", hold_id=1, blocks=4, ranks_left=2),
        scheduler("runtime.failed", error="which hold?"),
        scheduler("scheduler.closed", holds=1),
    ]


def replicas() -> Trace:
    """Return a scheduler and two workers, of which one saves and one passes, in turn."""

    def on(rank: int, events: Trace) -> Trace:
        return [event | {"process": f"worker-{rank}", "rank": rank} for event in events]

    taken, left = (
        [scheduler(event, hold_id=number, **keys) for number in (1, 2) for keys in told]
        for event, told in (
            ("hold.taken", [{"blocks": 4, "ranks_left": 2}]),
            ("hold.released", [{"rank": 0}, {"rank": 1}]),
        )
    )
    passed = [worker("save.passed", number) for number in (1, 2)]
    for event in passed:
        del event["request_id"], event["generation"]
    return [
        scheduler("scheduler.started"),
        *taken,
        *on(0, process(through(1, "save", waits=False), passed[1:])),
        *on(1, process(passed[:1], through(2, "save", waits=False))),
        *left,
        scheduler("scheduler.closed", holds=0),
    ]


GOOD: dict[str, Trace] = {
    "save": process(through(1, "save", waits=False)),
    "save_async": process(through(1, "save", waits=True)),
    "load": process(through(1, "load", waits=False)),
    "load_async": process(through(1, "load", waits=True)),
    "two": process(*(through(at, "save", waits=False) for at in (1, 2))),
    "refused": process(refused(1)),
    "cancelled": process(cancelled(1)),
    "failed_load": process(failed_load(1)),
    "torn": process(torn(1)),
    "lossy": process(lossy(1)),
    "shared": shared(process(*(through(at, "save", waits=False) for at in (1, 2)))),
    "stuck": process(stuck(1), failed=True, quiet=False),
    "late": process(late(1), abandoned=1),
    "engine": engine(),
    "two_engines": engine() + engine(),
    "given_up": given_up(),
    "confused": confused(),
    "replicas": replicas(),
    "ends_later": [
        *process([accepted(1)], quiet=False, abandoned=1),
        released(1),
        settled(1, "save", "cancelled", "closed"),
    ],
    "refused_behind_the_end": process() + refused(1),
    "two_runs": process(cancelled(1)) + process(cancelled(1)),
}
