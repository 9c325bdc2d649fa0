# SPDX-License-Identifier: Apache-2.0
"""Which rank holds what, and the one key space that all ranks make together."""

import attrs
import pytest

from tests.integration.vllm.kit import (
    cache_config,
    engine_config,
    full,
    plain_cache,
    state,
)
from ucm.blocks import BlockKey, GroupId, KeySpace
from ucm.errors import ConfigError, LayoutError, MessageError
from ucm.integration.vllm import compat
from ucm.integration.vllm.keyspace import keyspace_of
from ucm.integration.vllm.layout import layout_of
from ucm.integration.vllm.messages import RankHandshake
from ucm.integration.vllm.topology import is_spread, largest_stage, topology_of
from ucm.layout import KVLayout
from ucm.ranks import Agreement, RankFacts, Topology, facts_of


class FakeModel:
    """The part of an engine's model configuration that tells of layers."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def get_total_num_hidden_layers(self) -> int:
        """Return all of them."""
        return self.layers


def parallel(**sizes: object):
    """Return the engine's parallel configuration, with some sizes."""
    config = engine_config("m").parallel_config
    for name, size in sizes.items():
        assert hasattr(config, name)
        setattr(config, name, size)
    return config


def replicated(replicas: int):
    """Return the KV cache of a model of which consecutive ranks hold the same."""
    return cache_config((["a", "b"], full()), kv_tp_replicas=replicas)


def keyspace(layout: KVLayout, topology: Topology, **fields: str) -> KeySpace:
    """Return what a rank of these layers would store under alone."""
    plain = keyspace_of(engine_config("m"), layout, topology.parallel, "r1")
    return attrs.evolve(plain, **fields)


def stage(*layers: str, block_size: int = 16, **spec: object) -> KVLayout:
    """Return the layout of a pipeline stage with these layers."""
    return layout_of(cache_config((list(layers), full(block_size, **spec))))


def facts(rank: int, layout: KVLayout, topology: Topology, **fields: str) -> RankFacts:
    """Return what a rank of these layers tells."""
    return facts_of(rank, keyspace(layout, topology, **fields), layout, 4096)


def agreed(topology: Topology, *layouts: KVLayout) -> KeySpace:
    """Let ranks of these layouts agree, the last one telling first."""
    agreement = Agreement(topology, facts(0, layouts[0], topology))
    for rank in reversed(range(len(layouts))):
        assert not agreement.is_complete
        agreement.add(facts(rank, layouts[rank], topology))
    assert agreement.is_complete
    return agreement.keyspace()


class TestShards:
    def test_each_tensor_rank_has_a_part_of_its_own(self) -> None:
        """S4-17: without replicas every rank stores, and loads, its own part."""
        topology = topology_of(parallel(tensor_parallel_size=4), plain_cache())
        assert (0, 1, 2, 3) == topology.shards
        assert topology.shards == tuple(map(topology.shard_of, range(4)))
        assert all(topology.saves(rank, at) for rank in range(4) for at in range(9))

    @pytest.mark.parametrize("replicas", [1, 2, 4])
    def test_one_replica_saves_and_they_take_turns(self, replicas: int) -> None:
        """S4-17: of ranks that hold the same, exactly one saves each ticket, and over
        tickets each does."""
        config = parallel(tensor_parallel_size=4, pipeline_parallel_size=2)
        topology = topology_of(config, replicated(replicas))
        assert 8 == topology.num_ranks
        assert 8 // replicas == len(topology.shards)
        busy = set()
        for ticket in range(1, 9):
            savers = [rank for rank in range(8) if topology.saves(rank, ticket)]
            assert [*topology.shards] == [topology.shard_of(rank) for rank in savers]
            busy.update(savers)
        assert {*range(8)} == busy

    def test_replicas_are_neighbours_within_a_stage(self) -> None:
        """The last number of a rank is its tensor rank; stages share nothing."""
        topology = Topology(tensor=2, replicas=2, stages=2)
        assert [0, 0, 1, 1] == [topology.shard_of(rank) for rank in range(4)]

    def test_prefill_context_ranks_store_each_their_own(self) -> None:
        """Ranks that share a prefill are never taken for replicas."""
        config = parallel(prefill_context_parallel_size=2, tensor_parallel_size=2)
        topology = topology_of(config, replicated(2))
        assert (4, (0, 1)) == (topology.num_ranks, topology.shards)
        assert topology.is_context_parallel

    def test_replicas_that_do_not_divide_the_ranks_are_refused(self) -> None:
        """A number of replicas that cannot be is not guessed around."""
        with pytest.raises(ConfigError, match="kv_tp_replicas=3"):
            topology_of(parallel(tensor_parallel_size=4), replicated(3))

    def test_engine_that_hides_its_ranks_is_refused(self) -> None:
        """A scheduler that hears of one rank only cannot hold blocks for all."""
        config = parallel(distributed_executor_backend="external_launcher")
        with pytest.raises(ConfigError, match="external_launcher"):
            topology_of(config, plain_cache())

    def test_ranks_that_may_be_on_several_machines_are_known(self) -> None:
        """R-60: of Ray nobody knows where it puts ranks; replicas of engines are apart."""
        assert is_spread(parallel(nnodes=2, nnodes_within_dp=2))
        assert is_spread(parallel(distributed_executor_backend="ray"))
        assert not is_spread(parallel(nnodes=2))


