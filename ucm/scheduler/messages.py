# SPDX-License-Identifier: Apache-2.0
"""
What scheduler and workers tell each other, once per engine step.

``StepPlan`` goes from the scheduler to every worker, ``StepReport`` back from each
rank. Both have an explicit encoding (MessagePack of typed records behind a version
byte), so that nothing is unpickled, a message of another version is refused by name,
and its size is bounded: plans carry block ids and block hashes, never tokens or
tensors.
"""

import enum
from typing import Final, TypeVar

import msgspec
import numpy as np

from ucm.blocks import Owner
from ucm.decoding import DECODE_ERRORS
from ucm.errors import MessageError
from ucm.reasons import Reason

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MESSAGE_VERSION",
    "Deferral",
    "Failure",
    "Forgotten",
    "PrefixWant",
    "SpanOrder",
    "StepPlan",
    "StepReport",
    "TransferKind",
    "WeightsNews",
    "decode_plan",
    "decode_report",
    "encode",
]

MESSAGE_VERSION: Final = 7
MAX_MESSAGE_BYTES: Final = 8 << 20


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is as it mostly is takes no room in a message."""


class TransferKind(enum.IntEnum):
    """Which way the bytes go."""

    SAVE = 0
    LOAD = 1


class SpanOrder(_Record, frozen=True, kw_only=True):
    """
    One ticket that every rank is to carry out on its own shard.

    Args:
        transfer_id: Unique within the scheduler process; the same on all ranks.
        kind: Save or load.
        owners: Whose blocks, in the order of the blocks. A load has one owner; a save
            may carry the blocks of several requests.
        group_id: KV cache group.
        block_ids: ``[n]`` blocks in the engine's pool.
        hashes: ``n`` block hashes of equal length, back to back.
    """

    transfer_id: int
    kind: TransferKind
    owners: tuple[Owner, ...]
    group_id: int
    block_ids: tuple[int, ...]
    hashes: bytes

    def __post_init__(self) -> None:
        if not self.block_ids or len(self.hashes) % len(self.block_ids):
            raise MessageError(
                f"transfer {self.transfer_id}: {len(self.hashes)} bytes of hashes for "
                f"{len(self.block_ids)} blocks"
            )
        owned = [owner.num_blocks for owner in self.owners]
        if owned != [len(self.block_ids)] and (
            sum(owned) != len(self.block_ids) or min(owned) < 1
        ):
            raise MessageError(
                f"transfer {self.transfer_id}: owners of {owned} blocks for "
                f"{len(self.block_ids)} blocks"
            )

    @property
    def request_id(self) -> str:
        """Of the first owner."""
        return self.owners[0].request_id

    @property
    def generation(self) -> int:
        """Of the first owner."""
        return self.owners[0].generation

    def split_hashes(self) -> list[bytes]:
        """Return one hash per block."""
        size = len(self.hashes) // len(self.block_ids)
        split: list[bytes] = np.frombuffer(self.hashes, f"V{size}").tolist()
        return split


class Deferral(_Record, frozen=True, kw_only=True):
    """A finished request whose blocks the engine holds until every rank reports it."""

    request_id: str
    generation: int


class PrefixWant(_Record, frozen=True, kw_only=True):
    """
    Blocks of a request that ranks on other machines are to have fetched and kept.

    Args:
        number: Its name; counts up.
        keyspace_digest: Of its keys; a plan's own is nobody's while weights are in doubt.
        ranks: Who is asked, each for its own part.
        start: Token with which the first block begins.
        stop: Token behind the last block.
        hashes: The engine's block hashes of these tokens.
        seconds: After which an answer is of no use.
        hold_s: For how long what was found has to stay then.
        compute_s: How long computing these tokens would take; 0: not known.
        only: Of which tiers, each empty for any; None: all.
        priority: The lowest is served first.
        tenant: Whose share of the store its blocks take; 0: nobody's.
    """

    number: int
    keyspace_digest: bytes
    ranks: tuple[int, ...]
    start: int
    stop: int
    hashes: tuple[bytes, ...]
    seconds: float
    hold_s: float
    compute_s: float = 0.0
    only: tuple[tuple[str, str], ...] | None = None
    priority: int = 0
    tenant: int = 0


class Forgotten(_Record, frozen=True):
    """
    Blocks that ranks on other machines are to delete, each of its own part.

    Args:
        keyspace_digest: Of their keys.
        ranks: Who is told.
        start: Token with which the first block begins.
        hashes: The engine's block hashes from there on.
    """

    keyspace_digest: bytes
    ranks: tuple[int, ...]
    start: int
    hashes: tuple[bytes, ...]


class StepPlan(_Record, frozen=True, kw_only=True):
    """
    The orders of one engine step.

    Args:
        step: Counts up by one per plan; a worker that sees one twice acts once.
        keyspace_digest: Key space of all orders of this plan.
        loads: Tickets to load.
        unfinished: The request of whose loads more come with the next plan; empty if
            there is none.
        saves: Tickets to save once this step's forward pass has run.
        fences: Save tickets whose blocks the forward pass, or a load, overwrites:
            their device reads must be over before it.
        overwritten: Save tickets whose blocks the engine clears or copies onto by
            itself. Some engines do so before they call any hook.
        lost: Of tickets in *fences* and *overwritten* that have several owners, the
            positions of the blocks that are overwritten. Of any other, all are.
        deferred: Requests that finished since the last plan and wait for release.
        epoch: Grows each time that the weights may have changed; a worker that sees a
            new one reads its weights and answers.
        is_idle: The step computes nothing.
        traces: By ticket, the W3C ``traceparent`` of the request that it is for, where
            that brought one.
        wants: What ranks on other machines are asked for.
        dropped: Former wants whose blocks are of no use any more.
        forgotten: What ranks on other machines are to delete.
    """

    step: int
    epoch: int = 0
    keyspace_digest: bytes = b""
    loads: tuple[SpanOrder, ...] = ()
    unfinished: str = ""
    saves: tuple[SpanOrder, ...] = ()
    fences: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    lost: dict[int, tuple[int, ...]] = {}
    deferred: tuple[Deferral, ...] = ()
    is_idle: bool = False
    traces: dict[int, str] = {}
    wants: tuple[PrefixWant, ...] = ()
    dropped: tuple[int, ...] = ()
    forgotten: tuple[Forgotten, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether a worker has nothing to do for it."""
        orders = self.loads or self.saves or self.fences
        return not (orders or self.overwritten or self.deferred)


