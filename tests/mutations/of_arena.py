# SPDX-License-Identifier: Apache-2.0
"""Mutants of a slab's extents: who has them, when they come, how they change."""

from tests.mutations.mutant import Mutant

__all__ = ["ARENA"]

_ARENA = "ucm/stores/slab/_arena.py"
_CLASSES = "ucm/stores/slab/_classes.py"
_EXTENTS = "ucm/stores/slab/_extents.py"
_MEMORY = "ucm/stores/slab/_memory.py"
_OPENED = "ucm/stores/slab/_opened.py"
_POPULATE = "ucm/stores/slab/_populate.py"
_SETTLE = "ucm/stores/slab/_settle.py"
_RESERVING = "ucm/stores/slab/_reserving.py"
_SHARES = "tests/stores/test_slab_shares.py"
_USED = "ucm/stores/slab/_used.py"
_CUT = "tests/stores/test_slab_extents.py"
_SEVERAL = "tests/stores/test_slab_arena.py::TestSeveral"
_TABLE = "tests/stores/test_slab_arena.py::TestTable"
_CAPACITY = "tests/stores/test_slab_arena.py::TestCapacity"
_JOINING = "tests/stores/test_slab_populate.py::TestJoining"
_ENDS = "tests/stores/test_slab_populate.py::TestEnds"
_SHORTAGE = "tests/stores/test_slab_populate.py::TestShortage"
_COLLAPSES = "tests/stores/test_slab_memory.py::TestCollapse"
_PAGES = "tests/stores/test_slab_memory.py::TestHugePages"
_NODES = "tests/stores/test_slab_memory.py::TestNodes"
_LOST = "tests/stores/test_slab_lost.py::TestWrongBytes"

