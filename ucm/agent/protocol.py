# SPDX-License-Identifier: Apache-2.0
"""
What engines and their node's agent tell each other, over a socket in the slab's directory.

A frame is four bytes of length, big endian, and so much MessagePack of one of the types
here. The first one of a connection says hello, with the version of all that follows. Neither
side believes the other: what is too long, or no message, ends the connection.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from ucm.decoding import DECODE_ERRORS
from ucm.errors import MessageError
from ucm.reasons import Reason
from ucm.settings import LONGEST_FETCH_S

__all__ = [
    "FORGETS",
    "FRAME_HEADER",
    "LOCK_NAME",
    "LONGEST_S",
    "MAX_FRAME_BYTES",
    "MOST_KEYS",
    "PROTOCOL_VERSION",
    "SOCKET_NAME",
    "Answer",
    "Ask",
    "Describe",
    "Done",
    "Drop",
    "Entry",
    "Follow",
    "Forget",
    "FromAgent",
    "GetStatus",
    "Hello",
    "Refused",
    "Status",
    "ToAgent",
    "Told",
    "Welcome",
    "check_media",
    "decode_frame",
    "digest_of",
    "encode_frame",
    "frame_bytes",
    "within",
]

PROTOCOL_VERSION: Final = 5
MAX_FRAME_BYTES: Final = 8 << 20
MOST_KEYS: Final = 1 << 16
"""Of one message: they fit into a frame however long they are."""
FORGETS: Final = (Reason.NONE, Reason.KEPT)
"""Of an answer to who has blocks forgotten: behind other reasons the agent has not begun."""
LONGEST_S: Final = LONGEST_FETCH_S
"""That a want may take, and that what was found may be kept behind it."""
FRAME_HEADER: Final = struct.Struct(">I")
SOCKET_NAME: Final = "agent.sock"
LOCK_NAME: Final = "agent.lock"


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """
    An engine's first word.

    Args:
        version: Of the protocol.
        slot_bytes: Of its blocks, or of the slots that they lie in: the agent finds the class.
        tiers: Digest of the tiers that it is set to have; empty: whichever there are.
    """

    version: int
    slot_bytes: int
    tiers: str = ""


class Ask(msgspec.Struct, tag="want", frozen=True):
    """
    An engine wants blocks, the first of them most.

    Where a longer hit does without blocks of a shorter one, such as windows, it names the blocks of all
    its hits, counts these from 1 on, the shortest, and says which of them needs each block. Then
    those of the longest hit are brought of which all are there, and no others.

    Args:
        number: Its name on this connection.
        keys: Packed keys.
        sizes: The bytes of each.
        deadline_s: From now on; what has come by then is what there is.
        hold_s: For how long behind that it is kept.
        compute_s: How long computing all of them would take; 0: not known.
        only: Medium and locality of the tiers that may be used, each empty for any; None:
            all of them.
        priority: The lowest has its slots first.
        tenant: Whose share of the slab they take; 0: nobody's.
        hits: The shortest hit that needs each block, and the longest, 0 for all that are longer; None:
            each block is of use behind all before it.
    """

    number: int
    keys: list[bytes]
    sizes: list[int]
    deadline_s: float
    hold_s: float
    compute_s: float = 0.0
    only: list[tuple[str, str]] | None = None
    priority: int = 0
    tenant: int = 0
    hits: tuple[list[int], list[int]] | None = None


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """A want is over: loaded, or of no use any more."""

    number: int


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """
    An engine has taken blocks out of the slab; tiers are to part with them, too.

    Args:
        number: Its name on this connection; 0: nobody waits for an answer.
        keys: Packed keys.
        deadline_s: From now on; then it is answered with what is known, and goes on.
    """

    number: int
    keys: list[bytes]
    deadline_s: float = 0.0


class Describe(msgspec.Struct, tag="describe", frozen=True):
    """
    What blocks hold, for whoever follows the ledger.

    Args:
        blocks: A packed key of each, and its description, which engines read.
    """

    blocks: list[tuple[bytes, bytes]]


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """
    An engine asks for the next batch of the ledger; it has no other on its way.

    Args:
        number: Of what it follows; a new one begins with a listing.
        prefix: Of the keys that it is to be told of.
        alone: Only if no other engine that says so is told of them.
    """

    number: int
    prefix: bytes
    alone: bool


class GetStatus(msgspec.Struct, tag="get_status", frozen=True):
    """Somebody asks how the agent is."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The agent serves this engine; from these media. The nonce is another one for each agent."""

    version: int
    media: list[str]
    nonce: str = ""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """It does not, and says why."""

    problem: str