class Failure(_Record, frozen=True, kw_only=True):
    """
    A load that did not succeed; its request is recomputed.

    Args:
        transfer_id: The ticket.
        request_id: Whose.
        generation: Which life.
        group_id: Group of the ticket.
        bad_hash: The block hash that failed; empty when no single block is to blame.
        reason: Why.
    """

    transfer_id: int
    request_id: str
    generation: int
    group_id: int
    bad_hash: bytes
    reason: Reason


class WeightsNews(_Record, frozen=True, kw_only=True):
    """
    What a rank knows of its weights.

    Args:
        epoch: The latest that it has seen in a plan.
        is_written: Whether somebody has written to its weights since it saw that.
        is_torn: Whether steps ran, before that, with weights that nobody has read.
        digest: Of its weights, read since then; empty when nothing can tell, None
            when it is not known yet.
        base: Of the weights of its start; empty when nothing can tell.
    """

    epoch: int
    is_written: bool = False
    is_torn: bool = False
    digest: bytes | None = None
    base: bytes = b""


class StepReport(_Record, frozen=True, kw_only=True):
    """
    What one rank has to tell since its last report.

    Args:
        rank: The reporting rank.
        released: Save tickets whose source blocks may be overwritten.
        quarantined: Save tickets whose device read never ended; not waited for.
        settled_saves: Save tickets whose blocks the store has now.
        unstored_saves: Save tickets that came to any other end.
        new_blocks: Of both, the tickets that stored blocks which were not there before,
            and how many.
        why_unstored: Why, of the first of *unstored_saves*; for people.
        loads_done: Load tickets that came to their end, failed ones included.
        failures: Details of failed loads.
        healthy: False once the worker's runtime has failed; the scheduler then plans
            nothing any more.
        weights: What is new about its weights.
        reached: By want, the token up to which its machine has its part.
    """

    rank: int
    released: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    settled_saves: tuple[int, ...] = ()
    unstored_saves: tuple[int, ...] = ()
    new_blocks: dict[int, int] = {}
    why_unstored: dict[int, Reason] = {}
    loads_done: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    healthy: bool = True
    weights: WeightsNews | None = None
    reached: dict[int, int] = {}


_Told = TypeVar("_Told", StepPlan, StepReport)
_ENCODER = msgspec.msgpack.Encoder()
_VERSION_BYTE = bytes([MESSAGE_VERSION])


def encode(message: StepPlan | StepReport) -> bytes:
    """
    Return the message's bytes.

    Raises:
        MessageError: It is longer than ``MAX_MESSAGE_BYTES``, a bug of ours: plans
            are made within ``ucm.scheduler.budget``, reports within an ``Outbox``.
    """
    data = _VERSION_BYTE + _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(data)} bytes are more than {MAX_MESSAGE_BYTES}")
    return data


def decode_plan(data: bytes) -> StepPlan:
    """
    Read a plan.

    Raises:
        MessageError: Another version, too long, or damaged.
    """
    return _decode(data, _PLAN_DECODER)


def decode_report(data: bytes) -> StepReport:
    """
    Read a report.

    Raises:
        MessageError: Another version, too long, or damaged.
    """
    return _decode(data, _REPORT_DECODER)


_PLAN_DECODER = msgspec.msgpack.Decoder(StepPlan)
_REPORT_DECODER = msgspec.msgpack.Decoder(StepReport)


def _decode(data: bytes, decoder: "msgspec.msgpack.Decoder[_Told]") -> _Told:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(data)} bytes are more than {MAX_MESSAGE_BYTES}")
    if data[:1] != _VERSION_BYTE:
        raise MessageError(
            f"message version {data[:1].hex() or 'none'} is not {MESSAGE_VERSION}; "
            "scheduler and workers run different releases of ucm"
        )
    try:
        return decoder.decode(memoryview(data)[1:])
    except DECODE_ERRORS as exc:
        raise MessageError(f"damaged message: {exc}") from exc