class TestParallel:
    def test_replicas_count_once(self) -> None:
        """S4-17: a latent that one rank holds alone, or two alike, has one key."""
        alone = topology_of(parallel(), replicated(1))
        both = topology_of(parallel(tensor_parallel_size=2), replicated(2))
        assert alone.parallel == both.parallel
        assert agreed(alone, stage("a")) == agreed(both, stage("a"), stage("a"))

    def test_interleaving_counts_only_where_tokens_are_spread(self) -> None:
        """A setting that decides nothing moves no key."""
        plain = topology_of(parallel(), plain_cache())
        unused = topology_of(parallel(cp_kv_cache_interleave_size=8), plain_cache())
        spread = [
            topology_of(
                parallel(
                    tensor_parallel_size=2,
                    decode_context_parallel_size=2,
                    cp_kv_cache_interleave_size=size,
                ),
                plain_cache(),
            ).parallel
            for size in (1, 8)
        ]
        assert plain.parallel == unused.parallel
        assert 2 == len(set(spread) - {plain.parallel})

    @pytest.mark.parametrize(
        "change",
        [
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            {"prefill_context_parallel_size": 2},
            {"decode_context_parallel_size": 2},
        ],
    )
    def test_block_of_other_ranks_is_a_named_miss(self, change: dict[str, int]) -> None:
        """X-08: a block stored under another shape of ranks has another key, and the
        field that differs is named with both values."""
        here = topology_of(parallel(), plain_cache())
        there = topology_of(parallel(**change), plain_cache())
        mine, theirs = (keyspace(stage("a"), each) for each in (here, there))
        key = BlockKey(theirs.digest, GroupId(0), here.shard_of(0), bytes(32))
        assert key.explain(mine)["keyspace_matches"] is False
        assert {"parallel": (here.parallel, there.parallel)} == mine.diff(theirs)


class TestDecodeContext:
    def test_table_entry_stands_for_the_tokens_of_all_ranks(self) -> None:
        """A block table's entry counts the tokens of all ranks over which it is
        spread, while a rank's page stays as large as it was."""
        plain = layout_of(plain_cache())
        spread = layout_of(
            cache_config((["a", "b"], full()), hash_block_size=64), decode_context=4
        )
        (one,), (four,) = plain.groups, spread.groups
        assert (64, 64) == (four.block_tokens, spread.hash_block_tokens)
        assert one.block_bytes == four.block_bytes
        assert plain.fingerprint() != spread.fingerprint()

    def test_group_that_every_rank_holds_whole_is_not_stretched(self) -> None:
        """Groups that such ranks do not spread keep their tokens."""
        whole = cache_config((["a"], full(dcp_sharded=False)))
        assert 16 == layout_of(whole, decode_context=4).groups[0].block_tokens

    @pytest.mark.parametrize("since", [(0, 31), (99, 0)], ids=["newer", "older"])
    def test_states_are_whole_on_every_rank(
        self, monkeypatch: pytest.MonkeyPatch, since: tuple[int, int]
    ) -> None:
        """S4-17: no release spreads recurrent states, and 0.30 does not say so: blocks of them
        were taken for twice as many tokens, and loaded to where the engine does not look."""
        feature = attrs.evolve(compat.FEATURES["dcp_sharded"], since=since)
        monkeypatch.setitem(compat.FEATURES, "dcp_sharded", feature)
        hybrid = cache_config((["a"], full()), (["b"], state()), hash_block_size=16)
        layout = layout_of(hybrid, decode_context=2)
        assert [32, 16] == [group.block_tokens for group in layout.groups]


