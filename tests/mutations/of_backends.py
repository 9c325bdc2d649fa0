# SPDX-License-Identifier: Apache-2.0
"""Mutants of backends: what travels with a block, and what a death leaves."""

from tests.mutations.mutant import Mutant

__all__ = ["BACKENDS"]

_CREW = "ucm/backends/_crew.py"
_DISK = "ucm/backends/disk/_backend.py"
_DRIVE = "ucm/backends/disk/_drive.py"
_ENVELOPE = "ucm/backends/envelope.py"
_OBJECT = "ucm/backends/object.py"
_PLACES = "ucm/backends/_places.py"
_HUNG = "tests/backends/test_files.py::TestHung"
_ORPHANS = "tests/backends/test_files.py::TestOrphans"
_READING = "ucm/backends/files/_reading.py"
_SERVER = "tests/backends/test_redis.py::TestServer"
_SERVICE = "tests/backends/test_object.py::TestService"
_SHARE = "ucm/backends/files/_share.py"
_SHARED = "tests/backends/test_files.py::TestShared"
_WRITES = "tests/backends/test_files_writing.py::TestWriting"
_WRITING = "ucm/backends/files/_writing.py"
_SLOTS = "ucm/backends/disk/_slots.py"
_STAMP = "ucm/backends/disk/_stamp.py"
_WRAP = "ucm/backends/wrap.py"
_BREAKER = "ucm/backends/_circuit.py"
_CIRCUIT = "tests/backends/test_wrap.py::TestCircuit"
_DISKS = "tests/backends/test_disk.py::TestDiskBackend"
_FAILING = "tests/backends/test_disk_drive.py::TestFailing"
_CONNECTIONS = "tests/backends/test_redis_connections.py"
_REDIS = "ucm/backends/redis.py"
_VALUES = "ucm/backends/_redis_values.py"
_SERVERS = "ucm/backends/_redis_servers.py"
_ROOM = "tests/backends/test_disk_slots.py::TestRoom"
_TORN = "tests/backends/test_disk_crash.py::TestTorn"
_VALUE = "tests/backends/test_envelope.py::TestValue"

