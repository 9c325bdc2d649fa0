# SPDX-License-Identifier: Apache-2.0
"""Mutants of what operators do to a slab: looking, emptying, carrying, measuring."""

from tests.mutations.mutant import Mutant

__all__ = ["SHELF"]

_SURVEY = "ucm/stores/slab/_survey.py"
_COMPACT = "ucm/stores/slab/_compact.py"
_CREATION = "ucm/stores/slab/_creation.py"
_INDEX = "ucm/stores/slab/_index.py"
_LOCKS = "ucm/stores/slab/_locks.py"
_TENANTS = "ucm/stores/slab/_tenants.py"
_EXPORTS = "ucm/stores/exports.py"
_MOVING = "ucm/stores/moving.py"
_CHOOSE = "ucm/cli/store/choose.py"
_CHANGE = "ucm/cli/store/change.py"
_MOVE = "ucm/cli/store/move.py"
_TELLING = "ucm/cli/telling.py"
_MEASURING = "ucm/cli/measuring.py"
_TRACES = "ucm/replay/traces.py"
_LOOKS = "tests/cli/test_store_look.py"
_CHANGES = "tests/cli/test_store_change.py"
_MOVES = "tests/cli/test_store_move.py"

SHELF = (
    # Looking.
    Mutant(
        name="evicted_block_told_as_damage",
        why="An operator drops a healthy slab because engines use it meanwhile.",
        file=_SURVEY,
        find='        if not self._holds(slot, int(record["generation"])):\n',
        replace="        if False:\n",
        killers=(f"{_LOOKS}::TestVerify::test_block_that_goes_meanwhile_is_no_damage",),
    ),
    Mutant(
        name="bytes_under_another_key_pass",
        why="A record that has got another key is called well.",
        file=_SURVEY,
        find='        if xxh3_64_intdigest(key, self.seed) != int(record["hash"]):\n',
        replace="        if False:\n",
        killers=(f"{_LOOKS}::TestVerify::test_record_of_another_key_is_damage",),
    ),
    Mutant(
        name="users_seen_but_one",
        why="A slab with one user looks as if nobody used it.",
        file=_LOCKS,
        find="        found.append(max(at, start))  # each owner has one byte\n",
        replace="        found += [at for _ in ranges]\n",
        killers=(f"{_LOOKS}::TestStat::test_occupancy_and_users_are_told",),
    ),
    Mutant(
        name="control_characters_told",
        why="A key space's name rewrites the operator's terminal.",
        file="ucm/cli/output.py",
        find="each if each.isprintable() else mark for each in text",
        replace="each for each in text",
        killers=(
            f"{_LOOKS}::TestLs::test_text_of_a_key_space_is_no_markup_and_no_command",
        ),
    ),
    # Joining and changing.
    Mutant(
        name="joining_makes_a_slab",
        why="A command that names a wrong directory takes its memory.",
        file=_CREATION,
        find='    if geometry is None:\n        raise foreign(directory.root, f"it has no {MANIFEST}")\n',
        replace="    geometry = geometry or Geometry.fit(1 << 20, 4096)\n",
        killers=(
            f"{_CHANGES}::TestJoin::test_slab_that_is_gone_when_it_is_joined_is_not_made",
        ),
    ),
    Mutant(
        name="joining_makes_a_directory",
        why="A command that names a wrong directory makes it.",
        file=_LOCKS,
        find="            made |= makes and _make(root)\n",
        replace="            made |= _make(root)\n",
        killers=(
            f"{_CHANGES}::TestJoin::test_slab_that_is_gone_when_it_is_joined_is_not_made",
        ),
    ),
    Mutant(
        name="any_condition_is_enough",
        why="A key space that was to narrow a choice widens what is removed.",
        file=_CHOOSE,
        find="            chosen &= _is_one(fields, wanted)\n",
        replace="            chosen |= _is_one(fields, wanted)\n",
        killers=(
            f"{_CHANGES}::TestRm::test_conditions_of_several_kinds_must_all_be_true",
        ),
    ),
    Mutant(
        name="removed_without_a_question",
        why="A typing error empties the store of a machine.",
        file=_CHANGE,
        find="            if not yes:\n",
        replace="            if yes:\n",
        killers=(f"{_CHANGES}::TestRm::test_nothing_goes_without_a_yes",),
    ),
    Mutant(
        name="dry_run_removes",
        why="Who only asks what would go has lost it.",
        file=_CHANGE,
        find="        if matched and not dry_run:\n",
        replace="        if matched:\n",
        killers=(f"{_CHANGES}::TestRm::test_nothing_goes_in_a_dry_run",),
    ),
    Mutant(
        name="empty_salt_taken_for_none",
        why="A script whose variable is not set forgets the blocks of a prompt without a salt.",
        file=_CHOOSE,
        find='        if self.salt == "":',
        replace="        if False:",
        killers=(
            f"{_LOOKS}::TestLs::test_prompt_ids_choose_its_blocks_with_their_salt",
        ),
    ),
    Mutant(
        name="salt_of_a_prompt_forgotten",
        why="The blocks of everybody go instead of those of one tenant.",
        file=_CHOOSE,
        find='self.prompt, text, os.fsencode(self.salt or ""))',
        replace='self.prompt, text, b"")',
        killers=(
            f"{_LOOKS}::TestLs::test_prompt_ids_choose_its_blocks_with_their_salt",
        ),
    ),
    Mutant(
        name="pinned_memory_returned",
        why="A device goes on writing to pages that are no longer the slab's.",
        file=_COMPACT,
        find="        if are_bound(survey.arena_fd):\n",
        replace="        if False:\n",
        killers=(
            f"{_CHANGES}::TestCompact::test_memory_goes_back_only_while_nobody_uses_it",
        ),
    ),
    Mutant(
        name="compacting_evicts",
        why="Giving back what is not needed loses a block that came meanwhile.",
        file=_INDEX,
        find="(len(committed) and not evicts)",
        replace="(len(committed) and evicts and False)",
        killers=(
            "tests/stores/test_slab_index.py::TestWithdrawal::test_slot_with_a_block_is_not_withdrawn_where_none_is_to_go",
        ),
    ),
    Mutant(
        name="released_extent_keeps_its_owner",
        why="Memory that was given back stays with the model that does not need it.",
        file=_COMPACT,
        find="                owners[extent] = NOBODY\n",
        replace="",
        killers=(
            f"{_CHANGES}::TestCompact::test_slots_of_the_dead_and_empty_extents_come_back",
        ),
    ),
    # Carrying.
    Mutant(
        name="exported_head_believed",
        why="A block gets the bytes of another: a flipped bit in its key is not noticed.",
        file=_EXPORTS,
        find="        if found != xxh3_64_intdigest(data):\n",
        replace="        if False:\n",
        killers=(
            f"{_MOVES}::TestFormat::test_key_of_another_block_does_not_get_its_bytes",
        ),
    ),
    Mutant(
        name="exported_bytes_believed",
        why="Wrong bytes are stored with a checksum that makes them right.",
        file=_EXPORTS,
        find="return block_checksum(head.key, into[: head.nbytes]) == head.checksum",
        replace="return True",
        killers=(f"{_MOVES}::TestFormat::test_block_with_other_bytes_is_left_out",),
    ),
    Mutant(
        name="export_read_by_all",
        why="Whoever can read the file learns what was asked of the model.",
        file=_MOVE,
        find="os.open(temporary, flags, 0o600)",
        replace="os.open(temporary, flags, 0o644)",
        killers=(
            f"{_MOVES}::TestThereAndBack::test_file_is_its_owners_alone_and_never_half",
        ),
    ),
    Mutant(
        name="export_in_any_order",
        why="Where room is short the blocks that nobody asks for fill it.",
        file=_MOVING,
        find='found[3].argsort(kind="stable")',
        replace='found[3].argsort(kind="stable")[::-1]',
        killers=(
            f"{_MOVES}::TestWarm::test_hottest_come_first_and_nothing_goes_for_them",
        ),
    ),
    Mutant(
        name="warming_evicts",
        why="Blocks of a running model go for those of a file.",
        file=_MOVING,
        find="moments=uses.moments + _EARLIEST_NS",
        replace="moments=uses.moments",
        killers=(
            f"{_MOVES}::TestWarm::test_hottest_come_first_and_nothing_goes_for_them",
        ),
    ),
    Mutant(
        name="imported_blocks_count_as_new",
        why="What was used yesterday pushes out what was used today.",
        file=_MOVING,
        find="self._exported_ns - min(max(0, head.age_ns), _OLDEST_NS)",
        replace="self._exported_ns",
        killers=(f"{_MOVES}::TestThereAndBack::test_moments_and_tenants_travel",),
    ),
    Mutant(
        name="tenant_of_a_place_is_its_number",
        why="An import counts blocks for another tenant.",
        file=_TENANTS,
        find="numbers - (numbers > 0)",
        replace="numbers",
        killers=(f"{_MOVES}::TestThereAndBack::test_moments_and_tenants_travel",),
    ),
    Mutant(
        name="imported_into_its_own_size",
        why="A block lies where no engine looks for it.",
        file=_MOVING,
        find="        wanted = self._sizes.get(head.key[1:_HEAD].hex(), 0)\n",
        replace="        wanted = head.nbytes\n",
        killers=(
            f"{_MOVES}::TestThereAndBack::test_larger_blocks_come_into_slots_of_their_size",
        ),
    ),
    # Measuring and replaying.
    Mutant(
        name="measured_in_a_store",
        why="A measurement writes into the directory of a store.",
        file=_MEASURING,
        find='    if (path / "slab.json").exists():\n',
        replace="    if False:\n",
        killers=("tests/cli/test_bench.py::test_store_that_is_there_is_not_touched",),
    ),
    Mutant(
        name="garbage_ends_in_a_traceback",
        why="Bytes that are no text where a slab should be end an engine without a word.",
        file="ucm/decoding.py",
        find="(msgspec.MsgspecError, UnicodeError, RecursionError)",
        replace="(msgspec.MsgspecError,)",
        killers=(
            "tests/stores/test_slab_refusals.py::TestRefusals::test_damaged_key_space_is_told",
        ),
    ),
    Mutant(
        name="trace_without_a_bound",
        why="A file that somebody sent takes all memory.",
        file=_TRACES,
        find="        if num_blocks > most_blocks:\n",
        replace="        if False:\n",
        killers=(
            "tests/cli/test_replay.py::test_trace_that_would_not_fit_into_memory_is_refused",
        ),
    ),
)
