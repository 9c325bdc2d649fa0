# SPDX-License-Identifier: Apache-2.0
"""
The table of events: what each line of the structured log says, and in which words.

Names and keys are frozen: dashboards, scripts and ``ucm trace`` read them. A key has one
meaning and one unit wherever it stands. What is added keeps ``VERSION``; what is renamed,
or comes to mean something else, raises it. Tests hold every call of a log against this
table, and ``docs/events.md`` is made of it.
"""

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs

from ucm.event_keys import COMMON, KEYS
from ucm.tracing import VERSION

__all__ = [
    "COMMON",
    "EVENTS",
    "KEYS",
    "VERSION",
    "Event",
    "Per",
    "page",
    "unknown_keys",
]


class Per(enum.StrEnum):
    """For what a line is written."""

    PROCESS = "process"
    """At the start or the end of a process, or of a runtime in it."""
    CHANGE = "change"
    """When something has changed that lasts."""
    REQUEST = "request"
    TICKET = "ticket"
    """Also several lines for each ticket, or for each of its stages."""
    FAILURE = "failure"
    """For each ticket that fails alike, while something is in trouble."""
    MINUTE = "minute"


@attrs.frozen
class Event:
    """
    One event.

    Args:
        name: As it stands in ``event``.
        level: At which it is written; two, where it may be either.
        who: The process that writes it: ``scheduler``, ``worker`` (also a library's
            ``cache``), ``agent`` or ``any``.
        per: For what there is a line.
        text: What has happened, for people.
        keys: Beside the common ones; which of them are there depends on the case.
    """

    name: str
    level: str
    who: str
    per: Per
    text: str
    keys: tuple[str, ...]


_TABLE: Final = """\
request.ended: info, scheduler, request
    A request has left the engine, and nothing of it is open any more.
    > request_id trace_id life began_s outcome prompt_tokens computed_tokens
    > matched_tokens loaded_tokens saved_blocks dropped_blocks unsettled_blocks
    > preemptions load_s hit_tokens load_failure miss first_missing
prefix.matched: info, scheduler, request
    A part of a request's prompt was found, and its load ordered.
    > request_id trace_id computed_tokens external_tokens hit_tokens
prefix.missed: info, scheduler, request
    A look-up found less than all whole blocks, or none was made. Once each time the
    request gets blocks.
    > request_id trace_id life computed_tokens found_tokens wanted_tokens block group
    > key reason detail
ticket.accepted: debug, worker, ticket
    A save or load waits in the queue.
    > TICKET blocks nbytes rows queue_tickets queue_nbytes
ticket.refused: info, worker, ticket
    The queue has no room for it, or it would come too late.
    > TICKET blocks nbytes rows queue_tickets queue_nbytes reason
ticket.settled: info, worker, ticket
    A save or load is over. All that is known of it, in one line.
    > TICKET ticket trace_id group step outcome reason torn lost error blocks
    > committed skipped nbytes accepted_s released_s total_s edges <stage>_s
stage.started: debug, worker, ticket
    A stage has begun.
    > TICKET stage rows
stage.finished: debug, worker, ticket
    A stage is over.
    > TICKET stage rows elapsed_s
stage.failed: warning, worker, failure
    A stage has failed, and its ticket with it.
    > TICKET stage rows reason error left_out
source.released: debug, worker, ticket
    The engine may use the blocks again.
    > TICKET elapsed_s
save.passed: debug, worker, ticket
    A replica of this rank saves it.
    > transfer_id direction
hold.taken: debug, scheduler, ticket
    A save was ordered, and its blocks are held.
    > HOLD request_id generation requests num_requests ranks_left
hold.released: debug, scheduler, ticket
    A rank reads them no more.
    > HOLD
hold.quarantined: error, any, failure
    A copy of a save was never seen to end.
    > HOLD TICKET left_out
trace.ring: warning, worker, failure
    What the stages did last, written when a ticket or the runtime has failed (once
    in ten seconds at most). Not on standard error; `ucm top` tells it on demand.
    > reason edges
summary: info, any, minute
    What was counted since the last summary, if anything was.
    > seconds totals
agent.joined: info, scheduler, change
    The node's agent is there: what the slab lacks is asked of it.
    > media
agent.lost: warning, scheduler, change
    It is not there any more, or does not serve this engine: the slab serves alone.
    > error
agent.started: info, agent, process
    Tiers are served.
    > media pid
agent.ended: info, agent, process
    They are not any more.
    > pid error
agent.refused: warning, agent, change
    Somebody at the socket is not served.
    > error
tier.silent: warning, agent, change
    A tier did not answer, and is not asked for a while; with a direction, it took nothing; with a
    server, that one of its servers or drives. Of a tier redis or object the error says why, such as a certificate that is over.
    > tier medium seconds direction server error
tier.answers: info, agent, change
    It answers again; with a direction, it takes blocks; with a server, that one does, or
    another in its place.
    > tier medium direction server
tier.failed: warning, agent, change
    It did not take blocks, brought damaged ones, or may have kept some; told once a minute for each reason.
    With an error: a call of it raised that, a bug of the backend's; told once of each kind.
    > tier medium reason blocks error
log.dropped: warning, any, change
    Lines are missing here: they could not be written in time.
    > lines
runtime.started: info, worker, process
    Saves and loads are served.
    > store device model copies checksums driver_cuda torch_cuda torch_npu cann
runtime.closed: info, worker, process
    Nothing is served any more.
    > abandoned quiet
runtime.failed: error, any, change
    Nothing can be served any more; the engine goes on without.
    > error
scheduler.started: info, scheduler, process
    Requests are looked up, once the ranks have agreed.
    > store mode reason
scheduler.closed: info, scheduler, process
    The engine has stopped.
    > holds
checksums.left: warning, worker, change
    The device told wrong ones: the host computes them from now on, which is slower.
    > checksums
thread.bound: info warning, worker, change
    A copy thread was given its CPUs; a warning if not those that `threads.affinity` lists.
    > cpus reason
memory.pinned: info, worker, change
    The device reaches so much of the store's slots directly: all that is to come has come.
    > nbytes elapsed_s
memory.unmapped: info error, worker, change
    The engine's KV cache was let go of; an error if a copy still uses it.
    > quiet
memory.unpinned: warning, worker, change
    The device does not reach the store's slots, or those to come.
    > reason
event.refused: warning, worker, change
    An event of the engine's cannot be used; only the first one for each reason.
    > counter error
store.bypassed: warning, scheduler, change
    The store is not asked for a while.
    > reason error seconds
store.answers: info, any, change
    The store answers again.
    > TICKET
store.hung: warning, worker, failure
    A call of the store does not return.
    > TICKET stages left_out
store.grown: info, worker, change
    The store has more memory by now.
    > nbytes total_bytes
store.short: warning, worker, change
    It cannot have more.
    > reason nbytes total_bytes
store.describe_failed: warning, any, change
    The key space could not be described in the store.
    > error
store.caveat: warning, worker, process
    The store is not quite what was configured.
    > remedy
setting.translated: warning, any, process
    Settings of another connector were understood; what to write instead.
    > equivalent untranslated
setting.ignored: warning, worker, process
    A setting of engines was given to the library in a host of its own, where it does nothing.
    > key value remedy
setting.unsafe: warning, any, process
    A setting may cost output.
    > key value remedy
engine.untried: warning, scheduler, process
    Nobody has tried this release of the engine.
    > reason
wish.ignored: warning, scheduler, change
    A wish of a request makes no sense; only the first one of each key.
    > key value remedy
adapter.passed: warning, scheduler, change
    Nothing is reused with this LoRA adapter.
    > path reason remedy
weights.read: info, worker, change
    The weights were read.
    > epoch elapsed_s
weights.doubted: info, scheduler, change
    The weights may have changed: nothing is found or saved meanwhile.
    > epoch reason
weights.proven: info, scheduler, change
    It is known which weights they are.
    > epoch weights
weights.mixed: warning, scheduler, change
    The engine's own cache has blocks of several weights.
    > epoch remedy
weights.unreadable: warning, scheduler, change
    The weights cannot be told apart.
    > epoch remedy
"""
"""An event's name, level, process and for what it is written; what it says; its keys."""

