# SPDX-License-Identifier: Apache-2.0
"""
Which rank holds which part of a block, and the key space that all ranks share.

A *shard* is a rank's part of a block. Ranks that hold identical parts are *replicas*
of one shard: it is stored once, they take turns in saving it, and all of them load it.
Ranks are numbered by pipeline stage, prefill-context rank and tensor rank, the last
counting fastest.

Stages have layers of their own, and the scheduler is told of the first stage's only.
So each rank tells its facts, and the scheduler decides the key space from all of them:
what must be equal is compared, and the layouts of all shards become one fingerprint.
"""

import hashlib

import attrs

from ucm.blocks import KeySpace, ShardId
from ucm.errors import ConfigError, LayoutError
from ucm.layout import GroupLayout, KVLayout

__all__ = [
    "Agreement",
    "GroupFacts",
    "RankFacts",
    "Topology",
    "facts_of",
]

_KNOWN_TO_RANKS = ("layout", "parallel", "kv_dtype", "settings")
"""Fields of a key space that ranks know better: the scheduler has the layers of the
first rank, and the engine settles in its workers how tokens are interleaved, and which
type a KV cache has that is to be the model's own."""


@attrs.frozen(kw_only=True)
class Topology:
    """
    The ranks of an engine.

    Args:
        tensor: Tensor-parallel ranks.
        replicas: Consecutive tensor ranks that hold identical parts of every block.
        stages: Pipeline stages.
        prefill_context: Ranks that share the work of a prefill. Each is taken to hold
            a part of its own.
        decode_context: Ranks over which the tokens of a block are spread; they are
            some of the ranks above.
        interleave: Consecutive tokens of a block on one of these.
    """

    tensor: int = 1
    replicas: int = 1
    stages: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    interleave: int = 1

    def __attrs_post_init__(self) -> None:
        if self.replicas < 1 or self.tensor % self.replicas:
            raise ConfigError(
                "kv_tp_replicas",
                self.replicas,
                f"{self.tensor} tensor ranks are no multiple of it",
                "Serve without kv_connector=UCMConnector.",
            )

    @property
    def is_context_parallel(self) -> bool:
        """Whether ranks share the tokens of a request."""
        return self.prefill_context * self.decode_context > 1

    @property
    def num_ranks(self) -> int:
        """Workers that each carry out every order and report on it."""
        return self.stages * self.prefill_context * self.tensor

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """The distinct parts of which each stored block consists."""
        return tuple(map(ShardId, range(self.num_ranks // self.replicas)))

    def shard_of(self, rank: int) -> ShardId:
        """Return which part of a block a rank holds."""
        return ShardId(rank // self.replicas)

    def saves(self, rank: int, transfer_id: int) -> bool:
        """Return whether it is this replica's turn to save."""
        return transfer_id % self.replicas == rank % self.replicas

    @property
    def parallel(self) -> str:
        """
        Return what of the ranks decides the bytes of shards, for the key space.

        Tensor ranks count as shards: what one rank alone holds, or several replicas of
        it, is the same. Ranks that repeat a head without the engine saying so count.
        """
        shape = {
            "shards": len(self.shards),
            "pp": self.stages,
            "pcp": self.prefill_context,
            "dcp": self.decode_context,
            "interleave": self.interleave,
        }
        return ",".join(f"{name}={size}" for name, size in shape.items())


@attrs.frozen(kw_only=True)
class GroupFacts:
    """
    A group as one rank knows it.

    Args:
        shape: What all ranks must have alike, by name: kind, tokens of a block, window.
        block_bytes: Bytes of this rank's part of a block.
    """

    shape: dict[str, str]
    block_bytes: int


@attrs.frozen(kw_only=True)
class RankFacts:
    """
    What a rank tells the scheduler before the first request.

    Args:
        rank: Which.
        keyspace: What it would store under if it were alone: with the layout of its
            own layers.
        groups: By group.
        slot_bytes: Of the slots that it asks the store for. In a store with slots of
            several sizes those of another size are not looked at.
        settings: What its environment sets, by variable, as far as all must be
            configured alike: each process reads it itself.
        place: Where its store is; ranks of one place share it.
    """

    rank: int
    keyspace: KeySpace
    groups: tuple[GroupFacts, ...]
    slot_bytes: int
    settings: dict[str, str] = attrs.Factory(dict)
    place: str = ""


def facts_of(
    rank: int,
    keyspace: KeySpace,
    layout: KVLayout,
    slot_bytes: int,
    settings: dict[str, str] | None = None,
    place: str = "",
) -> RankFacts:
    """Return what a rank, or the scheduler as if it were one, has to tell."""
    return RankFacts(
        rank=rank,
        keyspace=keyspace,
        groups=tuple(
            GroupFacts(shape=_shape_of(group), block_bytes=group.block_bytes)
            for group in layout.groups
        ),
        slot_bytes=slot_bytes,
        settings=settings or {},
        place=place,
    )


def _shape_of(group: GroupLayout) -> dict[str, str]:
    names = [name for name in attrs.fields_dict(GroupLayout) if name != "rows"]
    return {name: str(getattr(group, name)) for name in names}


class Agreement:
    """
    What the ranks have told so far, and what it makes together.

    Args:
        topology: The ranks.
        own: As the scheduler knows the engine, which is of one rank only.
    """

    __slots__ = ("_own", "_ranks", "_topology")

    def __init__(self, topology: Topology, own: RankFacts) -> None:
        self._topology = topology
        self._own = own
        self._ranks: dict[int, RankFacts] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have told."""
        return len(self._ranks) == self._topology.num_ranks

    def add(self, facts: RankFacts) -> None:
        """
        Take note of a rank's facts; only the first time that it tells.

        Raises:
            LayoutError: It disagrees with the scheduler, or with another rank, about
                what must be equal; names ranks, field and both values.
        """
        if not 0 <= facts.rank < self._topology.num_ranks:
            num_ranks = self._topology.num_ranks
            raise LayoutError(
                f"rank {facts.rank} tells its facts, of {num_ranks} ranks"
            )
        _compare(self._own, facts)
        shard_of = self._topology.shard_of
        for other in self._ranks.values():
            differs = facts.keyspace.diff(other.keyspace)
            if shard_of(other.rank) != shard_of(facts.rank):
                differs.pop("layout", None)
            for field, (theirs, ours) in differs.items():
                raise _disagreement(
                    facts.rank, field, theirs, f"rank {other.rank}", ours
                )
        self._ranks.setdefault(facts.rank, facts)

    def keyspace(self) -> KeySpace:
        """Return the key space under which all ranks store, once all have told."""
        layouts = {
            self._topology.shard_of(facts.rank): facts.keyspace.layout
            for facts in self._ranks.values()
        }
        texts = [layouts[shard] for shard in self._topology.shards]
        layout = texts[0]
        if len(set(texts)) > 1:
            layout = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return attrs.evolve(self._ranks[0].keyspace, layout=layout)

    def block_bytes(self) -> list[int]:
        """Return by group the bytes of the largest part of a block of any rank."""
        groups = [facts.groups for facts in self._ranks.values()]
        return [
            max(g.block_bytes for g in of_ranks)
            for of_ranks in zip(*groups, strict=True)
        ]

    def ranks_elsewhere(self) -> tuple[int, ...]:
        """Return the ranks whose store is not the scheduler's."""
        return tuple(
            rank
            for rank, facts in sorted(self._ranks.items())
            if facts.place != self._own.place
        )

    def part_bytes(self) -> dict[ShardId, list[int]]:
        """Return the bytes of each part of a block in the scheduler's store, by group."""
        return {
            self._topology.shard_of(rank): [group.block_bytes for group in facts.groups]
            for rank, facts in self._ranks.items()
            if facts.place == self._own.place
        }


def _compare(own: RankFacts, facts: RankFacts) -> None:
    """Refuse a rank that differs in what the scheduler knows as well."""
    for field, (theirs, ours) in facts.keyspace.diff(own.keyspace).items():
        if field not in _KNOWN_TO_RANKS:
            raise _disagreement(facts.rank, field, theirs, "the scheduler", ours)
    _equal(facts, "slot_bytes", facts.slot_bytes, own.slot_bytes)
    for name in sorted(facts.settings.keys() | own.settings.keys()):
        _equal(facts, name, facts.settings.get(name), own.settings.get(name))
    _equal(facts, "groups", len(facts.groups), len(own.groups))
    for at, (group, mine) in enumerate(zip(facts.groups, own.groups, strict=True)):
        for name in sorted(group.shape.keys() | mine.shape.keys()):
            _equal(
                facts,
                f"{name} of group {at}",
                group.shape.get(name),
                mine.shape.get(name),
            )


def _equal(facts: RankFacts, field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise _disagreement(facts.rank, field, theirs, "the scheduler", ours)


def _disagreement(
    rank: int, field: str, theirs: object, other: str, ours: object
) -> LayoutError:
    return LayoutError(
        f"rank {rank} has {field}={theirs!r}, {other} has {ours!r}: all must see the "
        "same model files, settings and machine type"
    )
