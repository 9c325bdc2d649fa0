# SPDX-License-Identifier: Apache-2.0
"""Mutants of what hosts of their own say, and have fetched from tiers."""

from tests.mutations.mutant import Mutant

__all__ = ["HOSTS"]

_FETCHES = "ucm/cache/fetches.py"
_TESTS = "tests/cache/test_fetches.py"

HOSTS = (
    Mutant(
        name="host_without_torch_is_told_of_torch",
        why="R-41: who gives no memory hears that a package is missing, and not which layer.",
        file="ucm/devices/cpu.py",
        find='        if are_buffers or sys.modules.get("torch") is None:',
        replace="        if are_buffers:",
        killers=(
            "tests/cache/test_opening.py::TestRefusals::test_what_is_no_memory_is_refused_where_torch_is_not",
        ),
    ),
    Mutant(
        name="batch_that_is_none_ends_for_nobody",
        why="Who waits for a save of which the loop died hears of it after minutes.",
        file="ucm/intake.py",
        find="                self._refuse(batch)\n",
        replace="                pass\n",
        killers=(
            (
                "tests/test_runtime.py::TestSubmit::"
                "test_batch_that_cannot_be_made_fails_the_runtime"
            ),
        ),
    ),
    Mutant(
        name="block_of_a_tensor",
        why="Two loads write one block, and one of them tells that its bytes are there.",
        file="ucm/cache/orders.py",
        find="            blocks = tuple(map(index, blocks))\n",
        replace="            index(sum(blocks))\n",
        killers=(
            (
                "tests/cache/test_mistakes.py::TestMistakes::"
                "test_block_of_a_tensor_is_not_written_by_two_at_once"
            ),
        ),
    ),
    Mutant(
        name="group_of_a_tensor",
        why="A number that equals a group's and is in no table ends the loop, and the cache.",
        file="ucm/cache/orders.py",
        find="return Asked(direction, hashes, blocks, shape.group_id, used_ns, tenant)",
        replace="return Asked(direction, hashes, blocks, group, used_ns, tenant)",
        killers=(
            "tests/cache/test_parts.py::TestOrders::test_group_is_the_layouts_number",
        ),
    ),
    Mutant(
        name="place_of_an_array",
        why="A save whose place comes out of an array of 32 bits has no end.",
        file="ucm/cache/orders.py",
        find="int(place.first)",
        replace="place.first",
        killers=(
            (
                "tests/cache/test_parts.py::TestOrders::"
                "test_small_numbers_of_numpy_are_whole_ones"
            ),
        ),
    ),
    Mutant(
        name="place_of_more_than_64_bits",
        why="What a host says of one save ends the loop that moves all blocks.",
        file="ucm/prefixes.py",
        find="validator=_up_to(_LATEST_NS)",
        replace="validator=_up_to(1 << 80)",
        killers=(
            "tests/cache/test_parts.py::TestOrders::test_place_that_is_none_is_refused",
        ),
    ),
    Mutant(
        name="block_one_and_a_half",
        why="A load writes a block that nobody named.",
        file="ucm/cache/orders.py",
        find="            blocks = _whole_numbers(tuple(blocks))\n",
        replace="            blocks = tuple(blocks)\n",
        killers=(
            (
                "tests/cache/test_mistakes.py::TestMistakes::"
                "test_keys_that_are_none_are_refused_before_anything_is_done"
            ),
        ),
    ),
    Mutant(
        name="vain_fetch_keeps_slots",
        why="Questions that found nothing use up the slots that tiers may fetch into.",
        file=_FETCHES,
        find="        if not answer.found:\n            self.give_up()\n",
        replace="",
        killers=(f"{_TESTS}::test_nothing_is_kept_where_nothing_came",),
    ),
    Mutant(
        name="first_part_ends_a_fetch",
        why="A prompt that is loaded in parts loses the later ones to others' fetches.",
        file=_FETCHES,
        find="fetch.group == asked.group and fetch.last in keys",
        replace="fetch.group == asked.group",
        killers=(f"{_TESTS}::test_fetched_blocks_are_kept_until_the_last_is_loaded",),
    ),
    Mutant(
        name="fetch_kept_behind_its_load",
        why="Who loads at once, on another thread than asks, keeps slots until their time is over.",
        file=_FETCHES,
        find="        if not is_asked:\n",
        replace="        self._kept[fetch.name] = fetch, now + seconds + hold_s\n        if not is_asked:\n",
        killers=(f"{_TESTS}::test_load_right_behind_the_answer_ends_what_is_kept",),
    ),
    Mutant(
        name="cancelled_fetch_kept",
        why="Who goes away while tiers are asked leaves slots behind.",
        file=_FETCHES,
        find="        if exc_type is not None:\n            self.give_up()\n",
        replace="        return\n",
        killers=(f"{_TESTS}::test_prefetch_cancelled_at_each_point_leaves_nothing",),
    ),
    Mutant(
        name="hang_up_ends_all_pauses",
        why="One core of the engine's is spent on asking for an agent that is gone.",
        file="ucm/agent/client.py",
        find="    def _hang_up(self) -> None:\n",
        replace="    def _hang_up(self) -> None:\n        self._waker.set()\n",
        killers=(
            "tests/agent/test_client.py::TestHangUp::test_engine_that_hangs_up_still_pauses",
        ),
    ),
    Mutant(
        name="tiers_before_the_slab",
        why="A slow tier has prompts computed that are stored here.",
        file="ucm/cache/staged.py",
        find="        self._begin(keys[:found])  # it comes",
        replace="        found = 0  # it comes",
        killers=(
            (
                "tests/cache/test_staged.py::TestStaged::"
                "test_slab_is_loaded_while_tiers_are_silent"
            ),
        ),
    ),
    Mutant(
        name="all_holds_looked_at",
        why="A thousand prompts that were looked up hold up the step before which they go.",
        file="ucm/cache/staged.py",
        find=(
            "            self._held[key] -= 1\n"
            "            if not self._held[key]:\n"
            "                self._idle[key] = None\n"
            "            if self._held[key] <= 0:\n"
            "                del self._held[key]\n"
        ),
        replace=(
            "            self._held -= Counter([key])\n"
            "            if not self._held[key]:\n"
            "                self._idle[key] = None\n"
        ),
        killers=(
            (
                "tests/cache/test_staged.py::TestStaged::"
                "test_what_others_hold_is_not_gone_through"
            ),
        ),
    ),
    Mutant(
        name="vain_question_of_staged_keeps_slots",
        why="Nobody loads what an agent keeps, and others wait for their turn.",
        file="ucm/cache/staged.py",
        find="                fetched.give_up()  # what it was asked for",
        replace="                pass  # what it was asked for",
        killers=(
            (
                "tests/cache/test_staged.py::TestStaged::"
                "test_vain_question_to_tiers_keeps_nothing"
            ),
        ),
    ),
    Mutant(
        name="arguments_of_another_kind_taken",
        why="Who exchanges two of them gets an error of Python's out of our code.",
        file="ucm/cache/opening.py",
        find="        if not isinstance(value, kinds):\n",
        replace="        if False:\n",
        killers=(
            "tests/cache/test_opening.py::TestRefusals::test_argument_of_another_kind_is_named",
        ),
    ),
    Mutant(
        name="refused_argument_leaves_a_store_open",
        why="The caller was told that all is closed if entering fails.",
        file="ucm/cache/opening.py",
        find="                unowned.callback(theirs.close)  # until the core does\n",
        replace="                pass\n",
        killers=(
            "tests/cache/test_opening.py::TestRefusals::test_argument_of_another_kind_is_named",
        ),
    ),
    Mutant(
        name="path_that_is_no_text",
        why="X-09: a host's own section with a path ended in an error of Python's.",
        file="ucm/settings.py",
        find="or str(value)[0] ==",
        replace="or value[0] ==",
        killers=("tests/test_config_bounds.py::test_host_may_give_a_path_as_one",),
    ),
    Mutant(
        name="extra_by_name",
        why="By its name the package is another project's.",
        file="ucm/registry.py",
        find="pip install '.[{extra}]'",
        replace="pip install 'ucm[{extra}]'",
        killers=(
            "tests/test_registry.py::TestLoadClass::test_missing_package_is_named_with_what_to_install",
        ),
    ),
    Mutant(
        name="tier_files_below_a_directory_called_home",
        why="X-09: blocks that are to last lie where the agent happened to be started.",
        file="ucm/backends/files/_backend.py",
        find="check_path(key, value)",
        replace="pass",
        killers=(
            "tests/test_config_bounds.py::test_tier_below_a_directory_called_home_is_refused",
        ),
    ),
    Mutant(
        name="tier_disk_below_a_directory_called_home",
        why="X-09: blocks that are to last lie where the agent happened to be started.",
        file="ucm/backends/disk/_settings.py",
        find="check_path(key, one)",
        replace="pass",
        killers=(
            "tests/test_config_bounds.py::test_tier_below_a_directory_called_home_is_refused",
        ),
    ),
)