class TestAgreement:
    def test_stages_make_one_key_space(self) -> None:
        """Layers that differ by stage come into the layout, in the order of ranks."""
        topology = Topology(stages=2)
        first, second = stage("a", "b"), stage("c")
        together = agreed(topology, first, second)
        alone = keyspace(first, topology)
        assert {"layout"} == set(alone.diff(together))
        assert together == agreed(topology, first, second)
        assert together != agreed(topology, second, first)
        assert together != agreed(topology, first, stage("d"))

    def test_equal_ranks_keep_their_layout(self) -> None:
        """Tensor ranks that look alike are one layout, told by its own name."""
        topology = Topology(tensor=2)
        together = agreed(topology, stage("a"), stage("a"))
        assert stage("a").fingerprint() == together.layout

    def test_pages_of_different_sizes_are_known_from_the_ranks(self) -> None:
        """The scheduler is told of the first layer of such a group only; the ranks'
        own layouts decide."""
        topology = Topology()
        told, real = stage("a", "b"), stage("a", "b", head_size=16)
        agreement = Agreement(topology, facts(0, told, topology))
        agreement.add(facts(0, real, topology))
        assert real.fingerprint() == agreement.keyspace().layout
        assert [real.max_block_bytes] == agreement.block_bytes()

    def test_largest_part_of_a_block_is_known(self) -> None:
        """Tickets are cut for the rank with most layers."""
        topology = Topology(stages=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        for rank, layout in enumerate((stage("a"), stage("b", "c"))):
            agreement.add(facts(rank, layout, topology))
        assert [stage("b", "c").max_block_bytes] == agreement.block_bytes()

    @pytest.mark.parametrize("field", ["model", "weights", "hash_algorithm", "engine"])
    def test_ranks_that_disagree_are_refused_with_both_values(self, field: str) -> None:
        """X-08: what must be equal and is not is named, with rank and values."""
        topology = Topology(tensor=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        other = facts(1, stage("a"), topology, **{field: "another"})
        ours = getattr(keyspace(stage("a"), topology), field)
        with pytest.raises(LayoutError, match=f"rank 1 has {field}='another'") as error:
            agreement.add(other)
        assert repr(ours) in str(error.value)

    @pytest.mark.parametrize("field", ["kv_dtype", "settings"])
    def test_ranks_know_what_the_engine_settles_in_its_workers(
        self, field: str
    ) -> None:
        """R-05: a type that a worker settles while it loads the model is the ranks', and
        the scheduler's is not held against it; ranks that differ are refused."""
        topology = Topology(tensor=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        agreement.add(facts(0, stage("a"), topology, **{field: "settled"}))
        with pytest.raises(LayoutError, match=f"rank 1 has {field}='another', rank 0"):
            agreement.add(facts(1, stage("a"), topology, **{field: "another"}))
        agreement.add(facts(1, stage("a"), topology, **{field: "settled"}))
        assert "settled" == getattr(agreement.keyspace(), field)

    def test_ranks_of_other_block_sizes_are_refused(self) -> None:
        """Tokens of a hash and of a block are the same on all ranks."""
        topology = Topology(stages=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        with pytest.raises(LayoutError, match="rank 1 has block_tokens=32"):
            agreement.add(facts(1, stage("b", block_size=32), topology))
        coarse = layout_of(cache_config((["b"], full(32)), hash_block_size=16))
        with pytest.raises(LayoutError, match="block_tokens of group 0='32'"):
            agreement.add(facts(1, coarse, topology))

    def test_ranks_that_ask_for_other_slots_are_refused(self) -> None:
        """R-31: a store has slots of several sizes, and only one of them is looked up."""
        topology = Topology(stages=2)
        layout = stage("a")
        agreement = Agreement(topology, facts(0, layout, topology))
        other = attrs.evolve(facts(1, layout, topology), slot_bytes=8192)
        with pytest.raises(
            LayoutError, match="slot_bytes=8192, the scheduler has 4096"
        ):
            agreement.add(other)

    def test_rank_that_was_configured_otherwise_is_refused(self) -> None:
        """X-09: each process reads variables and files itself; what one of them read
        another way is named, before anything is stored."""
        topology = Topology(stages=2)
        layout = stage("a")
        own = attrs.evolve(
            facts(0, layout, topology), settings={"use_layerwise": "False"}
        )
        agreement = Agreement(topology, own)
        other = attrs.evolve(own, rank=1, settings={"use_layerwise": "True"})
        with pytest.raises(
            LayoutError, match="use_layerwise='True', the scheduler has 'False'"
        ):
            agreement.add(other)

    def test_ranks_with_other_groups_are_refused(self) -> None:
        """Every rank has a part of every group."""
        topology = Topology(stages=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        two = layout_of(cache_config((["b"], full()), (["c"], full())))
        with pytest.raises(LayoutError, match="rank 1 has groups=2"):
            agreement.add(facts(1, two, topology))

    def test_replicas_that_differ_are_refused(self) -> None:
        """What one rank stores for both must fit both."""
        topology = Topology(tensor=2, replicas=2)
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        agreement.add(facts(0, stage("a"), topology))
        with pytest.raises(LayoutError, match=r"rank 1 has layout=.*, rank 0 has"):
            agreement.add(facts(1, stage("b"), topology))

    def test_ranks_know_how_tokens_are_interleaved(self) -> None:
        """The engine settles it in its workers, where the scheduler does not see it;
        workers that differ are refused."""
        settled = Topology(tensor=2, decode_context=2, interleave=16)
        told = attrs.evolve(settled, interleave=1)
        agreement = Agreement(told, facts(0, stage("a"), told))
        agreement.add(facts(0, stage("a"), settled))
        with pytest.raises(LayoutError, match=r"rank 1 has parallel=.*, rank 0 has"):
            agreement.add(facts(1, stage("a"), told))
        agreement.add(facts(1, stage("a"), settled))
        assert settled.parallel == agreement.keyspace().parallel

    def test_rank_that_cannot_be_is_refused(self) -> None:
        """A number beyond the ranks is not taken for one of them."""
        topology = Topology()
        agreement = Agreement(topology, facts(0, stage("a"), topology))
        with pytest.raises(LayoutError, match="rank 1 tells its facts, of 1 ranks"):
            agreement.add(facts(1, stage("a"), topology))


class TestHandshake:
    def test_facts_survive_their_envelope(self) -> None:
        """What a rank tells arrives as it was told."""
        told = facts(3, stage("a", "b"), Topology(tensor=4))
        assert told == RankHandshake.of(told).facts()

    @pytest.mark.parametrize("payload", [b"", b"\xff", b"\1broken"])
    def test_damaged_facts_are_refused(self, payload: bytes) -> None:
        """Bytes of another release, or none, are no facts."""
        with pytest.raises(MessageError):
            RankHandshake(payload).facts()


class TestStages:
    @pytest.mark.parametrize(
        ("layers", "stages"), [(4, 2), (61, 4), (5, 4), (7, 2), (8, 1)]
    )
    def test_all_stages_have_slots_for_the_largest(
        self, layers: int, stages: int
    ) -> None:
        """Each rank knows its own layers only, and all come to the same size."""
        from vllm.distributed.utils import get_pp_indices

        sizes = set()
        for tensor in range(2):
            for at in range(stages):
                start, stop = get_pp_indices(layers, at, stages)
                config = parallel(
                    pipeline_parallel_size=stages,
                    world_size=2 * stages,
                    rank=2 * at + tensor,
                )
                own = (stop - start) * 1000
                sizes.add(largest_stage(own, FakeModel(layers), config))
        most = max(
            stop - start
            for start, stop in (
                get_pp_indices(layers, at, stages) for at in range(stages)
            )
        )
        assert {most * 1000} == sizes
