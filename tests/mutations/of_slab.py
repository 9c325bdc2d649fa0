# SPDX-License-Identifier: Apache-2.0
"""Mutants of a slab's directory, locks and room."""

from tests.mutations.mutant import Mutant

__all__ = ["SLAB"]

_CLASSES = "ucm/stores/slab/_classes.py"
_CREATION = "ucm/stores/slab/_creation.py"
_FILES = "ucm/stores/slab/_files.py"
_INDEX = "ucm/stores/slab/_index.py"
_KEYSPACES = "ucm/stores/slab/_keyspaces.py"
_LEASES = "ucm/stores/slab/_leases.py"
_LOCKS = "ucm/stores/slab/_locks.py"
_OPENED = "ucm/stores/slab/_opened.py"
_ROOM = "ucm/stores/slab/_room.py"
_CRASH = "tests/stores/test_slab_crash.py"
_DAMAGED = "tests/stores/test_slab_damaged.py"
_DIRECTORY = "tests/stores/test_slab_directory.py"
_LOST = "tests/stores/test_slab_lost.py"
_ROOMS = "tests/stores/test_slab_room.py"
_PROCESSES = "tests/stores/test_slab_processes.py"
_NOTICE = f"{_LOST}::TestNotice::test_users_notice_and_serve_it_no_longer"

