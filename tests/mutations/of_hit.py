# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a slab does in a crowd, half way and at the ends of time."""

from tests.mutations.mutant import Mutant

__all__ = ["HIT"]

_DIRECTORY = "ucm/stores/slab"
_INDEX = f"{_DIRECTORY}/_index.py"
_OPENED = f"{_DIRECTORY}/_opened.py"
_POPULATE = f"{_DIRECTORY}/_populate.py"
_SETTLE = f"{_DIRECTORY}/_settle.py"
_USED = f"{_DIRECTORY}/_used.py"
_TESTS = "tests/stores/test_slab_index.py"
_CROWD = "tests/stores/test_slab_crowd.py::TestCrowd"
_MOMENTS = "tests/stores/test_slab_crowd.py::TestMoments"
_BUSY = f"{_CROWD}::test_scheduler_opens_and_closes_while_the_locks_are_busy"
_HALF = f"{_TESTS}::TestWithdrawal::test_withdrawal_that_ends_half_way_shows_at_the_last_slot"
_SEVERAL = "tests/stores/test_slab_arena.py::TestSeveral"
_POPULATED = "tests/stores/test_slab_populate.py::TestEnds"

HIT = (
    Mutant(
        name="size_of_a_moment_before",
        why="An index that shrinks while an engine starts ends it with an error of numpy.",
        file="ucm/stores/slab/_classes.py",
        find="    if len(mapping) != nbytes or not is_held:",
        replace="    if not is_held:",
        killers=(
            (
                "tests/stores/test_slab_lost.py"
                "::test_index_that_shrinks_while_it_is_opened_is_refused"
            ),
        ),
    ),
    Mutant(
        name="hint_needs_a_pause",
        why="Under load the scheduler finds nothing and saves nothing.",
        file=_INDEX,
        find="            if self.words[_VERSION] == version:\n                raise\n            return self._look_up(batch)\n",
        replace="            raise\n",
        killers=(f"{_CROWD}::test_hint_is_given_amid_changes_that_never_pause",),
    ),
    Mutant(
        name="stopped_process_is_a_crowd",
        why="Loads are ordered that wait for a process that was stopped.",
        file=_INDEX,
        find="            if self.words[_VERSION] == version:\n                raise\n            return self._look_up(batch)\n",
        replace="            return self._look_up(batch)\n",
        killers=(f"{_CROWD}::test_change_that_does_not_end_is_no_crowd",),
    ),
    Mutant(
        name="reader_takes_a_hint",
        why="A record that is half written passes for a damaged block.",
        file=_INDEX,
        find="        return self.observe(lambda: self._look_up(batch))\n",
        replace="""\
        try:
            return self.observe(lambda: self._look_up(batch))
        except StoreUnavailableError:
            return self._look_up(batch)
""",
        killers=(f"{_CROWD}::test_what_is_read_is_seen_at_one_moment",),
    ),
    Mutant(
        name="open_gives_up_at_once",
        why="A scheduler cannot open a slab that ranks use.",
        file=_OPENED,
        find="self._class = self._open_class(open_timeout)",
        replace="self._class = self._open_class(lock_timeout)",
        killers=(_BUSY,),
    ),
    Mutant(
        name="close_needs_the_lock",
        why="An engine ends with an error because others save.",
        file=_OPENED,
        find="        with contextlib.suppress(StoreUnavailableError), self.index.locked():\n",
        replace="        with self.index.locked():\n",
        killers=(_BUSY,),
    ),
    Mutant(
        name="withdrawal_from_the_first",
        why="Slots are lost to all when a withdrawal ends half way.",
        file=_INDEX,
        find="        for number in reversed(range(len(parts))):\n",
        replace="        for number in range(len(parts)):\n",
        killers=(_HALF,),
    ),
    Mutant(
        name="late_use_keeps_for_ever",
        why="A slot that a use has missed is never given to anybody again.",
        file=_USED,
        find="        there = stamps != NEVER",
        replace="        there = stamps == stamps",
        killers=(
            f"{_MOMENTS}::test_slot_that_another_block_got_meanwhile_can_still_go",
        ),
    ),
    Mutant(
        name="clock_has_an_end",
        why="A block that is kept for ever counts as one that is not there, and never goes.",
        file=_USED,
        find="        latest = time.monotonic_ns() + _AHEAD_NS\n",
        replace="        latest = NEVER\n",
        killers=(f"{_MOMENTS}::test_block_kept_for_ever_does_not_end_the_clock",),
    ),
    Mutant(
        name="earliest_is_latest",
        why="A use long ago keeps a block for ever.",
        file=_USED,
        find="np.minimum(np.maximum(uses.moments, _EARLIEST), latest)",
        replace="np.minimum(uses.moments, latest)",
        killers=(f"{_MOMENTS}::test_earliest_use_of_all_is_before_the_others",),
    ),
    Mutant(
        name="late_thread_keeps_its_turn",
        why="Other ranks get no memory until a process ends that has left.",
        file=_POPULATE,
        find="        finally:  # however late: others wait for the turn\n            self._let_go()\n",
        replace="        finally:\n            pass\n",
        killers=(f"{_POPULATED}::test_thread_that_ends_late_leaves_its_turn",),
    ),
    Mutant(
        name="child_takes_a_lock",
        why="A fork at the wrong moment never comes back.",
        file=_POPULATE,
        find="        self._ends = _ENDED  # that of a forked child may be locked for ever\n",
        replace="        self._ends.set()\n",
        killers=(f"{_POPULATED}::test_child_waits_for_no_lock_of_its_parents_thread",),
    ),
    Mutant(
        name="unused_index_stays",
        why="Each layout that was tried once takes memory for ever.",
        file=_SETTLE,
        find="    if is_empty and wanted and",
        replace="    if not wanted and",
        killers=(f"{_SEVERAL}::test_index_of_a_class_without_blocks_goes",),
    ),
)
