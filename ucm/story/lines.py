# SPDX-License-Identifier: Apache-2.0
"""
Lines of the structured log, as far as a story needs them.

Each kind of line is a type with bounds: one that does not fit is no line of ours. Keys
that are missing have a value that says so, and further keys are left alone, so that logs
of earlier and later releases can be read as long as their schema is the same.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = [
    "BEGIN",
    "SCHEMA",
    "Count",
    "Edge",
    "Ended",
    "Line",
    "Matched",
    "Missed",
    "Moment",
    "Other",
    "SchemaError",
    "Seconds",
    "Settled",
    "Text",
    "Word",
    "details_of",
    "parse",
]

SCHEMA: Final = 1
"""Version of the schema that is understood."""
BEGIN: Final = b'{"v": %d, "' % SCHEMA
"""How each line that we write begins, and no text within one: what is behind is in any order."""
_MOST_RAW: Final = 4096
_BYTES_PER_WEIGHT: Final = 512

Word = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=16384)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Edge = tuple[Word, Seconds, Seconds]
"""A stage, when it began and when it ended, in seconds after the ticket was accepted."""


class SchemaError(ValueError):
    """A line of another version of the schema."""


class _Head(msgspec.Struct):
    event: Word
    v: Count = SCHEMA


class Line(msgspec.Struct, kw_only=True):
    """What every line says; its file says ``process``, and its length ``weight``."""

    event: Word
    timestamp_s: Moment
    role: Word = ""
    level: Word = "info"
    process: str = ""
    weight: int = 1
    request_id: Word = ""
    requests: Annotated[tuple[Word, ...], Meta(max_length=8)] = ()

    @property
    def owners(self) -> tuple[str, ...]:
        """Which requests the line names."""
        return self.requests or ((self.request_id,) if self.request_id else ())

    @property
    def when_s(self) -> float:
        """The moment that the line is about, in Unix time."""
        return self.timestamp_s


class Ended(Line, kw_only=True):
    """``request.ended``: a request has left the engine's memory."""

    trace_id: Word | None = None
    life: Count = 0
    began_s: Moment | None = None
    outcome: Word = "finished"
    prompt_tokens: Count = 0
    computed_tokens: Count = 0
    matched_tokens: Count = 0
    loaded_tokens: Count = 0
    saved_blocks: Count = 0
    dropped_blocks: Count = 0
    unsettled_blocks: Count = 0
    preemptions: Count = 0
    load_s: Seconds | None = None
    hit_tokens: dict[Word, Count] = {}
    load_failure: Word | None = None
    miss: Word | None = None
    first_missing: Count | None = None

    @property
    def when_s(self) -> float:
        """When the life began, as far as is known."""
        return self.timestamp_s if self.began_s is None else self.began_s

    @property
    def never_ran(self) -> bool:
        """Whether its client went away before it had blocks, or amid its first load: nothing of it was computed."""
        waits = self.matched_tokens > self.loaded_tokens and not self.load_failure
        return self.outcome == "aborted" and self.life <= waits


class Missed(Line, kw_only=True):
    """``prefix.missed``: a look-up fell short."""

    life: Count = 0
    computed_tokens: Count = 0
    found_tokens: Count = 0
    wanted_tokens: Count = 0
    block: Count | None = None
    group: Count | None = None
    key: Word = ""
    reason: Word = "unknown"
    detail: msgspec.Raw = msgspec.Raw(b'""')


class Matched(Line, kw_only=True):
    """``prefix.matched``: a load was decided on."""

    computed_tokens: Count = 0
    external_tokens: Count = 0
    hit_tokens: dict[Word, Count] = {}


class Settled(Line, kw_only=True):
    """``ticket.settled``: the last word on a ticket."""

    ticket: Count | None = None
    transfer_id: Count | None = None
    num_requests: Count = 1
    direction: Word = ""
    group: Count | None = None
    step: Count | None = None
    outcome: Word = ""
    reason: Word | None = None
    error: Text | None = None
    blocks: Count = 0
    committed: Count = 0
    skipped: Count = 0
    nbytes: Count = 0
    total_s: Seconds = 0.0
    accepted_s: Moment | None = None
    released_s: Seconds | None = None
    edges: Annotated[tuple[Edge, ...], Meta(max_length=4096)] = ()

    @property
    def number(self) -> int | None:
        """The ticket's number in its engine, if the line has it."""
        return self.transfer_id if self.ticket is None else self.ticket

    @property
    def when_s(self) -> float:
        """When it was accepted."""
        if self.accepted_s is None:
            return self.timestamp_s - self.total_s
        return self.accepted_s

    @property
    def end_s(self) -> float:
        """When it was settled."""
        return max(self.timestamp_s, self.when_s)

    @property
    def committed_bytes(self) -> int:
        """Bytes of those blocks that arrived."""
        return self.nbytes * self.committed // self.blocks if self.blocks else 0


class Other(Line, kw_only=True):
    """Any other line; ``raw`` is all of it, unless it is long."""

    raw: bytes = b""


_HEAD: Final = msgspec.json.Decoder(_Head)
_OTHER: Final = msgspec.json.Decoder(Other)
_KINDS: Final[dict[str, msgspec.json.Decoder[Line]]] = {
    "request.ended": msgspec.json.Decoder(Ended),
    "prefix.missed": msgspec.json.Decoder(Missed),
    "prefix.matched": msgspec.json.Decoder(Matched),
    "ticket.settled": msgspec.json.Decoder(Settled),
}


def parse(raw: bytes, process: str = "") -> Line:
    """
    Return what a line says.

    Args:
        raw: The line.
        process: Whose file it stands in.

    Raises:
        SchemaError: It is of another version.
        ValueError: It is no line of ours.
    """
    try:
        head = _HEAD.decode(raw)
        if head.v != SCHEMA:
            raise SchemaError(f"schema {head.v}")
        line: Line = _KINDS.get(head.event, _OTHER).decode(raw)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    line.process = process or line.role
    line.weight = 1 + len(raw) // _BYTES_PER_WEIGHT
    if isinstance(line, Other):
        line.raw = raw if len(raw) <= _MOST_RAW else b""
    elif isinstance(line, Missed):  # a view of the whole line until it is copied
        detail = bytes(line.detail)
        line.detail = msgspec.Raw(detail if len(detail) <= _MOST_RAW else b'""')
    return line


def details_of(line: Other) -> dict[str, object]:
    """Return what else another line says, without what every line says."""
    try:
        told = msgspec.json.decode(line.raw or b"{}", type=dict[str, object])
    except (ValueError, RecursionError):
        return {}
    common = {*Line.__struct_fields__, "v", "raw"}
    return {key: value for key, value in told.items() if key not in common}