class Done(msgspec.Struct, tag="done", frozen=True):
    """
    The answer to a want, or to who has blocks forgotten.

    To the latter *found* says how many of them tiers had, and *media* which tiers may have some yet.

    Args:
        number: Which.
        found: So many of its keys, from the first, are there; of a want with hits, of the keys
            that the hit needs.
        reason: Why not more.
        media: Where each of these was: 0 the slab, tiers behind it.
        reach: The hit; 0: none, or the want had none.
    """

    number: int
    found: int
    reason: Reason
    media: bytes = b""
    reach: int = 0


class Answer(NamedTuple):
    """
    What its asker has of a ``Done``.

    Args:
        found: So many of its keys, from the first, are in the slab.
        reason: Why not more.
        media: Where each of these was, as bytes: 0 the slab, tiers behind it.
        reach: The hit that needs them, of a want with hits.
    """

    found: int
    reason: Reason
    media: bytes = b""
    reach: int = 0


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """
    A line of the ledger.

    Args:
        medium: 0 the slab, tiers behind it.
        is_stored: The block came; else it went.
        key: Packed.
        said: What it holds, as some engine has described it; empty: nobody has.
    """

    medium: int
    is_stored: bool
    key: bytes
    said: bytes = b""


class Told(msgspec.Struct, tag="told", frozen=True):
    """
    The answer to who follows the ledger, once there is something.

    Args:
        number: Of what it follows.
        entries: In order.
        begins: A listing begins with it, of all that is there.
        listed: A listing ends with it: what it left out is there no more.
    """

    number: int
    entries: list[Entry]
    begins: bool
    listed: bool


class Status(msgspec.Struct, tag="status", frozen=True):
    """How the agent is, as plain values for people and for ``ucm``."""

    told: dict[str, object]


ToAgent = Hello | Ask | Drop | Forget | Describe | Follow | GetStatus
FromAgent = Welcome | Refused | Done | Told | Status
_T = TypeVar("_T")


def digest_of(tiers: Sequence[Mapping[str, object]]) -> str:
    """Return one word for the settings of tiers, which may hold secrets."""
    plain = msgspec.json.encode(list(tiers), order="deterministic")
    return hashlib.sha256(plain).hexdigest()


def encode_frame(message: ToAgent | FromAgent) -> bytes:
    """Return a message as it travels."""
    payload = msgspec.msgpack.encode(message)
    return FRAME_HEADER.pack(len(payload)) + payload


def frame_bytes(header: bytes) -> int:
    """
    Return how long the message behind a header is.

    Raises:
        MessageError: Longer than any of ours.
    """
    nbytes: int = FRAME_HEADER.unpack(header)[0]
    if nbytes > MAX_FRAME_BYTES:
        raise MessageError(f"a message of {nbytes} bytes, more than {MAX_FRAME_BYTES}")
    return nbytes


def decode_frame(payload: bytes, decoder: "msgspec.msgpack.Decoder[_T]") -> _T:
    """
    Return the message in a frame.

    Raises:
        MessageError: There is none that the decoder knows.
    """
    try:
        return decoder.decode(payload)
    except DECODE_ERRORS as exc:
        raise MessageError(f"not a message of this protocol: {exc}") from exc


def within(directory_fd: int, name: str) -> Path:
    """Return a short path of a file in an open directory: a socket's may not be long."""
    return Path(f"/proc/self/fd/{directory_fd}/{name}")


def check_media(message: FromAgent, num_tiers: int) -> None:
    """
    See that what is told is of tiers that there are: who hears it counts on that.

    Raises:
        MessageError: It is not.
    """
    media: Iterable[int] = ()
    if isinstance(message, Done):
        media = message.media
    elif isinstance(message, Told):
        media = (entry.medium for entry in message.entries)
    if not all(0 <= medium <= num_tiers for medium in media):
        raise MessageError(f"it tells of a tier behind the last of {num_tiers}")
