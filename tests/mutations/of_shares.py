# SPDX-License-Identifier: Apache-2.0
"""Mutants of how machines that share a mount know what all of them have there."""

from tests.mutations.mutant import Mutant

__all__ = ["SHARES"]

_LEDGER = "ucm/backends/files/_ledger.py"
_ROOM = "ucm/backends/files/_room.py"
_TESTS = "tests/backends/test_files_ledger.py"
_MACHINES = f"{_TESTS}::TestManyMachines"
_MANY = f"{_MACHINES}::test_share_never_has_more_than_its_capacity"
_OF_ROOM = "tests/backends/test_files_room.py::TestRoom"
_SMALL = "tests/backends/test_files_room.py::TestSmallMount"
_TALLIES = f"{_TESTS}::TestTallies"
_WALK = "ucm/backends/files/_walk.py"
_EVICT = "tests/backends/test_files_walk.py::TestEvict"
_COLLECTING = f"{_TESTS}::TestCollecting"
_ENDED = (
    "tests/backends/test_files_names.py::"
    "test_turn_of_a_process_that_has_ended_is_taken_at_once"
)
_SHARE = "ucm/backends/files/_share.py"

SHARES = (
    Mutant(
        name="others_blocks_take_no_room",
        why="R-63: each machine fills the share as if it were its own.",
        file=_LEDGER,
        find="            if writer != self._writer:\n",
        replace="            if False:\n",
        killers=(f"{_TALLIES}::test_all_know_what_one_has_put_and_is_about_to",),
    ),
    Mutant(
        name="counted_blocks_count_again",
        why="A share is full at half of its capacity.",
        file=_LEDGER,
        find="counted = count.tallies.get(writer, (0, 0))",
        replace="counted = (0, 0)",
        killers=(f"{_TALLIES}::test_count_has_what_was_put_before_it",),
    ),
    Mutant(
        name="put_is_told_behind_it_alone",
        why="Machines that put at the same time go over the capacity together.",
        file=_LEDGER,
        find="                moving += one.moving\n",
        replace="",
        killers=(f"{_TALLIES}::test_all_know_what_one_has_put_and_is_about_to",),
    ),
    Mutant(
        name="machines_wait_for_each_other",
        why="All that are about to put find no room, for as long as the others are.",
        file=_ROOM,
        find="min(self._seen.moving, self.capacity // 2)",
        replace="4 * self._seen.moving",
        killers=(_MANY,),
    ),
    Mutant(
        name="removed_tally_is_told_again",
        why="A machine that was idle for an hour takes the room of all that it ever put.",
        file=_LEDGER,
        find="self._writer, self._began = self._share.new_name(), self._told",
        replace="self._writer = self._share.new_name()",
        killers=(f"{_TALLIES}::test_tally_that_was_removed_begins_anew",),
    ),
    Mutant(
        name="all_machines_walk",
        why="The servers of a mount list all blocks once for each machine.",
        file=_LEDGER,
        find="            self._end_silent()\n            return False\n",
        replace="            self._end_silent()\n            return True\n",
        killers=(f"{_COLLECTING}::test_who_finds_another_at_it_does_not_walk",),
    ),
    Mutant(
        name="each_start_walks",
        why="Machines that are started together list all blocks, one after the other.",
        file=_LEDGER,
        find="is_new = seen.number > known and seen.age_s < self._collect_s",
        replace="is_new = False",
        killers=(
            f"{_TESTS}::TestManyMachines::test_one_walk_serves_all",
            f"{_COLLECTING}::test_later_count_with_room_is_taken_as_it_is",
        ),
    ),
    Mutant(
        name="died_amid_a_walk",
        why="No room is ever made again behind a machine that has died at it.",
        file=_LEDGER,
        find="silent_s > _SILENT_S or ",
        replace="",
        killers=(f"{_COLLECTING}::test_turn_of_one_that_has_died_is_taken",),
    ),
    Mutant(
        name="died_amid_a_walk_here",
        why="An agent that was killed amid a walk has the share be full for all until a minute is over.",
        file=_LEDGER,
        find=" or self._share.has_ended(file)",
        replace="",
        killers=(_ENDED,),
    ),
    Mutant(
        name="of_another_machine_it_has_ended",
        why="Each machine takes another's turn to walk, as it knows no such process.",
        file=_SHARE,
        find=' and name.startswith(f"{here}.")',
        replace="",
        killers=(_ENDED,),
    ),
    Mutant(
        name="long_walk_is_silent",
        why="A walk of an hour is begun anew by another machine each minute.",
        file=_LEDGER,
        find="self._share.collect(most, wanted, refused, self._touch)",
        replace="self._share.collect(most, wanted, refused)",
        killers=(f"{_COLLECTING}::test_one_that_walks_for_long_says_so",),
    ),
    Mutant(
        name="foreign_count_is_believed",
        why="A file that somebody has put there by such a name ends all puts.",
        file=_LEDGER,
        find="        except DECODE_ERRORS:  # what does not fit, too\n            count = None\n",
        replace="",
        killers=(f"{_TALLIES}::test_what_is_not_ours_is_no_word_on_anything",),
    ),
    Mutant(
        name="mount_that_is_gone_says_no",
        why="R-51: behind an unmount all blocks are absent, and what is forgotten is said to be.",
        file="ucm/backends/files/_share.py",
        find="errno.ENOENT in errors and not os.path.exists(self.path(MANIFEST))",
        replace="False",
        killers=(
            "tests/backends/test_files.py::TestShared::test_mount_that_is_gone_has_no_answer",
        ),
    ),
    Mutant(
        name="fewer_counts_are_unheard",
        why="Once somebody has removed all counts no machine heeds another's for days.",
        file=_LEDGER,
        find="            self._count = count\n            self._number += 1\n",
        replace="            self._count = count\n            self._number = number\n",
        killers=(f"{_MACHINES}::test_counts_that_begin_anew_are_known",),
    ),
    Mutant(
        name="long_walk_is_waited_for_at_each_put",
        why="A first walk of an hour has all machines look at the share fifty times a second.",
        file=_LEDGER,
        find="                    self._vain = seen.number\n",
        replace="",
        killers=(f"{_COLLECTING}::test_long_walk_of_another_is_waited_for_once",),
    ),
    Mutant(
        name="share_is_emptied_in_vain",
        why="All blocks go for puts that have more than there is, and none is made.",
        file=_ROOM,
        find="while self._moving <= self._bound and self._full_until",
        replace="while self._full_until",
        killers=(f"{_MACHINES}::test_share_is_not_emptied_in_vain",),
    ),
    Mutant(
        name="collection_that_is_over_hides_others",
        why="Two machines put what only one of them has room for.",
        file=_ROOM,
        find="if seen.look < self._seen.look:",
        replace="if seen.number < self._seen.number:",
        killers=(f"{_OF_ROOM}::test_collection_that_is_over_hides_nobody",),
    ),
    Mutant(
        name="mount_without_room_is_not_tried_again",
        why="A share is full for ever once others had filled its mount.",
        file=_ROOM,
        find="return self.capacity if is_less else self._given",
        replace="return self.capacity",
        killers=(f"{_SMALL}::test_mount_that_had_no_room_at_all_is_tried_again",),
    ),
    Mutant(
        name="tally_without_an_answer_is_another",
        why="What was about to be put as a server went away takes room for ever.",
        file=_LEDGER,
        find="                self._next = self._name(mine)  # which may be so by now\n",
        replace="",
        killers=(f"{_TALLIES}::test_tally_that_was_told_without_an_answer_is_one",),
    ),
    Mutant(
        name="late_block_takes_no_room",
        why="R-63: each call on a slow mount that is given up leaves blocks that nobody counts for ten minutes.",
        file="ucm/backends/files/_backend.py",
        find="            sizes, self._sizes = self._sizes, self._late\n",
        replace="            sizes, self._sizes = self._sizes, deque[int]()\n",
        killers=(
            "tests/backends/test_files_late.py::test_block_that_is_put_when_its_caller_is_gone_is_counted",
        ),
    ),
    Mutant(
        name="containers_share_a_name",
        why="R-63: agents that start together in two containers are one writer to each other, and overfill the share.",
        file="ucm/backends/files/_identity.py",
        find='where += os.readlink("/proc/self/ns/pid")',
        replace='where += ""',
        killers=(
            "tests/backends/test_files_names.py::test_processes_of_two_containers_have_two_names",
        ),
    ),
    Mutant(
        name="blocks_of_a_time_to_come_stay",
        why="R-51: behind a clock that was set back new blocks go in place of those that nobody reads.",
        file=_WALK,
        find="np.argsort(-np.abs(used - now_ns), kind",
        replace="np.argsort(used - now_ns, kind",
        killers=(f"{_EVICT}::test_clock_that_was_set_back_leaves_no_block_for_ever",),
    ),
    Mutant(
        name="walk_takes_any_time",
        why="R-51: one block of the year 2286 has a share be full for good.",
        file=_WALK,
        find="return max(0, min(time_ns, _LATEST_NS))",
        replace="return time_ns",
        killers=(f"{_EVICT}::test_time_that_no_array_takes_is_no_hindrance",),
    ),
    Mutant(
        name="remains_of_a_time_to_come_stay",
        why="X-03: behind a clock that was set back what a dead writer has left stays.",
        file="ucm/backends/files/_share.py",
        find="age_s = abs(now_s - entry.stat(follow_symlinks=False).st_mtime)",
        replace="age_s = now_s - entry.stat(follow_symlinks=False).st_mtime",
        killers=(
            "tests/backends/test_files.py::TestOrphans::test_old_remains_without_a_living_owner_are_removed",
        ),
    ),
)