BACKENDS = (
    Mutant(
        name="strangers_file_swept",
        why="A file that somebody has put into a share is deleted.",
        file=_SHARE,
        find="if _LEFT.fullmatch(entry.name) is None:",
        replace='if "." not in entry.name:',
        killers=(f"{_ORPHANS}::test_old_remains_without_a_living_owner_are_removed",),
    ),
    Mutant(
        name="strangers_file_collected",
        why="A file that somebody has put beside blocks is deleted for room.",
        file="ucm/backends/files/_walk.py",
        find="if _KEY.fullmatch(entry.name) is not None:",
        replace="if True:",
        killers=(f"{_ORPHANS}::test_what_is_not_ours_stays_and_is_no_hindrance",),
    ),
    # What travels with a block.
    Mutant(
        name="value_of_another_key_opened",
        why="An engine computes with another prompt's block, if its checksum is not looked at.",
        file=_ENVELOPE,
        find="header == its",
        replace="Envelope.decode(header)",
        killers=(f"{_VALUE}::test_other_value_leaves_the_target_alone",),
    ),
    Mutant(
        name="value_that_is_too_long_opened",
        why="What a foreign writer has appended to is taken for a block.",
        file=_ENVELOPE,
        find="        if len(value) != HEADER_BYTES + len(target):\n            return GARBAGE\n",
        replace="        value = value[: HEADER_BYTES + len(target)]\n",
        killers=(f"{_VALUE}::test_other_value_leaves_the_target_alone",),
    ),
    # A backend that is down.
    Mutant(
        name="unknown_is_no_bad_answer",
        why="A server that is down costs every request its deadline, for ever.",
        file=_WRAP,
        find="    if unknown in told:",
        replace="    if unknown in told and unknown is not Presence.UNKNOWN:",
        killers=(f"{_CIRCUIT}::test_backend_that_fails_is_not_asked_for_a_while",),
    ),
    Mutant(
        name="everybody_tries_a_backend_that_was_down",
        why="A server that comes back is met by all requests of a node at once.",
        file=_BREAKER,
        find="self.is_open and (self._is_trying or self._clock() < self._until)",
        replace="self.is_open and self._clock() < self._until",
        killers=(f"{_CIRCUIT}::test_only_one_call_at_a_time_tries",),
    ),
    Mutant(
        name="call_from_before_closes_the_circuit",
        why="An answer from before a server went down makes everybody ask it again.",
        file=_BREAKER,
        find="            is_new = is_try == self.is_open",
        replace="            is_new = True",
        killers=(f"{_CIRCUIT}::test_call_from_before_says_nothing_about_now",),
    ),
    Mutant(
        name="cancelled_try_is_never_over",
        why="A backend that is back is never asked again.",
        file=_BREAKER,
        find="            if is_try:\n                self._is_trying = False\n",
        replace="            pass\n",
        killers=(f"{_CIRCUIT}::test_only_one_call_at_a_time_tries",),
    ),
    Mutant(
        name="late_call_is_a_miss",
        why="What a slow backend has is not asked for, and computed by everybody (R-51).",
        file=_WRAP,
        find="self._ask(ask, Presence.UNKNOWN, len(keys))",
        replace="self._ask(ask, Presence.ABSENT, len(keys))",
        killers=(
            "tests/backends/test_wrap.py::TestDeadline::test_call_ends_at_its_deadline",
        ),
    ),
    # Threads.
    Mutant(
        name="memory_given_back_under_a_read",
        why="A read that is under way writes to memory that is somebody else's by now.",
        file=_CREW,
        find="                    with anyio.CancelScope(shield=True):\n                        await batch.over.wait()\n",
        replace="                    pass\n",
        killers=(
            "tests/backends/test_crew.py::TestCancelled::test_call_ends_when_nobody_works_on_it",
        ),
    ),
    Mutant(
        name="hung_threads_take_more_work",
        why="Calls to a hung mount pile up behind threads that never come back.",
        file=_CREW,
        find="        if leave and self.num_hung + self._num_jobs >= self.num_threads:",
        replace="        if False:",
        killers=(
            "tests/backends/test_crew.py::TestCancelled::test_left_call_ends_at_once_and_is_counted",
        ),
    ),
    # A disk.
    Mutant(
        name="torn_block_found",
        why="Behind a death a disk offers blocks of which half was written over.",
        file=_DRIVE,
        find="            if stamp.first == first:",
        replace="            if stamp.first or first:",
        killers=(f"{_TORN}::test_write_that_was_cut_short_leaves_no_block",),
    ),
    Mutant(
        name="stamp_of_an_older_extent_found",
        why="A block that others have written over is offered behind a restart.",
        file=_STAMP,
        find="return (self.serial, self.place, pages) == (mark.serial, place, mark.pages)",
        replace="return (self.place, pages) == (place, mark.pages)",
        killers=(
            "tests/backends/test_disk_stamp.py::TestMarks::test_stamp_of_somewhere_else_does_not_belong",
        ),
    ),
    Mutant(
        name="block_found_before_its_extent_is_marked",
        why="Blocks that were put are lost with the process that has put them.",
        file=_DRIVE,
        find="        if not extent.is_marked:\n            self._mark(extent)\n",
        replace="",
        killers=(f"{_DISKS}::test_blocks_are_found_again",),
    ),
    Mutant(
        name="deletion_forgotten_at_a_restart",
        why="Blocks that an operator has removed come back.",
        file=_DISK,
        find="            await self._crew.run(list(found.values()), wipe, wiped)",
        replace="            wiped[:] = [True] * len(found)",
        killers=(
            "tests/backends/test_disk_changing.py::TestChanging::test_block_that_may_come_back_is_deleted_all_the_same",
        ),
    ),
    Mutant(
        name="slot_that_is_read_written_over",
        why="A reader gets half of another block.",
        file=_SLOTS,
        find="(s for s in self.blocks.values() if not s.num_holders)",
        replace="iter(self.blocks.values())",
        killers=(f"{_ROOM}::test_held_block_stays",),
    ),
    Mutant(
        name="extent_that_is_read_taken",
        why="A reader gets blocks of another size in the middle of its own.",
        file=_SLOTS,
        find="if extent.mark.pages != pages and not extent.num_held:",
        replace="if extent.mark.pages != pages:",
        killers=(f"{_ROOM}::test_nothing_is_taken_where_all_is_held",),
    ),
    Mutant(
        name="flush_left_out",
        why="An operator who asked for it loses blocks with the power.",
        file=_DISK,
        find="                await self._crew.run(self._drives, Drive.flush, lasting)",
        replace="                lasting[:] = [True] * len(lasting)",
        killers=(f"{_FAILING}::test_durability_is_what_was_asked_for",),
    ),
    Mutant(
        name="unwritten_block_found",
        why="A disk that fails fills the index with blocks that it does not have.",
        file=_DRIVE,
        find="            is_whole = os.pwritev(self._fd, parts, place) == len(run) * slot_bytes",
        replace="            is_whole = os.pwritev(self._fd, parts, place) > 0",
        killers=(f"{_FAILING}::test_block_that_cannot_be_written_is_not_there",),
    ),
    Mutant(
        name="foreign_directory_filled",
        why="A path that was mistyped fills somebody's home with our files (R-24).",
        file=_PLACES,
        find="if others and name not in there",
        replace="if False",
        killers=(
            "tests/backends/test_disk_drive.py::TestRefusals::test_directory_of_somebody_else_is_left_alone",
        ),
    ),
    # A shared mount.
    Mutant(
        name="writers_share_a_temporary_file",
        why="Two machines write one file at once, and what they leave is of both (X-02).",
        file=_SHARE,
        find='[b"%b.%d" % (temporary, number) for number in numbers]',
        replace='[os.fsencode(f"{self._writing}/{key.hex()}.writing") for key in keys]',
        killers=(f"{_SHARED}::test_writers_of_one_key_have_files_of_their_own",),
    ),
    Mutant(
        name="loser_leaves_its_file",
        why="Each race of two machines fills the share with a block that nobody finds.",
        file=_WRITING,
        find="                os.unlink(given.temporary)",
        replace="                pass",
        killers=(f"{_WRITES}::test_later_writer_leaves_the_first_ones_block",),
    ),
    Mutant(
        name="orphans_stay",
        why="What died writers have left fills the share for ever (X-03).",
        file=_SHARE,
        find="if age_s > self._orphan_s and not is_alive(owner):",
        replace="if age_s < self._orphan_s < 0:",
        killers=(f"{_ORPHANS}::test_old_remains_without_a_living_owner_are_removed",),
    ),
    Mutant(
        name="file_of_a_living_writer_removed",
        why="A slow writer's block is lost, again and again.",
        file=_SHARE,
        find="if age_s > self._orphan_s and not is_alive(owner):",
        replace="if age_s > self._orphan_s:",
        killers=(f"{_ORPHANS}::test_old_remains_without_a_living_owner_are_removed",),
    ),
    Mutant(
        name="late_bytes_written_to_the_caller",
        why="A read that hung writes to a slot that is another block's by now.",
        file=_READING,
        find="        if not gate.touch(copy):\n            return Came(LEFT)\n",
        replace="        copy()\n",
        killers=(f"{_HUNG}::test_call_on_a_hung_mount_ends_at_its_deadline",),
    ),
    Mutant(
        name="late_write_published",
        why="Bytes of a slot that was used again get the name of the block before.",
        file=_WRITING,
        find="        if gate.is_left:  # other bytes may lie there by now\n            return LEFT\n",
        replace="",
        killers=(
            "tests/backends/test_files_writing.py::TestGate::test_who_leaves_amid_a_write_has_nothing_put",
        ),
    ),
    Mutant(
        name="mount_that_fails_is_a_miss",
        why="While a share is away its blocks are computed, and told to be gone (R-51).",
        file=_SHARE,
        find="return [told.get(error, Presence.UNKNOWN) for",
        replace="return [told.get(error, Presence.ABSENT) for",
        killers=(f"{_HUNG}::test_error_is_told_apart_from_an_answer",),
    ),
    Mutant(
        name="newest_blocks_evicted",
        why="A share that is full throws away what is used.",
        file="ucm/backends/files/_walk.py",
        find='kind="stable")\n        ends',
        replace='kind="stable")[::-1]\n        ends',
        killers=(f"{_SHARED}::test_room_is_shared",),
    ),
    # Servers.
    Mutant(
        name="error_of_a_service_is_a_miss",
        why="While a bucket is away its blocks are computed, and told to be gone (R-51).",
        file=_OBJECT,
        find="            return Presence.UNKNOWN\n",
        replace="            return Presence.ABSENT\n",
        killers=(f"{_SERVICE}::test_server_that_is_away_is_no_miss",),
    ),
    Mutant(
        name="object_overwritten",
        why="Two machines send a block again and again that is there.",
        file=_OBJECT,
        find='mode="create"',
        replace='mode="overwrite"',
        killers=(
            "tests/backends/test_object.py::TestObjectBackend::test_block_that_is_there_stays",
        ),
    ),
    Mutant(
        name="value_written_over",
        why="Two machines put different bytes under one key, and a reader gets some of each.",
        file=_REDIS,
        find='self._set(name, (header, *rest), 0, b"NX")',
        replace="self._set(name, (header, *rest), 0)",
        killers=(
            "tests/backends/test_redis.py::TestRedisBackend::test_block_that_is_there_stays",
        ),
    ),
    Mutant(
        name="looks_without_a_turn",
        why="Where many prompts ask at once the server has a connection for each.",
        file=_REDIS,
        find="        async with self._looks:\n            return await self._exists(keys)",
        replace="        return await self._exists(keys)",
        killers=(f"{_CONNECTIONS}::test_connections_are_as_many_as_the_settings_say",),
    ),
    Mutant(
        name="earlier_release_is_garbage",
        why="After an update a server's blocks are deleted as damaged.",
        file=_VALUES,
        find="    if there != known:",
        replace="    if known and there != known:",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_small_block_of_an_earlier_release_is_served",
        ),
    ),
    Mutant(
        name="head_written_before_its_parts",
        why="A server that is full offers blocks of which it has half.",
        file=_REDIS,
        find="                told[at] = end\n        return begun",
        replace="                pass\n        return begun",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_block_of_which_a_part_is_refused_gets_no_head",
        ),
    ),
    Mutant(
        name="parts_live_as_long_as_their_head",
        why="Blocks without their parts are found, and come to nothing.",
        file=_REDIS,
        find="(data[start:stop],), _LONGER_S)",
        replace="(data[start:stop],), 0)",
        killers=("tests/backends/test_redis.py::TestParts::test_large_block_is_cut",),
    ),
    Mutant(
        name="silent_server_is_a_miss",
        why="While a server is away its blocks are computed, and told to be gone (R-51).",
        file=_SERVERS,
        find="                answers = [exc] * len(commands)",
        replace="                answers = [0] * len(commands)",
        killers=(f"{_SERVER}::test_killed_server_is_no_miss_and_joins_again",),
    ),
    Mutant(
        name="parts_of_another_length_taken",
        why="A block is put together of pieces that are not its own.",
        file=_VALUES,
        find="if is_all := list(answers) == list(map(Bulk, sizes)):",
        replace="if is_all := all(isinstance(each, Bulk) for each in answers):",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_part_of_another_length_is_none",
        ),
    ),
    Mutant(
        name="bad_spot_fails_its_neighbours",
        why="One bad sector costs all blocks that travel with it.",
        file=_DISK,
        find="        if len(run) > 1:\n            return [one for",
        replace="        if not run:\n            return [one for",
        killers=(
            "tests/backends/test_disk_runs.py::TestTogether::test_bad_spot_harms_its_own_block_only[preadv]",
        ),
    ),
    Mutant(
        name="slots_with_a_gap_travel_together",
        why="A batch writes over blocks that lie between its own.",
        file="ucm/backends/disk/_runs.py",
        find="            before.place + (size + 1) * PAGE == slot.place\n",
        replace="            before.place + (size + 1) * PAGE <= slot.place\n",
        killers=(
            "tests/backends/test_disk_runs.py::TestCutting::test_neighbours_travel_together",
        ),
    ),
    Mutant(
        name="memory_beside_a_page_goes_directly",
        why="A drive refuses it: what lies so is never stored, nor found.",
        file=_DRIVE,
        find="addresses_of(run) if self.is_direct else [0] * len(run)",
        replace="[0] * len(run)",
        killers=(
            "tests/backends/test_disk_drive.py::TestDirect::test_memory_may_lie_anywhere",
        ),
    ),
)
