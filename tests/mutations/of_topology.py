# SPDX-License-Identifier: Apache-2.0
"""Mutants of who stores what, and under which key."""

from tests.mutations.mutant import Mutant

__all__ = ["TOPOLOGY"]

_RANKS = "ucm/ranks.py"
_WORKER = "ucm/integration/vllm/worker.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_ADAPTER = "ucm/scheduler/adapter.py"
_SHAPES = "tests/integration/vllm/test_topology.py"
_FAILURES = "tests/integration/vllm/test_topology_failures.py::TestRows"
_SETUP = "tests/integration/vllm/test_setup.py::TestSetup"
_ROLES = "tests/integration/vllm/test_roles.py"

TOPOLOGY = (
    Mutant(
        name="prefill_ranks_of_older_engines_hold_all_tokens",
        why="An engine before vLLM 0.26 with prefill context ranks is refused by a riddle.",
        file="ucm/integration/vllm/compat.py",
        find='    return decode if has("whole_prefill") else decode * prefill\n',
        replace="    return decode\n",
        killers=(
            f"{_SETUP}::test_blocks_are_spread_over_prefill_ranks_where_the_engine_does_so",
        ),
    ),
    Mutant(
        name="interleaving_of_prefill_ranks_is_in_no_key",
        why="Ranks load the tokens of others: prefill ranks that cut blocks in another way share keys.",
        file="ucm/integration/vllm/topology.py",
        find="    is_spread_out = token_ranks(parallel) > 1\n",
        replace="    is_spread_out = parallel.decode_context_parallel_size > 1\n",
        killers=(
            f"{_SETUP}::test_blocks_are_spread_over_prefill_ranks_where_the_engine_does_so",
        ),
    ),
    Mutant(
        name="states_of_older_engines_are_spread",
        why="vLLM 0.30 with decode context ranks computes from states that were loaded elsewhere.",
        file="ucm/integration/vllm/compat.py",
        find='    return all(kind_of(one).__name__ != "MambaSpec" for one in layer_specs(spec))\n',
        replace="    return True\n",
        killers=(f"{_SHAPES}::TestDecodeContext::test_states_are_whole_on_every_rank",),
    ),
    Mutant(
        name="slots_of_other_sizes_agree",
        why="A stage stores where nobody looks: nothing is ever found, and nobody is told.",
        file="ucm/ranks.py",
        find='    _equal(facts, "slot_bytes", facts.slot_bytes, own.slot_bytes)\n',
        replace="",
        killers=(
            (
                "tests/integration/vllm/test_topology.py::TestAgreement"
                "::test_ranks_that_ask_for_other_slots_are_refused"
            ),
        ),
    ),
    Mutant(
        name="rank_saves_under_shard_0",
        why="All ranks write one key, and each loads another one's heads.",
        file=_RANKS,
        find="        return ShardId(rank // self.replicas)\n",
        replace="        return ShardId(0)\n",
        killers=(
            "tests/integration/vllm/test_worker_orders.py::TestBlocks::test_rank_saves_under_its_own_shard",
            f"{_SHAPES}::TestShards::test_each_tensor_rank_has_a_part_of_its_own",
        ),
    ),
    Mutant(
        name="every_replica_saves",
        why="Each replica copies and reserves what another one stores.",
        file=_RANKS,
        find="        return transfer_id % self.replicas == rank % self.replicas\n",
        replace="        return True\n",
        killers=(
            f"{_SHAPES}::TestShards::test_one_replica_saves_and_they_take_turns",
            f"{_FAILURES}::test_skipped_save_is_told_like_any_other",
        ),
    ),
    Mutant(
        name="first_replica_saves_all",
        why="One rank copies for all, and the others' copy threads idle.",
        file=_RANKS,
        find="        return transfer_id % self.replicas == rank % self.replicas\n",
        replace="        return rank % self.replicas == 0\n",
        killers=(f"{_SHAPES}::TestShards::test_one_replica_saves_and_they_take_turns",),
    ),
    Mutant(
        name="skipped_save_not_released",
        why="Blocks that a replica never read are held for ever.",
        file="ucm/progress.py",
        find="        self.outbox.released.append(order.transfer_id)\n        self.outbox.settled",
        replace="        self.outbox.settled",
        killers=(f"{_FAILURES}::test_skipped_save_is_told_like_any_other",),
    ),
    Mutant(
        name="skipped_save_not_settled",
        why="A ticket stays open, and its blocks are never saved again.",
        file="ucm/progress.py",
        find="        self.outbox.settled_saves.append(order.transfer_id)\n\n    def begin_loads",
        replace="\n    def begin_loads",
        killers=(f"{_FAILURES}::test_skipped_save_is_told_like_any_other",),
    ),
    Mutant(
        name="one_shard_looked_up",
        why="A block of which a rank could not store its part is loaded as a whole.",
        file="ucm/integration/vllm/setup.py",
        find="        shards=self.topology.shards,\n",
        replace="        shards=self.topology.shards[:1],\n",
        killers=(f"{_FAILURES}::test_row_that_fails_on_one_rank_hides_the_block",),
    ),
    Mutant(
        name="stages_share_the_first_layout",
        why="Engines whose later stages have other layers share keys.",
        file=_RANKS,
        find="        if len(set(texts)) > 1:\n",
        replace="        if not texts:\n",
        killers=(f"{_SHAPES}::TestAgreement::test_stages_make_one_key_space",),
    ),
    Mutant(
        name="interleaving_left_out",
        why="A rank loads tokens that belong to another one.",
        file=_RANKS,
        find='            "interleave": self.interleave,\n',
        replace="",
        killers=(
            f"{_SHAPES}::TestParallel::test_interleaving_counts_only_where_tokens_are_spread",
        ),
    ),
    Mutant(
        name="ranks_not_compared",
        why="A rank with other settings stores what nobody will ever find.",
        file=_RANKS,
        find="        _compare(self._own, facts)\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_halves.py::TestStart::test_ranks_must_agree_with_the_scheduler",
            f"{_SHAPES}::TestAgreement::test_ranks_that_disagree_are_refused_with_both_values",
        ),
    ),
    Mutant(
        name="replicas_not_compared",
        why="A rank loads what a replica with other layers has stored.",
        file=_RANKS,
        find="            if shard_of(other.rank) != shard_of(facts.rank):\n",
        replace="            if other.rank != facts.rank:\n",
        killers=(f"{_SHAPES}::TestAgreement::test_replicas_that_differ_are_refused",),
    ),
    Mutant(
        name="saved_before_the_ranks_agree",
        why="Blocks are stored under a key space that is not the engine's.",
        file=_ADAPTER,
        find="is_keyed = bool(self._matcher.keyspace_digest)",
        replace="is_keyed = True",
        killers=(
            f"{_ROLES}::TestInsideOfAnother::test_handshakes_of_another_child_are_passed_over",
        ),
    ),
    Mutant(
        name="late_handshake_not_told",
        why="Inside of another connector nothing would ever be found or saved.",
        file=_WORKER,
        find="        handshakes, self._untold = self._untold, ()\n",
        replace="        handshakes: tuple[RankHandshake, ...] = ()\n",
        killers=(
            f"{_ROLES}::TestInsideOfAnother::test_handshakes_of_another_child_are_passed_over",
        ),
    ),
    Mutant(
        name="late_disagreement_ends_the_engine",
        why="A rank of another release takes the engine with it while it serves.",
        file=_SCHEDULER,
        find="        except (ConfigError, LayoutError, MessageError) as exc:\n",
        replace="        except MessageError as exc:\n",
        killers=(
            f"{_ROLES}::TestInsideOfAnother::test_ranks_that_disagree_while_serving_end_our_work_only",
        ),
    ),
    Mutant(
        name="consumer_saves_at_the_door",
        why="An engine that is to load only fills the store.",
        file="ucm/integration/vllm/setup.py",
        find="        saves=self.mode.saves is not Saves.NOTHING,\n",
        replace="",
        killers=(
            f"{_ROLES}::TestRoles::test_consumer_saves_what_it_decodes_if_it_may[False-0]",
        ),
    ),
    Mutant(
        name="producer_loads_at_the_door",
        why="An engine that is to save only waits for loads.",
        file=_SCHEDULER,
        find="        if self._setup.mode.loads is Loads.NOTHING:\n",
        replace="        if False:\n",
        killers=(f"{_ROLES}::TestRoles::test_producer_saves_and_never_loads",),
    ),
    Mutant(
        name="slots_of_the_own_stage",
        why="Stages with fewer layers make a slab that the others cannot use.",
        file="ucm/integration/vllm/topology.py",
        find="    return -(-block_bytes * max(layers) // layers[parallel.rank // per_stage])\n",
        replace="    return block_bytes\n",
        killers=(f"{_SHAPES}::TestStages::test_all_stages_have_slots_for_the_largest",),
    ),
    Mutant(
        name="scheduler_decides_the_slots",
        why="A scheduler, which asks for no memory, makes a slab smaller that fits all.",
        file="ucm/stores/slab/_opened.py",
        find="                None if takes_it else wanted,\n",
        replace="                wanted,\n",
        killers=(
            "tests/stores/test_slab_arena.py::TestCapacity::test_scheduler_changes_nothing",
        ),
    ),
)