ARENA = (
    # Of what a share is one.
    Mutant(
        name="tenants_share_of_a_whole_slab",
        why="With several models in one slab a tenant has all slots of its own.",
        file=_RESERVING,
        find="int(limit * index.num_to_have())",
        replace="int(limit * index.layout.num_slots)",
        killers=(
            f"{_SHARES}::TestSeveralSizes::test_tenant_has_its_share_of_what_its_model_can_have",
            f"{_SHARES}::test_slab_without_all_of_its_memory_is_shared_as_it_is",
        ),
    ),
    Mutant(
        name="share_of_what_a_model_has_now",
        why="A model of which one tenant is there stays small for ever.",
        file=_USED,
        find="min(max(there, self.part()), most)",
        replace="there",
        killers=(
            f"{_SHARES}::TestSeveralSizes::test_tenant_has_its_share_of_what_its_model_can_have",
        ),
    ),
    Mutant(
        name="size_that_nobody_uses_takes_part",
        why="A model that is gone leaves the tenants of others half of a slab.",
        file=_ARENA,
        find="            are_bound(arena.lock.fd, region_of(size))\n",
        replace="            True\n",
        killers=(
            f"{_SHARES}::TestSeveralSizes::test_size_that_nobody_uses_takes_no_part",
        ),
    ),
    # Who has an extent.
    Mutant(
        name="extent_of_a_writer_taken",
        why="Two models write into the same memory.",
        file=_ARENA,
        find="            if not victim.index.withdraw(victim.geometry.slots_of(extent)):\n                return False\n",
        replace="            victim.index.withdraw(victim.geometry.slots_of(extent))\n",
        killers=(f"{_SEVERAL}::test_extent_that_is_being_written_stays",),
    ),
    Mutant(
        name="extent_taken_without_a_word",
        why="A model serves bytes that another one has written.",
        file=_ARENA,
        find="            if not victim.index.withdraw(victim.geometry.slots_of(extent)):\n                return False\n",
        replace="",
        killers=(
            f"{_SEVERAL}::test_reader_of_an_extent_that_is_taken_fails_its_recheck",
        ),
    ),
    Mutant(
        name="slots_of_the_dead_keep_their_extent",
        why="What a killed process was writing is lost to every other model.",
        file=_ARENA,
        find="                    _reclaim(others[theirs])\n",
        replace="                    pass\n",
        killers=(f"{_SEVERAL}::test_slot_of_a_killed_writer_is_taken_with_its_extent",),
    ),
    Mutant(
        name="claim_of_the_dead_forgotten",
        why="Memory that a process had claimed when it was killed is nobody's for ever.",
        file=_ARENA,
        find="            with self._arena.lock.held():\n                self.admit_own()\n            seen",
        replace="            seen",
        killers=(
            f"{_SEVERAL}::test_claim_of_the_dead_is_used_by_the_next_who_needs_it",
        ),
    ),
    Mutant(
        name="copied_index_believed",
        why="An index that was put back uses memory that has gone to another model.",
        file=_OPENED,
        find="                drop_what_others_own(self._class, self.arena.owners)\n",
        replace="                pass\n",
        killers=(f"{_TABLE}::test_index_from_a_copy_gets_no_extent_of_others",),
    ),
    Mutant(
        name="two_indexes_of_one_class",
        why="A copy of the index gives slots away that are used under the first one.",
        file=_OPENED,
        find="            self._tie(arena_lock.fd, self._class.lock.fd, self._class.name)\n",
        replace="",
        killers=(f"{_LOST}::test_copy_of_a_file_is_not_used_beside_it",),
    ),
    Mutant(
        name="table_trusted",
        why="A table that was lost gives memory away that is in use.",
        file=_SETTLE,
        find="        owners[free] = opened.geometry.slot_bytes\n",
        replace="",
        killers=(f"{_TABLE}::test_what_the_table_says_follows_from_the_indexes",),
    ),
    # Which extent.
    Mutant(
        name="no_share_for_the_new",
        why="A model that starts when the slab is full stores nothing.",
        file=_EXTENTS,
        find="    if count_of.get(wanted, 0) < share:\n",
        replace="    if False:\n",
        killers=(
            f"{_CUT}::TestChoice::test_who_gives",
            f"{_SEVERAL}::test_new_model_gets_its_share_of_a_full_slab",
        ),
    ),
    Mutant(
        name="classes_take_turns",
        why="Two models take each other's memory with every save, and keep nothing.",
        file=_EXTENTS,
        find="            if count > (share if other in seen.live else 0):\n",
        replace="            if True:\n",
        killers=(f"{_CUT}::TestChoice::test_who_gives",),
    ),
    Mutant(
        name="newest_extent_goes",
        why="The prompts of this minute go, those of yesterday stay.",
        file=_EXTENTS,
        find="    return int(extents[seen.used_ns[extents].argmin()])\n",
        replace="    return int(extents[seen.used_ns[extents].argmax()])\n",
        killers=(
            f"{_CUT}::TestChoice::test_who_gives",
            f"{_SEVERAL}::test_model_that_is_gone_gives_way",
        ),
    ),
    Mutant(
        name="extent_by_its_oldest_block",
        why="One old block takes the others of its extent along.",
        file=_ARENA,
        find="            used_ns[extents] = uses_of(visited, extents, -1)\n",
        replace="            used_ns[extents] = 0\n",
        killers=(f"{_SEVERAL}::test_blocks_that_are_kept_longer_keep_their_extent",),
    ),
    # Memory.
    Mutant(
        name="used_before_it_is_there",
        why="The kernel ends the engine where memory is short.",
        file=_ARENA,
        find="        free: npt.NDArray[np.bool_] = (owners == NOBODY) & self._arena.populated[\n            : len(owners)\n        ]\n",
        replace="        free: npt.NDArray[np.bool_] = owners == NOBODY\n",
        killers=(f"{_JOINING}::test_slot_without_memory_is_not_given",),
    ),
    Mutant(
        name="all_populated_at_the_start",
        why="Eight ranks wait minutes for a terabyte.",
        file=_POPULATE,
        find="        left = steps[1:] if is_over else steps\n",
        replace="        left = [step for step in steps[1:] if not self._advance(step)]\n",
        killers=(f"{_JOINING}::test_eight_ranks_serve_while_one_waits_for_memory",),
    ),
    Mutant(
        name="everybody_populates",
        why="Eight ranks do the same work and hold each other up.",
        file=_POPULATE,
        find="        if not self._take_turn() or self._is_done(step):\n",
        replace="        if self._is_done(step):\n",
        killers=(f"{_JOINING}::test_eight_ranks_serve_while_one_waits_for_memory",),
    ),
    Mutant(
        name="turn_dies_with_its_holder",
        why="A slab whose first user was killed stays as small as it was.",
        file=_POPULATE,
        find="            while not self._advance(step):\n                self._ends.wait(_NAP_S)\n",
        replace="            self._advance(step)\n",
        killers=(f"{_ENDS}::test_another_goes_on_where_one_died",),
    ),
    Mutant(
        name="limit_not_looked_at_again",
        why="The kernel kills the engine while the slab grows.",
        file=_POPULATE,
        find="        if least.left < rest.stop - rest.start + spare:\n",
        replace="        if False:\n",
        killers=(
            f"{_SHORTAGE}::test_memory_that_ends_half_way_is_told_and_nothing_is_killed",
        ),
    ),
    Mutant(
        name="all_slabs_fill_at_the_same_moment",
        why="The kernel kills an engine beside others that each took what was left.",
        file=_POPULATE,
        find="        if least.left >= _AMPLE_BYTES:\n",
        replace="        if least.left >= 0:\n",
        killers=(
            (
                "tests/stores/test_slab_room.py::TestStart::"
                "test_slabs_that_fill_at_the_same_moment_stay_within_the_limit"
            ),
        ),
    ),
    Mutant(
        name="holes_unseen",
        why="A slab put back from a copy ends the process at its first save.",
        file=_SETTLE,
        find="    return os.lseek(data_fd, start, os.SEEK_HOLE) >= stop\n",
        replace="    return True\n",
        killers=(f"{_TABLE}::test_memory_that_a_copy_has_lost_is_populated_again",),
    ),
    # Capacity.
    Mutant(
        name="moved_without_its_bytes",
        why="A slab that was made smaller has blocks that do not verify.",
        file=_SETTLE,
        find="            _copy(slab.data_fd, start, min(stop, slab.manifest.data_bytes), into)\n",
        replace="            pass\n",
        killers=(f"{_CAPACITY}::test_smaller_one_keeps_what_was_used_last",),
    ),
    Mutant(
        name="oldest_extents_stay",
        why="A smaller slab keeps what nobody asks for any more.",
        file=_EXTENTS,
        find='    stored = stored[used_ns[stored].argsort(kind="stable")[::-1]]\n',
        replace='    stored = stored[used_ns[stored].argsort(kind="stable")]\n',
        killers=(
            f"{_CUT}::TestPlaces::test_what_was_used_last_stays",
            f"{_CAPACITY}::test_smaller_one_keeps_what_was_used_last",
        ),
    ),
    Mutant(
        name="seed_of_a_new_index",
        why="A slab that was made larger finds none of its blocks.",
        file=_CLASSES,
        find="(Word.SEED, Word.GENERATION,",
        replace="(Word.GENERATION,",
        killers=(f"{_CAPACITY}::test_larger_one_keeps_every_block",),
    ),
    Mutant(
        name="capacity_changed_under_users",
        why="The memory of a running engine is cut off.",
        file=_OPENED,
        find="        if not are_bound(arena_fd):\n",
        replace="        if True:\n",
        killers=(f"{_CAPACITY}::test_slab_in_use_is_joined_as_it_is",),
    ),
    Mutant(
        name="bytes_moved_before_their_place_is_free",
        why="A death while the slab shrinks leaves blocks with the bytes of others.",
        file=_SETTLE,
        find="                opened.index.withdraw(opened.geometry.slots_of(extent))\n",
        replace="                pass\n",
        killers=(f"{_CAPACITY}::test_death_while_it_changes_leaves_a_slab",),
    ),
    # Pages and nodes.
    Mutant(
        name="huge_pages_taken_on_trust",
        why="An operator who requires huge pages runs without them.",
        file=_MEMORY,
        find="        if self.huge_pages is HugePages.REQUIRE and not has_huge_pages(memory, system):\n",
        replace="        if False:\n",
        killers=(f"{_PAGES}::test_mapping_that_got_none_is_refused",),
    ),
    Mutant(
        name="used_memory_collapsed",
        why="Each engine that starts has all others wait while their memory moves.",
        file="ucm/stores/slab/_populate.py",
        find="step: _Step, *, collapses: bool = False)",
        replace="step: _Step, *, collapses: bool = True)",
        killers=(f"{_COLLAPSES}::test_only_memory_that_nobody_uses_is_collapsed",),
    ),
    Mutant(
        name="unwanted_huge_pages",
        why="`store.huge_pages: off` has them all the same.",
        file="ucm/stores/slab/_opened.py",
        find="collapses=wishes.huge_pages is not HugePages.OFF,",
        replace="collapses=True,",
        killers=(f"{_COLLAPSES}::test_only_memory_that_nobody_uses_is_collapsed",),
    ),
    Mutant(
        name="memory_of_others_collapsed",
        why="What lies behind a piece of memory, and may be in use, is touched.",
        file=_MEMORY,
        find="range(first, len(memory) - _HUGE_BYTES + 1, _HUGE_BYTES)",
        replace="range(first, len(memory), _HUGE_BYTES)",
        killers=(
            f"{_COLLAPSES}::test_whole_huge_pages_are_asked_for_and_all_memory_comes",
        ),
    ),
    Mutant(
        name="huge_pages_of_one_node",
        why="With `store.numa: interleave` all of a slab lies at one node.",
        file=_MEMORY,
        find="        some = at + number % (_HUGE_BYTES // _PAGE) * _PAGE\n",
        replace="        some = at + 0 * number\n",
        killers=(
            f"{_COLLAPSES}::test_whole_huge_pages_are_asked_for_and_all_memory_comes",
        ),
    ),
    Mutant(
        name="slab_mapped_anywhere",
        why="No huge page of the file can be one of the mapping.",
        file=_MEMORY,
        find="        skipped = -first % _HUGE_BYTES\n",
        replace="        skipped = 4096\n",
        killers=(
            (
                "tests/stores/test_slab_memory.py::TestMapping::"
                "test_file_is_mapped_from_where_a_huge_page_begins"
            ),
        ),
    ),
    Mutant(
        name="huge_pages_of_another_mapping",
        why="The heap's huge pages are taken for the slab's.",
        file=_MEMORY,
        find='        if entry.startswith(f"{memory.ctypes.data:x}-"):\n',
        replace="        if entry:\n",
        killers=(f"{_PAGES}::test_only_the_own_mapping_is_looked_at",),
    ),
    Mutant(
        name="node_not_told_to_the_kernel",
        why="All memory lies at the node of whoever was first.",
        file=_MEMORY,
        find="        _bind(memory, self.numa, system)\n",
        replace="",
        killers=(f"{_NODES}::test_slab_lies_where_the_setting_says",),
    ),
    Mutant(
        name="any_node_will_do",
        why="A node that is not there is found out by a failed start half way, or never.",
        file=_MEMORY,
        find="    if wanted - known and not problem:\n",
        replace="    if False:\n",
        killers=(f"{_NODES}::test_node_that_is_not_there_is_refused",),
    ),
)
