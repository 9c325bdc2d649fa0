# SPDX-License-Identifier: Apache-2.0
"""Mutants of a host's own stages in the chain of a save."""

from tests.mutations.mutant import Mutant

__all__ = ["OWN"]

_SAVE = "ucm/pipeline/save.py"
_OWN = "tests/cache/test_own_stage.py::TestOwnStage"
_REFUSED = f"{_OWN}::test_what_could_hold_blocks_is_refused"

OWN = (
    Mutant(
        name="own_stages_left_out",
        why="An audit that a host relies on never runs.",
        file=_SAVE,
        find="        sealed = sealed.join(before_commit)\n",
        replace="",
        killers=(f"{_OWN}::test_stages_see_each_block_in_order_before_it_is_found",),
    ),
    Mutant(
        name="own_stage_behind_the_commit",
        why="What a stage refuses is found by others all the same.",
        file=_SAVE,
        find="    return sealed.then(Commit(store.forget))\n",
        replace=(
            "    return Chain((*gathered.stages, Transfer(), Commit(), "
            "*(before_commit or Chain(())).stages))\n"
        ),
        killers=(
            f"{_OWN}::test_stages_see_each_block_in_order_before_it_is_found",
            f"{_OWN}::test_stage_that_fails_costs_its_save_only",
        ),
    ),
    Mutant(
        name="own_stage_anywhere",
        why="A stage on the thread that copies holds the engine's blocks while it thinks.",
        file=_SAVE,
        find="        _check_own(before_commit, sealed)\n",
        replace="",
        killers=(_REFUSED,),
    ),
    Mutant(
        name="own_stage_on_another_thread",
        why="A stage that says so runs between the copies of others.",
        file=_SAVE,
        find=" or stage.worker != STORE_WORKER",
        replace="",
        killers=(_REFUSED,),
    ),
    Mutant(
        name="own_stage_may_write",
        why="A stage changes bytes behind their checksum, and each load of them fails.",
        file=_SAVE,
        find="            block.flags.writeable = False\n",
        replace="",
        killers=(f"{_OWN}::test_stage_that_fails_costs_its_save_only",),
    ),
    Mutant(
        name="own_stage_may_end_the_thread",
        why="An audit that calls sys.exit ends all saves of the process.",
        file="ucm/pipeline/stage.py",
        find="        if isinstance(exc, Exception):\n",
        replace="        if isinstance(exc, BaseException):\n",
        killers=(f"{_OWN}::test_stage_that_fails_costs_its_save_only",),
    ),
    Mutant(
        name="own_stage_may_return_nothing",
        why="An audit that returns None where it means to refuse lets everything pass.",
        file="ucm/pipeline/stage.py",
        find="    if returned is not item:\n",
        replace="    if returned is not returned:\n",
        killers=(f"{_OWN}::test_stage_that_fails_costs_its_save_only",),
    ),
)
