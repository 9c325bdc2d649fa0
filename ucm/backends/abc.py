# SPDX-License-Identifier: Apache-2.0
"""
What a backend of KV blocks promises.

A backend is a handful of asynchronous batch verbs. They are awaited on the agent's loop and
never block it; a client that blocks is bridged inside of the backend, by threads of its own
whose number is bounded. A call covers many blocks, and tells of each what became of it: half of
a batch may be well. Nothing is raised for what is wrong with a block or with the other side;
what is raised is a bug, which an agent tells of, and no answer. Deadlines are the caller's: a
verb may be cancelled at any await, and then leaves nothing half visible, no file, no task; memory
that a native client may still write to is given back only when it no longer can.

A block is *sealed*: its bytes with the checksum of ``block_checksum``, which is also what seals
it in a slab. The checksum travels with the bytes (``ucm.backends.envelope``), and whoever gets a
block compares it before anybody sees the block. A backend stores what it is given and judges nothing,
unless it says that it ``verifies``.

What can be configured as a tier has a class method ``open_configured(settings, key)``, as
``ucm.backends.opening`` calls it.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import msgspec

from ucm.blocks import PackedKey
from ucm.seals import block_checksum

__all__ = [
    "Advice",
    "Backend",
    "BackendCapabilities",
    "BackendStats",
    "Fetched",
    "Presence",
    "Sealed",
    "Verdict",
    "block_checksum",
]


class Presence(enum.Enum):
    """Whether a backend has a block."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """It could not be asked: neither a hit nor a miss."""
    AWAY = "away"
    """One of several servers could not be asked, whose affair it is; others answer. The backend stops
    asking that one by itself. A breaker counts it for nothing, and tells ``UNKNOWN``."""


class Verdict(enum.StrEnum):
    """What became of one block of a call; a label of metrics, so the list is closed."""

    DONE = "done"
    PRESENT = "present"
    """Put: it was there already, and stays as it was."""
    ABSENT = "absent"
    """Get, delete: it is not there."""
    FULL = "full"
    """Put: there is no room, and none was made."""
    GARBAGE = "garbage"
    """Get: what is there is no block of this key: foreign, cut, too long, damaged. Put, where that
    ``verifies``: the bytes are not those of the checksum, and nothing was stored."""
    UNAVAILABLE = "unavailable"
    """The other side did not answer, or refused to; it may have done what was asked."""
    AWAY = "away"
    """As of ``Presence``, or that server takes nothing; put, also: another writer has begun with the block. A
    breaker tells ``UNAVAILABLE``."""


class Sealed(msgspec.Struct, frozen=True, eq=False):
    """
    One block to be put.

    Args:
        key: Its packed key.
        data: Its bytes, for reading; the caller's until the call has ended.
        checksum: As ``block_checksum`` says.
    """

    key: PackedKey
    data: memoryview
    checksum: int


class Fetched(NamedTuple):
    """
    What became of one block that was to be got.

    Args:
        verdict: ``DONE``: the whole target was written, with these bytes' checksum beside
            it as it was stored, not compared yet.
        checksum: As it was put; 0 unless done.
        digest: ``block_checksum`` of what lies in the target, where code of this package has
            computed it in this process, over the target, behind the last write to it; else
            None, and whoever asked computes it. It is what seals the block, so it is never what
            another side has told, nor what a backend passes on that has changed the bytes.
            One that is wrong shows no wrong block: whoever loads it compares it again.
    """

    verdict: Verdict
    checksum: int = 0
    digest: int | None = None


@attrs.frozen(kw_only=True)
class BackendCapabilities:
    """What a backend can do, as a value."""

    medium: str
    """A word for metrics and events, such as ``disk`` or ``s3``."""
    shared: bool
    """Other machines see the blocks."""
    durable: str
    """What a block survives that was put: ``none``, ``process``, ``power`` or ``node``."""
    max_block_bytes: int
    """Larger ones are refused as ``FULL``."""
    batch_blocks: int
    """Blocks per call that serve it best; more are allowed."""
    in_flight: int
    """Calls at a time that serve it best."""
    batch_bytes: int = 32 << 20
    """Bytes per call that serve it best, if it has more blocks than one; an agent gives no more than this."""
    verifies: bool = False
    """A put holds the bytes that it moves against their checksum: who puts need not read them before."""
    creates: bool = False
    """A put finds out by itself which blocks are there: who puts need not look at each."""
    gives_up_s: float = 0.0
    """Seconds after which it gives a request up by itself, and learns from that: an agent whose
    ``timeout.tier`` is no longer is refused, as it would end each call before. 0: it learns nothing."""


@attrs.frozen(kw_only=True)
class BackendStats:
    """Occupancy as far as it is known, and totals since it was opened."""

    blocks: int | None = None
    nbytes: int | None = None
    capacity_bytes: int | None = None
    evicted_blocks_total: int = 0
    swept_total: int = 0
    """Orphans and damaged remains that were removed."""


class Advice(NamedTuple):
    """What should be set otherwise on the other side of a backend, for people."""

    problem: str
    remedy: str


class Backend(ABC):
    """Keeps sealed blocks by packed key. See the module's text."""

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities:
        """What it can do; constant while it is open."""

    @property
    def away(self) -> Sequence[str]:
        """Names of those of its servers that it does not ask, as they do not answer."""
        return ()

    @property
    def refusing(self) -> Sequence[str]:
        """Names of those that answer and take no blocks, so that it puts none there for a while."""
        return ()

    @property
    def trouble(self) -> str:
        """Why the last call had no answer, without secrets; empty if it had one, or nobody knows."""
        return ""

    async def attend(self) -> None:  # noqa: B027 - most need none
        """Do what no call waits for, such as to look for who is away; until it is cancelled."""

    async def advice(self) -> Sequence[Advice]:
        """Return what of the other side's own settings is no good for blocks; ``ucm doctor`` asks."""
        return ()

    async def register(self, memory: Sequence[memoryview]) -> None:  # noqa: B027 - most need none
        """Make memory known from which and into which blocks will move, where that helps."""

    def watch(
        self, tell: Callable[[PackedKey, bool], None]
    ) -> Sequence[PackedKey] | None:
        """
        Tell from now on of each block that comes (True) or goes (False), for whatever reason.

        Args:
            tell: Called on the loop, in the order in which a look-up would see it.

        Returns:
            What is there; None: it does not know of all that comes and goes, and tells nothing.
        """
        return None

    @abstractmethod
    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Return for each key whether its block is there."""

    @abstractmethod
    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """
        Copy blocks into memory.

        Args:
            keys: Distinct keys.
            targets: Writable, one per key, as long as its block must be; a block of
                another length is ``GARBAGE``. What is in one whose verdict is not ``DONE``
                is garbage.
        """

    @abstractmethod
    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """
        Store blocks; each becomes visible whole, or not at all.

        A block that is there stays as it is: equal keys have equal bytes.

        Args:
            blocks: Their keys are distinct.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove blocks, for whoever would look for them from now on."""

    async def stats(self) -> BackendStats:
        """Return occupancy and totals; as it stands here, that nothing is known."""
        return BackendStats()

    @abstractmethod
    async def aclose(self) -> None:
        """
        Let go of everything, for a few seconds at most. Idempotent.

        Any later verb answers ``UNAVAILABLE`` or ``UNKNOWN``.
        """
