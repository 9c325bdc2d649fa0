# SPDX-License-Identifier: Apache-2.0
"""Mutants of what bridges releases of vLLM, and of what goes into vllm-ascend."""

from tests.mutations.mutant import Mutant

__all__ = ["ENGINES"]

_COMPAT = "ucm/integration/vllm/compat.py"
_KEYSPACE = "ucm/integration/vllm/keyspace.py"
_WORKER = "ucm/integration/vllm/worker.py"
_PATCHES = "ucm/integration/vllm_ascend/patches.py"
_TABLES = "tests/integration/vllm/test_compat.py::TestBlockTables"
_GROUPS = "tests/integration/vllm/test_compat.py::TestGroups"
_HASHES = "tests/integration/vllm/test_keyspace.py::TestHashAlgorithm"
_IDLE = "tests/integration/vllm/test_older_engines.py::TestIdleSteps"
_FAILED = "tests/integration/vllm/test_older_engines.py::TestFailures"
_GDN = "tests/integration/vllm_ascend/test_patches.py::TestGatedDeltaNet"
_APPLYING = "tests/integration/vllm_ascend/test_patches.py::TestApplying"

ENGINES = (
    Mutant(
        name="hybrid_on_an_old_release",
        why="Blocks that the engine has given away are saved; a failed load is silent.",
        file=_COMPAT,
        find='    if has("block_state") and has("failed_requests"):\n        return\n',
        replace="    if len(groups) < 3:\n        return\n",
        killers=(f"{_GROUPS}::test_what_an_old_release_cannot_tell_is_refused",),
    ),
    Mutant(
        name="resumed_table_kept",
        why="A resumed request is saved from blocks that are another's by now.",
        file=_COMPAT,
        find="if request_id in cached.resumed_req_ids or request_id not in self.kept:",
        replace="if request_id not in self.kept:",
        killers=(
            f"{_TABLES}::test_tables_are_kept_where_the_engine_does_not_give_them",
        ),
    ),
    Mutant(
        name="table_of_the_engine_grows",
        why="New block ids are put into the engine's own list.",
        file=_COMPAT,
        find="self.kept[new.req_id] = [list(table) for table in new.block_ids]",
        replace="self.kept[new.req_id] = list(new.block_ids)",
        killers=(
            f"{_TABLES}::test_what_is_handed_out_does_not_reach_the_engine_s_lists",
        ),
    ),
    Mutant(
        name="random_hashes_taken",
        why="Nothing is ever found after a restart, and nobody says why.",
        file="ucm/integration/vllm/preflight.py",
        find="    if not are_fixed:\n",
        replace="    if not algorithm:\n",
        killers=(f"{_HASHES}::test_engine_whose_hashes_are_random_is_refused",),
    ),
    Mutant(
        name="idle_saves_lost",
        why="Before vLLM 0.31 an idle step's saves never run, and hold their blocks.",
        file=_WORKER,
        find="            self.submit_saves()  # older",
        replace="            pass  # older",
        killers=(f"{_IDLE}::test_saves_and_deferrals_of_an_idle_step_are_not_lost",),
    ),
    Mutant(
        name="blocks_told_to_nobody",
        why="An engine that goes by blocks computes on what was never loaded.",
        file=_WORKER,
        find="if by_blocks or ",
        replace="if ",
        killers=(f"{_FAILED}::test_failed_load_is_told_by_blocks_to_who_asks_so",),
    ),
    Mutant(
        name="core_before_its_load",
        why="A linear-attention layer computes on states that are not loaded yet.",
        file=_PATCHES,
        find="        wait(self.prefix)\n        result = core(self, *args, **kwargs)\n",
        replace="        result = core(self, *args, **kwargs)\n        wait(self.prefix)\n",
        killers=(f"{_GDN}::test_core_runs_between_load_and_save",),
    ),
    Mutant(
        name="short_states_saved",
        why="A layer without its recurrent state is saved as if it were whole.",
        file=_PATCHES,
        find="if states is None or number < len(_STATES):",
        replace="if states is None or not number:",
        killers=(f"{_GDN}::test_missing_state_is_named",),
    ),
    Mutant(
        name="signature_not_compared",
        why="A core with other arguments is wrapped, and the model stops.",
        file=_PATCHES,
        find="    if takes != patch.takes:\n",
        replace="    if takes is None and patch.takes is not None:\n",
        killers=(f"{_APPLYING}::test_other_signature_is_refused_and_the_rest_holds",),
    ),
    Mutant(
        name="method_of_others_reverted",
        why="What somebody else has put in place since is lost.",
        file=_PATCHES,
        find="if vars(owner).get(method) is not applied_one.new:",
        replace="if vars(owner).get(method) is None:",
        killers=(f"{_APPLYING}::test_method_of_others_is_not_reverted",),
    ),
    Mutant(
        name="types_of_npus_share",
        why="Machines with two types of NPUs read each other's pages in the wrong order.",
        file="ucm/integration/vllm/identity.py",
        find='    return None if kind is None else {"ascend": kind().name}\n',
        replace="    return None\n",
        killers=(
            "tests/integration/vllm/test_identity.py::TestOthers::test_types_of_npus_are_told_apart",
        ),
    ),
    Mutant(
        name="hashes_of_keys_not_missed",
        why="vllm-ascend looks at blocks that it chose by hashes of other tokens.",
        file="ucm/integration/vllm/identity.py",
        find="    return bool(asked or given.get(",
        replace="    return bool(asked and given.get(",
        killers=(
            "tests/integration/vllm/test_identity.py::TestReusable::test_hashes_of_keys_are_refused_where_tokens_are_loaded",
        ),
    ),
)