SLAB = (
    # Who owns a slot, whatever becomes of the directory.
    Mutant(
        name="data_of_two_indexes",
        why="A copy of the index gives slots away that are used under the first one.",
        file=_LOCKS,
        find="    return _take(fd, fcntl.F_RDLCK, at) and not (",
        replace="    return True or not (",
        killers=(
            f"{_LOST}::TestWrongBytes::test_copy_of_a_file_is_not_used_beside_it",
        ),
    ),
    Mutant(
        name="mapping_keeps_the_locks",
        why="A child of a dead process keeps its slots reserved for ever.",
        file=_CLASSES,
        find="        fd = directory.open(name)\n        try:\n            is_held",
        replace="        fd = os.dup(held_fd)\n        try:\n            is_held",
        killers=(f"{_PROCESSES}::test_writer_killed_before_commit_leaves_nothing",),
    ),
    Mutant(
        name="owner_numbers_begin_anew",
        why="A number that a lease still names is given to somebody else.",
        file=_OPENED,
        find="            index.header[Word.OWNER] = self.owner_id\n",
        replace="",
        killers=(
            f"{_LOST}::TestWrongBytes::test_number_of_an_owner_is_not_given_again",
        ),
    ),
    Mutant(
        name="owner_number_shared",
        why="Two processes are one owner, and the end of one frees the other's slots.",
        file=_LOCKS,
        find="while not _take(self._fd, fcntl.F_WRLCK, self.owner_id):",
        replace="while not (_take(self._fd, fcntl.F_WRLCK, self.owner_id) or True):",
        killers=(
            f"{_LOST}::TestWrongBytes::test_number_that_somebody_has_is_passed_over",
        ),
    ),
    # Noticing.
    Mutant(
        name="removal_unnoticed",
        why="An engine fills a slab that nobody will ever read again.",
        file=_OPENED,
        find="                if not info.st_nlink:\n",
        replace="                if False:\n",
        killers=(_NOTICE,),
    ),
    Mutant(
        name="truncation_unnoticed",
        why="The kernel ends the engine where it should have computed a prompt.",
        file=_OPENED,
        find="                if size < nbytes:\n",
        replace="                if False:\n",
        # Not those that shorten by pages: they end the process instead of failing.
        killers=(
            f"{_LOST}::TestNotice::test_a_byte_less_is_noticed_before_the_memory_is_touched",
        ),
    ),
    Mutant(
        name="move_unnoticed",
        why="Engines that start later share nothing with those that go on.",
        file=_OPENED,
        find="                if not os.path.samestat(info, os.lstat(path)):\n",
        replace="                if False:\n",
        killers=(_NOTICE,),
    ),
    Mutant(
        name="looked_at_once",
        why="A directory that is moved after the start is never missed.",
        file=_OPENED,
        find="        self._look_at = now + _LOOK_EVERY_S\n",
        replace="        self._look_at = float('inf')\n",
        killers=(
            f"{_LOST}::TestNotice::test_path_is_looked_at_every_quarter_of_a_second",
        ),
    ),
    Mutant(
        name="lost_and_found",
        why="A slab that was shortened and grew again serves holes.",
        file=_OPENED,
        find="        self._lost = self._lost or self._find_loss(looks=looks)\n",
        replace="        self._lost = self._find_loss(looks=looks)\n",
        killers=(
            f"{_LOST}::TestNotice::test_path_is_looked_at_every_quarter_of_a_second",
        ),
    ),
    Mutant(
        name="last_words_to_a_lost_slab",
        why="Leaving a shortened slab ends the process with a bus error.",
        file=_OPENED,
        find="                if not (self._lost or self._find_loss(looks=True)):\n",
        replace="                if True:\n",
        killers=(
            f"{_LOST}::TestNotice::test_who_leaves_late_says_no_word_to_a_slab_that_is_not_its_own",
        ),
    ),
    Mutant(
        name="discard_raises_for_a_lost_slab",
        why="The end of a ticket fails because there is nothing to give slots back to.",
        file=_LEASES,
        find="            except StoreUnavailableError:\n                self.is_owed = True\n",
        replace="            except LeaseExpiredError:\n                self.is_owed = True\n",
        killers=(_NOTICE,),
    ),
    # Whose directory it is.
    Mutant(
        name="foreign_directory_taken",
        why="A mistyped path deletes what the user has there.",
        file=_CREATION,
        find="    if names:\n        raise",
        replace="    if False:\n        raise",
        killers=(
            f"{_DIRECTORY}::TestForeign::test_directory_that_is_not_ours_is_left_as_it_is",
        ),
    ),
    Mutant(
        name="any_mark_will_do",
        why="A user's own file of that name makes everything beside it ours.",
        file=_CREATION,
        find="        if found.startswith(start) or (names == {MARK} and start.startswith(found)):\n",
        replace="        if found or names == {MARK}:\n",
        killers=(
            f"{_DIRECTORY}::TestForeign::test_directory_that_is_not_ours_is_left_as_it_is",
        ),
    ),
    Mutant(
        name="empty_mark_owns_the_rest",
        why="An empty file of that name makes everything beside it ours.",
        file=_CREATION,
        find="(names == {MARK} and start.startswith(found))",
        replace="start.startswith(found)",
        killers=(
            f"{_DIRECTORY}::TestForeign::test_directory_that_is_not_ours_is_left_as_it_is",
        ),
    ),
    Mutant(
        name="mark_removed_first",
        why="A start that is killed in time leaves a directory that nobody can use.",
        file=_CREATION,
        find="        directory.remove(*made)\n        require_room",
        replace="        directory.remove(*made[::-1])\n        require_room",
        killers=(f"{_CRASH}::TestKillsOfWholeLives::test_creation",),
    ),
    Mutant(
        name="data_before_the_mark",
        why="A start that is killed in time leaves a directory that nobody can use.",
        file=_CREATION,
        find="            directory.write(MARK, manifest.encode())\n",
        replace="            directory.write(DATA, b'')\n            directory.remove(DATA)\n            directory.write(DATA, b'')\n            directory.write(MARK, manifest.encode())\n            directory.remove(DATA)\n",
        killers=(f"{_CRASH}::TestKillsOfWholeLives::test_creation",),
    ),
    Mutant(
        name="pipe_waited_for",
        why="A pipe in the place of a file stops the start for ever.",
        file=_FILES,
        find="os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
        replace="os.O_NOFOLLOW | os.O_CLOEXEC",
        killers=(
            f"{_DIRECTORY}::TestForeign::test_link_or_pipe_in_place_of_a_manifest_is_refused_by_name",
        ),
    ),
    Mutant(
        name="other_release_shared",
        why="Two releases with different locks write into each other's slots.",
        file=_FILES,
        find="            if schema != _SCHEMA_VERSION:\n",
        replace="            if schema > _SCHEMA_VERSION:\n",
        killers=(
            f"{_DIRECTORY}::TestReleases::test_slab_of_an_earlier_release_is_refused_by_name",
        ),
    ),
    Mutant(
        name="group_may_write",
        why="Whoever is in the group puts words into the model's mouth.",
        file=_FILES,
        find="_FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH",
        replace="_FOREIGN_WRITE = stat.S_IWOTH",
        killers=(
            f"{_DIRECTORY}::TestModes::test_widened_modes_are_refused_with_what_to_do",
        ),
    ),
    Mutant(
        name="group_may_not_read",
        why="A directory that an orchestrator gives to a group stops the start.",
        file=_FILES,
        find="_FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH",
        replace="_FOREIGN_WRITE = stat.S_IRWXG | stat.S_IWOTH",
        killers=(
            f"{_DIRECTORY}::TestModes::test_group_that_only_reads_is_no_obstacle",
        ),
    ),
    # Room.
    Mutant(
        name="limits_not_asked",
        why="The kernel kills the engine without a word while the slab is made.",
        file=_CREATION,
        find="[mount, *memory_rooms(SYSTEM)]",
        replace="[mount]",
        killers=(
            f"{_ROOMS}::TestStart::test_limit_below_the_capacity_is_told_with_both_numbers",
        ),
    ),
    Mutant(
        name="own_limit_only",
        why="A limit on the pod above kills what the container's own would allow.",
        file=_ROOM,
        find="            for step in (inner, *inner.parents):\n",
        replace="            for step in (inner,):\n",
        killers=(f"{_ROOMS}::TestRooms::test_every_limit_above_us_counts",),
    ),
    Mutant(
        name="page_cache_counted",
        why="A machine that has read a model's files refuses a slab that would fit.",
        file=_ROOM,
        find="        kept = int(used) - sum(_number_of(stat, name) or 0 for name in cache)\n",
        replace="        kept = int(used)\n",
        killers=(f"{_ROOMS}::TestRooms::test_every_limit_above_us_counts",),
    ),
    Mutant(
        name="slab_on_a_disk",
        why="Copies wait for a disk while they hold the engine's blocks.",
        file="ucm/stores/slab/_locks.py",
        find="                require_memory(root)\n",
        replace="                pass\n",
        killers=(f"{_DIRECTORY}::TestPlaces::test_slab_on_a_disk_is_refused",),
    ),
    # What grows.
    Mutant(
        name="key_spaces_kept_for_ever",
        why="Each reset leaves a file, until the directory is full.",
        file=_KEYSPACES,
        find="            inner.remove(*_superfluous(inner, name))\n",
        replace="",
        killers=(
            f"{_DIRECTORY}::TestKeySpaces::test_thousand_resets_leave_as_many_texts_as_one_reads",
        ),
    ),
    Mutant(
        name="oldest_key_spaces_kept",
        why="The texts that are kept are of engines that are long gone.",
        file=_KEYSPACES,
        find="sorted(written, reverse=True)",
        replace="sorted(written)",
        killers=(
            f"{_DIRECTORY}::TestKeySpaces::test_thousand_resets_leave_as_many_texts_as_one_reads",
        ),
    ),
    # What somebody has written over.
    Mutant(
        name="size_of_a_damaged_record_believed",
        why="A process that reads such a block ends, and its engine.",
        file="ucm/stores/slab/_store.py",
        find="max(1, min(int(seen.nbytes[0]), block_bytes))",
        replace="int(seen.nbytes[0])",
        killers=(
            f"{_DAMAGED}::test_size_that_is_none_is_a_damaged_block[native-1-4097]",
        ),
    ),
    Mutant(
        name="repair_of_damaged_chains_given_up",
        why="No look-up or save is answered any more until somebody removes the slab.",
        file="ucm/stores/slab/_index.py",
        find="                self.rebuild(self.moment())\n",
        replace="                raise\n",
        killers=(f"{_DAMAGED}::test_chain_without_end_is_made_anew_behind_a_death",),
    ),
    Mutant(
        name="damage_raised_as_it_is",
        why="An error that nobody awaits ends the engine.",
        file="ucm/stores/slab/_locks.py",
        find="            raise self.damaged(exc) from exc\n",
        replace="            pass\n",
        killers=(
            f"{_DAMAGED}::test_damage_that_cannot_be_put_right_is_told_with_what_to_do",
        ),
    ),
    Mutant(
        name="damaged_owner_of_an_extent_visited",
        why="Nobody who needs room can save any more.",
        file="ucm/stores/slab/_arena.py",
        find="        sizes = set(filter(self._manifest.is_class, sizes))",
        replace="        pass",
        killers=(f"{_DAMAGED}::test_extent_of_no_class_costs_its_slots_alone",),
    ),
    Mutant(
        name="uses_of_others_taken_for_damage",
        why="Whose host says too little is told to remove a slab that is well.",
        file="ucm/stores/slab/_store.py",
        find="            uses.check(len(keys))\n",
        replace="            pass\n",
        killers=(f"{_DAMAGED}::test_error_of_a_caller_is_no_damage",),
    ),
    Mutant(
        name="positions_of_no_lease_taken_for_damage",
        why="Whose stage refuses a block that there is none of is told to remove a slab that is well.",
        file="ucm/stores/slab/_leases.py",
        find="if without and not set(without) <= set(range(len(self.keys))):",
        replace="if False:",
        killers=(f"{_DAMAGED}::test_error_of_a_caller_is_no_damage",),
    ),
    Mutant(
        name="damaged_size_waited_for",
        why="Who looks for damage never hears of it.",
        file="ucm/stores/slab/_verify.py",
        find='min(int(blocks.records["nbytes"][at]), len(into))',
        replace='int(blocks.records["nbytes"][at])',
        killers=(f"{_DAMAGED}::test_verification_waits_for_no_size_that_is_none",),
    ),
)
