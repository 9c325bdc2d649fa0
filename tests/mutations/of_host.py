# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a host's own loop does not do, and of the contract of doors."""

from tests.mutations.mutant import Mutant

__all__ = ["HOST"]

_CORE = "ucm/cache/core.py"
_ORDERS = "ucm/cache/orders.py"
_DAMAGE = "ucm/testing/slab_damage.py"
_DOOR = "ucm/testing/door.py"
_CONTRACT = "ucm/testing/door_contract.py"
_LATE = "tests/cache/test_late_loop.py"
_WRONG = (
    "tests/testing/test_door_contract.py::test_host_that_is_wrong_in_one_way_is_noticed"
)
_SURFACE = "tests/test_api_surface.py"
_DAMAGED = "tests/testing/test_slab_damage.py"

HOST = (
    Mutant(
        name="asked_and_flushed_too_early",
        why="A host that flushed before it goes loses what our loop had not seen yet.",
        file=_CORE,
        find="            asked = [each[0] for each in self._asked]\n",
        replace="            asked = list[Transfer]()\n",
        killers=(f"{_LATE}::test_save_that_nobody_has_looked_at_is_flushed",),
    ),
    Mutant(
        name="asked_and_cancelled_in_vain",
        why="A save that is not wanted is stored, and holds blocks meanwhile.",
        file=_CORE,
        find="        self._unwanted.append(transfer)\n",
        replace="",
        killers=(f"{_LATE}::test_save_that_nobody_has_looked_at_is_cancelled",),
    ),
    Mutant(
        name="asked_and_closed_in_the_dark",
        why="What was asked for right before the end is dropped.",
        file=_CORE,
        find="            self._take_in()\n            with self._lock:\n                in_line",
        replace="            with self._lock:\n                in_line",
        killers=(f"{_LATE}::test_save_that_nobody_has_looked_at_is_drained_by_close",),
    ),
    Mutant(
        name="asked_with_the_hosts_list",
        why="What the host does with its list afterwards decides what is stored.",
        file=_ORDERS,
        find="_whole_numbers(tuple(blocks))",
        replace="_whole_numbers(blocks)",
        killers=(
            f"{_LATE}::test_keys_that_the_host_changes_afterwards_are_those_it_gave",
        ),
    ),
    Mutant(
        name="orders_made_on_the_hosts_loop",
        why="A host's loop stands still for twice as long with each save.",
        file=_CORE,
        find="            if is_alone or transfer.is_load:",
        replace="            self._take_in()\n            if is_alone or transfer.is_load:",
        killers=(
            "tests/cache/test_many.py::TestCost::test_nothing_of_a_ticket_is_made_on_the_hosts_thread",
        ),
    ),
    Mutant(
        name="public_signature_changed_by_accident",
        why="A host that calls it as before has another answer, or an error.",
        file="ucm/cache/aio.py",
        find="        wait_for_room: bool = False,\n",
        replace="        wait_for_room: bool = True,\n",
        killers=(f"{_SURFACE}::test_surface_is_the_one_that_is_written_down",),
    ),
    Mutant(
        name="example_on_private_ground",
        why="Whoever copies the example breaks with the next patch release.",
        file="examples/third_party_store/ucm_example/metered.py",
        find="from ucm.devices.abc import Fence\n",
        replace="from ucm.devices._paged import Fence\n",
        killers=(f"{_SURFACE}::test_examples_need_what_is_public_only",),
    ),
    Mutant(
        name="damage_that_damages_nothing",
        why="Every door passes, whatever it does with blocks that rot.",
        file=_DAMAGE,
        find="        changed[at] ^= 0x40\n",
        replace="        changed[at] ^= 0\n",
        killers=(f"{_DAMAGED}::test_damaged_blocks_are_those_that_were_chosen", _WRONG),
    ),
    Mutant(
        name="damage_all_over",
        why="A test finds its own blocks gone for the sake of another's.",
        file=_DAMAGE,
        find="                if keys is None or blocks.key(at) in keys:\n",
        replace="                if True:\n",
        killers=(f"{_DAMAGED}::test_damaged_blocks_are_those_that_were_chosen",),
    ),
    Mutant(
        name="answers_not_compared",
        why="A door that gives wrong tokens passes.",
        file=_DOOR,
        find="        assert expected == said\n",
        replace="",
        killers=(_WRONG,),
    ),
    Mutant(
        name="model_that_ignores_its_blocks",
        why="A door passes whose loads copy nothing, since no answer depends on them.",
        file=_CONTRACT,
        find="        assert all(said != other for other in others)\n",
        replace="",
        killers=(_WRONG,),
    ),
    Mutant(
        name="foreign_model_not_asked",
        why="A door whose keys do not name the model passes.",
        file=_CONTRACT,
        find="        running.on(Setting.FOREIGN)\n",
        replace="",
        killers=(_WRONG,),
    ),
)
