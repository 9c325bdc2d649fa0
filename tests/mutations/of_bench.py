# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a disk's start relies on instead of looking through all of it."""

from tests.mutations.mutant import Mutant

__all__ = ["BENCH"]

_DRIVE = "ucm/backends/disk/_drive.py"
_INDEX = "ucm/backends/disk/_index.py"
_KEEPING = "ucm/backends/disk/_keeping.py"
_SLOTS = "ucm/backends/disk/_slots.py"
_FETCHES = "tests/agent/test_fetch.py::TestFetch"
_SPILLS = "tests/agent/test_spill.py::TestSpill"
_HARM = "tests/backends/test_disk_index.py::TestHarm"
_TROUBLE = "tests/backends/test_disk_trouble.py::TestTrouble"
_SPOT = f"{_TROUBLE}::test_bad_spot_stops_nobody_and_is_used_by_nobody"
_RECORD = "tests/backends/test_disk_records.py::TestRecord"
_START = "tests/backends/test_disk_index.py::TestStart"
_DEATH = f"{_START}::test_behind_a_death_only_what_was_changed_is_looked_through"
_WRONG = f"{_HARM}::test_index_that_may_be_wrong_counts_for_nothing"

BENCH = (
    Mutant(
        name="disk_looked_through_at_each_start",
        why="A terabyte of small blocks serves after eight minutes.",
        file=_DRIVE,
        find="            if record is not None and record.is_of(mark, geometry):",
        replace="            if record is not None and record.mark is mark:",
        killers=(f"{_START}::test_drive_that_was_closed_is_not_looked_through",),
    ),
    Mutant(
        name="writes_unannounced",
        why="Behind a death a disk serves the index of before, and loses what was put since.",
        file=_DRIVE,
        find="            self._touch(extent)\n            parts, firsts",
        replace="            self._mark(extent)\n            parts, firsts",
        killers=(_DEATH,),
    ),
    Mutant(
        name="deletions_unannounced",
        why="Behind a death a disk says that it has what was deleted.",
        file=_DRIVE,
        find="            self._touch(slot.extent)",
        replace="            pass",
        killers=(_DEATH,),
    ),
    Mutant(
        name="former_mark_believed",
        why="Blocks are offered of an extent that somebody else has filled since.",
        file=_DRIVE,
        find="            if record is not None and record.is_of(mark, geometry):",
        replace="            if record is not None:",
        killers=(f"{_HARM}::test_extent_that_somebody_took_since_is_looked_through",),
    ),
    Mutant(
        name="index_of_a_former_start_believed",
        why="Behind a loss of power a disk serves an index that its drive never had.",
        file=_INDEX,
        find="        return any(boot) and boot == _boot()",
        replace="        return True",
        killers=(f"{_WRONG}[boot]",),
    ),
    Mutant(
        name="silent_machine_believed",
        why="Where a machine does not say when it started, a lost index passes for the last one.",
        file=_INDEX,
        find="        return any(boot) and boot == _boot()",
        replace="        return boot[:0] == _boot()[:0]",
        killers=(
            f"{_HARM}::test_machine_that_does_not_say_when_it_started_is_not_believed",
        ),
    ),
    Mutant(
        name="somebody_s_writes_unseen",
        why="What a former release has written to a disk is lost with the next one's start.",
        file=_INDEX,
        find="    return bool(written == blocks.st_mtime_ns)",
        replace="    return bool(written)",
        killers=(f"{_WRONG}[somebody]",),
    ),
    Mutant(
        name="copy_passes_for_the_drive",
        why="An index is believed beside blocks that were put back from a copy.",
        file=_INDEX,
        find="    if told != (geometry, blocks.st_ino):",
        replace="    if told[0] != geometry:",
        killers=(f"{_WRONG}[copy]",),
    ),
    Mutant(
        name="torn_record_believed",
        why="A death amid a record has a disk offer blocks that it does not have.",
        file=_INDEX,
        find="        if _NUMBER.pack(xxh3_64_intdigest(data, extent)) != head[: _NUMBER.size]:",
        replace="        if not data:",
        killers=(f"{_WRONG}[entries]",),
    ),
    Mutant(
        name="former_record_believed",
        why="What was put since a record was made is lost, what was deleted is offered.",
        file=_INDEX,
        find="        if (magic, told) != (_RECORD_MAGIC, change) or width > _LARGEST_KEY:",
        replace="        if magic != _RECORD_MAGIC or width > _LARGEST_KEY:",
        killers=(_DEATH,),
    ),
    Mutant(
        name="cut_index_ends_the_start",
        why="A disk whose index was cut off cannot be opened again.",
        file=_INDEX,
        find="    if len(told) != geometry.num_extents * _NUMBER.size:",
        replace="    if len(told) > geometry.num_extents * _NUMBER.size:",
        killers=(f"{_WRONG}[cut]",),
    ),
    Mutant(
        name="half_written_extent_written_down",
        why="What a put has just begun to write is free behind a restart, stamp and all.",
        file=_SLOTS,
        find="        free = (each for each in self._changed if not each.num_held)",
        replace="        free = iter(self._changed)",
        killers=(f"{_RECORD}::test_extent_that_is_written_to_is_not_written_down",),
    ),
    Mutant(
        name="doubtful_slot_written_down",
        why="A block that a drive failed to remove waits to come back.",
        file=_SLOTS,
        find="            self.unclear.add(slot)\n",
        replace="",
        killers=(f"{_HARM}::test_slot_that_holds_who_knows_what_is_looked_at_again",),
    ),
    Mutant(
        name="refusing_drive_gets_blocks",
        why="Each put to a drive that takes nothing has a block go, and one that is torn is lost.",
        file=_SLOTS,
        find="        drives = self._drives - self.refusing",
        replace="        drives = self._drives",
        killers=(f"{_TROUBLE}::test_drive_that_is_known_to_refuse_is_left_alone",),
    ),
    Mutant(
        name="unclear_slot_lost_for_good",
        why="A drive that failed for a minute has less room until the agent is started anew.",
        file=_KEEPING,
        find="self._slots.clear(slot, is_wiped=is_wiped)",
        replace="self._slots.clear(slot, is_wiped=False)",
        killers=(f"{_TROUBLE}::test_slot_that_was_torn_comes_back_to_use",),
    ),
    Mutant(
        name="unclear_slot_free_before_it_is_wiped",
        why="A block that a drive failed to remove waits in a free slot to come back.",
        file=_KEEPING,
        find="self._slots.clear(slot, is_wiped=is_wiped)",
        replace="self._slots.clear(slot, is_wiped=True)",
        killers=(_SPOT,),
    ),
    Mutant(
        name="bad_spot_ends_all_writing",
        why="One page that cannot be wiped keeps a drive from ever getting a block again.",
        file=_KEEPING,
        find="            self._slots.refusing.discard(number)  # also where a spot stays unclear\n",
        replace="",
        killers=(_SPOT,),
    ),
    Mutant(
        name="wiping_given_up_half_way",
        why="A put that ran out of time leaves stamps in free slots, of blocks that were deleted.",
        file=_KEEPING,
        find="        wiped = [False] * len(slots)",
        replace="        wiped = [True] * len(slots)",
        killers=(f"{_TROUBLE}::test_wiping_that_was_cancelled_goes_on",),
    ),
    Mutant(
        name="nothing_written_down_on_the_way",
        why="A disk that was killed after a month of work is looked through from end to end.",
        file=_KEEPING,
        find="            await self._write_down(1, spare=_SPARE)",
        replace="            pass",
        killers=(f"{_START}::test_many_puts_are_written_down_on_the_way",),
    ),
    Mutant(
        name="record_of_a_later_change",
        why="A put that was acknowledged is gone behind a death, or the disk does not start.",
        file=_KEEPING,
        find="            extent, record = piece\n",
        replace="            extent, record = piece[0], piece[1]._replace(change=piece[0].change)\n",
        killers=(f"{_HARM}::test_change_amid_writing_down_is_none_of_the_record",),
    ),
    Mutant(
        name="record_that_does_not_fit",
        why="One wrong number in an index keeps a disk from starting at all.",
        file="ucm/backends/disk/_index.py",
        find="            and all(number in slots for number in numbers)\n",
        replace="",
        killers=(
            (
                "tests/backends/test_disk_records.py::TestRecord::"
                "test_record_that_does_not_fit_its_extent_is_none"
            ),
        ),
    ),
    Mutant(
        name="order_of_use_forgotten",
        why="Behind each restart a disk makes room with what was read last.",
        file=_SLOTS,
        find='        blocks.sort(key=attrgetter("used"))',
        replace="        blocks.reverse()",
        killers=(f"{_START}::test_last_use_outlasts_a_restart",),
    ),
    Mutant(
        name="each_flight_waited_for",
        why="Fetching small blocks costs a turn of the agent's loop for each of them.",
        file="ucm/agent/flight.py",
        find="    done: anyio.Event | None = None",
        replace="    done: anyio.Event | None = msgspec.field(default_factory=anyio.Event)",
        killers=(f"{_FETCHES}::test_blocks_that_come_together_are_waited_for_once",),
    ),
    Mutant(
        name="tier_asked_for_each_block",
        why="Each block that is saved costs the agent three wrappers' answers.",
        file="ucm/agent/spill.py",
        find="        elif each.nbytes > self._can.max_block_bytes:",
        replace="        elif each.nbytes > self._backend.capabilities.max_block_bytes:",
        killers=(f"{_SPILLS}::test_block_that_is_offered_costs_no_question",),
    ),
    Mutant(
        name="drive_of_smaller_blocks_called_well",
        why="A disk tier whose capacity was raised takes no block, and nobody says why.",
        file="ucm/doctor/tiers.py",
        find="            _check_made(settings, key, block_bytes, seconds)\n",
        replace="",
        killers=(
            "tests/doctor/test_tiers.py::TestDrives::test_drive_that_was_made_for_smaller_blocks_is_found",
        ),
    ),
)
