# SPDX-License-Identifier: Apache-2.0
"""Mutants of what reaches the tiers below a slab, and what is told of them."""

from tests.mutations.mutant import Mutant

__all__ = ["BELOW"]

_POLICY = (
    "tests/integration/vllm/test_tiers_pending.py"
    "::test_engine_s_policy_decides_whose_fetch_is_first"
)
_MOONCAKE = "ucm/backends/mooncake.py"
_NATIVE = "ucm/native.c"
_READING = "tests/backends/test_files_reading.py::TestReading"
_GATE = "tests/backends/test_files_reading.py::TestGate"
_STRAIGHT = "tests/backends/test_files_straight.py"
_LEAVES = "tests/backends/test_files_writing.py::TestGate"
_WRITES = "tests/backends/test_files_writing.py::TestWriting"
_WRITING = "ucm/backends/files/_writing.py"
_TIMEOUTS = "tests/backends/test_mooncake.py::TestTimeouts"

BELOW = (
    Mutant(
        name="policy_is_not_looked_at",
        why="R-58: an engine that runs requests by priority has them fetched as they come.",
        file="ucm/integration/vllm/setup.py",
        find="            is_ranked=_is_ranked(vllm_config),\n",
        replace="",
        killers=(f"{_POLICY}[priority--3]",),
    ),
    Mutant(
        name="policy_does_not_reach_the_reader",
        why="R-58: the policy is read, and nothing comes of it.",
        file="ucm/integration/vllm/scheduler.py",
        find="            is_ranked=setup.is_ranked,\n",
        replace="",
        killers=(f"{_POLICY}[priority--3]",),
    ),
    Mutant(
        name="everybody_is_ranked",
        why="R-58: in an engine that serves in order of arrival anybody may push in front.",
        file="ucm/integration/vllm/setup.py",
        find='return getattr(scheduling, "policy", "") == "priority"',
        replace="return True",
        killers=(f"{_POLICY}[fcfs-0]",),
    ),
    Mutant(
        name="mooncake_waits_amid_a_block",
        why="R-52: a node that stops while bytes come from it holds a call for 30 seconds.",
        file=_MOONCAKE,
        find='            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,',
        replace="            ",
        killers=(f"{_TIMEOUTS}::test_client_is_told_when_to_give_up",),
    ),
    Mutant(
        name="mooncake_shares_few_connections",
        why="R-52: transfers to a node that has stopped time out four by four.",
        file=_MOONCAKE,
        find='            "MC_TCP_LANES_PER_PEER": str(_LANES),\n',
        replace="",
        killers=(f"{_TIMEOUTS}::test_client_is_told_when_to_give_up",),
    ),
    Mutant(
        name="mooncake_calls_are_long",
        why="R-52: a call waits for one connection after the other, and nobody can end it.",
        file=_MOONCAKE,
        find="_TRANSFERS = 2 * _LANES\n",
        replace="_TRANSFERS = 4 * _LANES\n",
        killers=(f"{_TIMEOUTS}::test_calls_at_a_time_wait_two_time_outs",),
    ),
    Mutant(
        name="signal_hides_a_file_that_is_read",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file=_NATIVE,
        find="    while (file < 0 && errno == EINTR);\n",
        replace="    while (0);\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="signal_hides_the_length_of_a_file",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file=_NATIVE,
        find="    while (fstat(file, &is))\n        if (errno != EINTR) return errno;\n",
        replace="    if (fstat(file, &is)) return errno;\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="signal_hides_a_file_that_is_looked_for",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file=_NATIVE,
        find="    while (lstat(path, &is))\n        if (errno != EINTR) return errno;\n",
        replace="    if (lstat(path, &is)) return errno;\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="late_bytes_written_by_native_code",
        why="A read that hung writes to a slot that is another block's by now.",
        file=_NATIVE,
        find="    if (!touch(sink->gate)) return LEFT;\n",
        replace="    (void)!touch(sink->gate);\n",
        killers=(f"{_STRAIGHT}::test_who_leaves_amid_a_call_gets_nothing_more",),
    ),
    Mutant(
        name="straight_read_may_hang",
        why="X-14: who leaves while a mount hangs waits for a read to its memory.",
        file=_NATIVE,
        find="preadv2(file, parts, 2, (off_t)place, RWF_NOWAIT);",
        replace="preadv2(file, parts, 2, (off_t)place, 0);",
        killers=(f"{_STRAIGHT}::test_what_may_hang_goes_by_way_of_a_piece",),
    ),
    Mutant(
        name="straight_read_for_nobody",
        why="X-14: a read writes to a slot that is another block's by now.",
        file=_NATIVE,
        find="    if (!touch(sink->gate)) return 0;\n",
        replace="    (void)!touch(sink->gate);\n",
        killers=(f"{_STRAIGHT}::test_who_leaves_amid_a_call_gets_nothing_more",),
    ),
    Mutant(
        name="straight_read_is_not_waited_for",
        why="A slot is given back while a thread just writes to it.",
        file=_NATIVE,
        find="    ssize_t got = preadv2",
        replace="    atomic_fetch_sub(&sink->gate->num_touching, 1);\n    ssize_t got = preadv2",
        killers=(f"{_STRAIGHT}::test_who_leaves_waits_for_what_is_read_straight",),
    ),
    Mutant(
        name="half_a_header_is_a_place_to_go_on",
        why="A header that came in parts is another one, and its block is garbage.",
        file=_NATIVE,
        find="    return place < header_bytes ? 0 : place;\n",
        replace="    return place && place < header_bytes ? header_bytes : place;\n",
        killers=(f"{_STRAIGHT}::test_what_memory_has_not_comes_by_way_of_a_piece",),
    ),
    Mutant(
        name="digest_of_what_memory_has",
        why="What came by way of a piece is no part of the digest, and each such block is damaged.",
        file=_NATIVE,
        find="    memcpy(target, source, nbytes);\n    digest_part(sink, target, nbytes);\n",
        replace="    memcpy(target, source, nbytes);\n",
        killers=(f"{_STRAIGHT}::test_what_may_hang_goes_by_way_of_a_piece",),
    ),
    Mutant(
        name="digests_of_one_seed",
        why="All blocks but the first of a call are damaged.",
        file=_NATIVE,
        find="digester->reset(sink.state, seeds[at])",
        replace="digester->reset(sink.state, seeds[0])",
        killers=(f"{_READING}::test_header_and_bytes_arrive",),
    ),
    Mutant(
        name="digest_without_memory",
        why="What is told of a block is a number that nobody has computed.",
        file=_NATIVE,
        find="digester && !sink.state ? ENOMEM : 0;",
        replace="0;\n        if (!sink.state) digester = NULL;",
        killers=(f"{_READING}::test_without_memory_for_a_digest_nothing_is_read",),
    ),
    Mutant(
        name="told_digest_computed_again",
        why="What was hashed as it came is read from memory once more, which costs more than it took.",
        file="ucm/agent/landing.py",
        find="    if done and lease.takes_digests and",
        replace="    if not done and lease.takes_digests and",
        killers=(
            "tests/agent/test_landing.py::test_digest_that_was_told_is_not_computed_again_and_shows_no_wrong_block",
        ),
    ),
    Mutant(
        name="some_digests_seal_all",
        why="A batch of which some was hashed as it came seals the others with nothing.",
        file="ucm/agent/landing.py",
        find="len(known) == len(done):",
        replace="known:",
        killers=(
            "tests/agent/test_landing.py::test_blocks_are_seen_whoever_has_hashed_them",
        ),
    ),
    Mutant(
        name="functions_of_xxhash_believed",
        why="Another build of it tells other digests, and all that is fetched is damaged.",
        file="ucm/xxh3.py",
        find="        self._check()\n",
        replace="",
        killers=(
            "tests/test_xxh3.py::test_functions_that_say_something_else_are_not_used",
        ),
    ),
    Mutant(
        name="native_write_asks_for_ever",
        why="A mount that takes nothing, and tells no error, keeps a thread and a core for good.",
        file=_NATIVE,
        find="        if (!done) return EIO;\n",
        replace="",
        killers=(
            "tests/backends/test_files_writing.py::TestWriting::test_mount_that_takes_nothing_is_not_asked_for_ever",
        ),
    ),
    Mutant(
        name="write_asks_for_ever",
        why="A mount that takes nothing, and tells no error, keeps a thread and a core for good.",
        file="ucm/backends/files/_writing.py",
        find="if not (done := os.writev(fd, parts)):",
        replace="if (done := os.writev(fd, parts)) < 0:",
        killers=(
            "tests/backends/test_files_writing.py::TestWriting::test_mount_that_takes_nothing_is_not_asked_for_ever",
        ),
    ),
    Mutant(
        name="line_of_a_cache_begins_anywhere",
        why="What is loaded to memory that begins amid a line of the caches lacks its first bytes.",
        file=_NATIVE,
        find="        memcpy(to, from, head);\n",
        replace="",
        killers=(
            "tests/devices/test_native_moves.py::test_bytes_of_any_length_lie_where_they_belong",
        ),
    ),
    Mutant(
        name="saves_leave_the_caches",
        why="The checksums of a save read all of it from memory: it takes a fifth longer.",
        file="ucm/devices/cpu.py",
        find="len(copies), not is_load)",
        replace="len(copies), is_load)",
        killers=(
            "tests/devices/test_native_moves.py::test_what_is_saved_is_read_next",
        ),
    ),
    Mutant(
        name="native_copies_are_not_waited_for",
        why="A slot is given back while a thread just writes to it.",
        file=_NATIVE,
        find="    while (atomic_load(&gate->num_touching)) sched_yield();\n",
        replace="    (void)sched_yield;\n",
        killers=(f"{_GATE}::test_who_leaves_waits_for_a_native_copy",),
    ),
    Mutant(
        name="call_has_few_files_for_each_thread",
        why="Small blocks go to a share by four times as many calls, each with two looks at it.",
        file="ucm/backends/files/_backend.py",
        find="_PART_BLOCKS = 16\n",
        replace="_PART_BLOCKS = 4\n",
        killers=(
            "tests/backends/test_files_writing.py::test_call_has_several_files_for_each_thread",
        ),
    ),
    Mutant(
        name="native_writer_overwrites_what_is_there",
        why="X-02: of two writers of a block the later one writes all of it again.",
        file=_NATIVE,
        find="find_file(names[FINAL]) ? 0 : EEXIST;",
        replace="0;",
        killers=(f"{_WRITES}::test_block_that_is_there_stays_and_nothing_is_written",),
    ),
    Mutant(
        name="native_loser_leaves_its_file",
        why="Each race of two machines fills the share with a block that nobody finds.",
        file=_NATIVE,
        find="    if (error) unlink(names[TEMPORARY]);\n",
        replace="",
        killers=(f"{_WRITES}::test_later_writer_leaves_the_first_ones_block",),
    ),
    Mutant(
        name="native_rename_in_place_of_a_link",
        why="X-02: who comes second takes the first one's place.",
        file=_NATIVE,
        find="    return has_links ? error : rename",
        replace="    return has_links > 1 ? error : rename",
        killers=(f"{_WRITES}::test_later_writer_leaves_the_first_ones_block",),
    ),
    Mutant(
        name="native_writer_needs_links",
        why="A file system without links takes no block.",
        file=_NATIVE,
        find="    return has_links ? error : rename(temporary, path) ? errno : 0;\n",
        replace="    return has_links + rename(temporary, path) ? error : error;\n",
        killers=(f"{_WRITES}::test_file_system_without_links_takes_renames",),
    ),
    Mutant(
        name="full_mount_is_not_heard_when_it_is_closed",
        why="R-51: a block of which the mount has dropped bytes gets its name.",
        file=_NATIVE,
        find="    if (close(file) && !error) error = errno;  //",
        replace="    close(file);  //",
        killers=(
            f"{_WRITES}::test_error_of_each_call_is_told_and_leaves_nothing[native-28-close]",
        ),
    ),
    Mutant(
        name="folder_for_which_is_no_room_is_no_answer",
        why="R-51: a mount that is full is taken for one that is away.",
        file=_NATIVE,
        find="    if (error == ENOENT && !(error = make_folders(names[FINAL])))\n",
        replace="    if (error == ENOENT && !make_folders(names[FINAL]))\n",
        killers=(
            f"{_WRITES}::test_error_of_each_call_is_told_and_leaves_nothing[native-28-mkdir]",
        ),
    ),
    Mutant(
        name="short_native_write_is_a_whole_one",
        why="A block whose last bytes were not taken gets its name.",
        file=_NATIVE,
        find="            part->iov_len -= (size_t)done;\n",
        replace="            return 0;\n",
        killers=(f"{_WRITES}::test_header_and_bytes_are_there_for_nobody_else",),
    ),
    Mutant(
        name="foreign_name_is_taken_for_a_block",
        why="R-51: who finds its own first name taken says that the block is there.",
        file=_NATIVE,
        find="    if (file < 0) return errno == EEXIST ? WRONG : errno;\n",
        replace="    if (file < 0) return errno;\n",
        killers=(f"{_WRITES}::test_name_that_somebody_has_taken_is_not_followed",),
    ),
    Mutant(
        name="foreign_name_is_taken_for_a_block_by_python",
        why="R-51: who finds its own first name taken says that the block is there.",
        file=_WRITING,
        find="            return WRONG\n",
        replace="            return errno.EEXIST\n",
        killers=(f"{_WRITES}::test_name_that_somebody_has_taken_is_not_followed",),
    ),
    Mutant(
        name="late_native_write_published",
        why="X-14: bytes of a slot that was used again get the name of the block before.",
        file=_NATIVE,
        find="    if (atomic_load(&gate->is_left)) return LEFT;  // other bytes may lie there by now\n",
        replace="    (void)gate;\n",
        killers=(f"{_LEAVES}::test_who_leaves_amid_a_write_has_nothing_put",),
    ),
    Mutant(
        name="native_writer_goes_on_for_nobody",
        why="X-14: a thread that came back writes what nobody wants, file by file.",
        file=_NATIVE,
        find="        errors[at] = atomic_load(&gate->is_left) ? LEFT : find",
        replace="        errors[at] = find",
        killers=(f"{_LEAVES}::test_who_leaves_amid_a_write_has_nothing_put",),
    ),
    Mutant(
        name="signal_ends_a_native_write",
        why="On a mount over a network a signal keeps a block from a tier.",
        file=_NATIVE,
        find="        if (done < 0 && errno != EINTR) return errno;\n",
        replace="        if (done < 0) return errno;\n",
        killers=(f"{_WRITES}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="lasting_blocks_are_not_flushed",
        why="What was to outlast a loss of power is written by the way that flushes nothing.",
        file=_WRITING,
        find="xxh3.DIGESTER is None or is_lasting:\n",
        replace="xxh3.DIGESTER is None:\n",
        killers=(f"{_WRITES}::test_what_is_to_outlast_power_is_flushed",),
    ),
    Mutant(
        name="damage_is_written_by_native_code",
        why="R-55: what rotted in the slab is a block of the tier, read again and again.",
        file=_NATIVE,
        find="== from->digest ? 0 : DAMAGED;",
        replace="== from->digest ? 0 : 0;",
        killers=(f"{_WRITES}::test_damaged_bytes_get_no_name",),
    ),
    Mutant(
        name="damage_is_written_by_python",
        why="R-55: where no compiler was, what rotted in the slab is a block of the tier.",
        file=_WRITING,
        find="            return DAMAGED\n",
        replace="            pass\n",
        killers=(f"{_WRITES}::test_damaged_bytes_get_no_name",),
    ),
    Mutant(
        name="mount_without_such_renames",
        why="R-51: no block is ever put on a mount over a network.",
        file=_NATIVE,
        find="    if (error != EINVAL && error",
        replace="    if (error",
        killers=(f"{_WRITES}::test_later_writer_leaves_the_first_ones_block",),
    ),
    Mutant(
        name="tier_that_verifies_is_asked_to_delete_other_bytes",
        why="A block that another machine has put there meanwhile is deleted.",
        file="ucm/agent/spill.py",
        find="                if verdict not in _WHY:  # else nothing was stored\n                    torn",
        replace="                if True:\n                    torn",
        killers=(
            "tests/agent/test_spill_recycled.py::TestRecycled::test_slot_recycled_under_a_put_that_verifies_is_not_damaged",
        ),
    ),
    Mutant(
        name="block_is_read_before_a_put_that_verifies",
        why="Large blocks come from memory twice, once for nothing.",
        file="ucm/agent/spill.py",
        find="                if not self._can.verifies:\n",
        replace="                if True:\n",
        killers=(
            "tests/agent/test_spill_recycled.py::TestRecycled::test_block_is_read_once_by_a_tier_that_verifies",
        ),
    ),
)