_SHORT: Final = {
    "TICKET": "transfer_id direction request_id generation requests num_requests",
    "HOLD": "hold_id blocks rank",
}


def _events() -> Iterator[Event]:
    """Read the table."""
    for block in re.split(r"\n(?=\S)", _TABLE.strip()):
        head, *lines = block.splitlines()
        name, level, who, per = re.split("[:,] ", head)
        text = " ".join(line.strip() for line in lines if ">" not in line)
        keys = " ".join(line.partition("> ")[2] for line in lines if ">" in line)
        for short, words in _SHORT.items():
            keys = keys.replace(short, words)
        yield Event(name, level, who, Per(per), text, tuple(keys.split()))


EVENTS: Final[Mapping[str, Event]] = {event.name: event for event in _events()}
"""All events by name."""

_BY_STAGE: Final = "<stage>_s"


def unknown_keys(line: Mapping[str, object]) -> set[str]:
    """
    Return which keys of a line are not in the table.

    Raises:
        KeyError: Its event is not.
    """
    event = EVENTS[str(line["event"])]
    unknown = set(line).difference(COMMON, event.keys)
    edges = line.get("edges")
    if _BY_STAGE in event.keys and isinstance(edges, Iterable):
        unknown -= {f"{stage}_s" for stage, *_ in edges}
    return unknown


def page() -> str:
    """Return the table as the two of ``docs/events.md``."""
    lines = [
        "| event | level | who | for each | what | keys |",
        "|---|---|---|---|---|---|",
    ]
    for event in sorted(EVENTS.values(), key=lambda event: event.name):
        keys = ", ".join(f"`{key}`" for key in event.keys)
        level = " or ".join(event.level.split())
        cells = (f"`{event.name}`", level, event.who, event.per, event.text, keys)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| key | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {unit} | {text} |" for key, (unit, text) in KEYS.items()]
    return "\n".join(lines)
