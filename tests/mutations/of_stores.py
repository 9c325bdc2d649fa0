# SPDX-License-Identifier: Apache-2.0
"""Mutants of the stores and of the devices."""

from tests.mutations.mutant import Mutant

__all__ = ["STORES"]

_MEMORY = "ucm/stores/memory.py"
_INDEX = "ucm/stores/slab/_index.py"
_LEASES = "ucm/stores/slab/_leases.py"
_LOCKS = "ucm/stores/slab/_locks.py"
_OPENED = "ucm/stores/slab/_opened.py"
_FILES = "ucm/stores/slab/_files.py"
_CLASSES = "ucm/stores/slab/_classes.py"
_BYPASS = "ucm/stores/bypass.py"
_LOOK_UPS = "tests/stores/test_bypass.py::TestBypass"
_CPU = "ucm/devices/cpu.py"
_IN_MEMORY = "tests/stores/test_memory.py::TestMemoryStore"
_SLAB = "tests/stores/test_slab.py::TestSlabStore"
_SHARING = "tests/stores/test_slab.py::TestSharing"
_RESTART = "tests/stores/test_slab.py::TestRestart"
_CRASH = "tests/stores/test_slab_crash.py"
_PROCESSES = "tests/stores/test_slab_processes.py"
_REFUSALS = "tests/stores/test_slab_refusals.py::TestRefusals"
_LONE = "tests/stores/test_slab_look_up.py::TestLoneBlock"
_DEVICE = "tests/devices/test_cpu.py::TestCPUDevice"

STORES = (
    # What is read.
    Mutant(
        name="checksum_not_compared",
        why="Bytes that rotted in memory or on a disk become the model's context.",
        file="ucm/stores/leases.py",
        find="    if found != known:",
        replace="    if False:",
        killers=(f"{_SLAB}::test_flipped_bit_is_corrupt",),
    ),
    Mutant(
        name="checksum_without_key",
        why="A block that was written into another one's slot is taken for it.",
        file="ucm/stores/slab/_digests.py",
        find="yield xxh3_64_intdigest(slots.block(at).data, seed)",
        replace="yield xxh3_64_intdigest(slots.block(at).data, 0)",
        killers=(f"{_SHARING}::test_whole_block_under_another_key_is_corrupt",),
    ),
    Mutant(
        name="generation_not_rechecked",
        why="A slot that was evicted and filled anew under the copy is believed.",
        file=_INDEX,
        find="""\
        other = self.generation[seen.slots] != seen.generations
""",
        replace="        other = np.zeros(len(seen.slots), bool)\n",
        killers=(
            (
                "tests/stores/test_slab_look_up.py::TestLoneBlock"
                "::test_slot_that_was_given_away_meanwhile_is_noticed[3]"
            ),
        ),
    ),
    Mutant(
        name="recheck_by_key_only",
        why="A block that was forgotten and stored again under the copy is believed.",
        file=_MEMORY,
        find="self._entries.get(key) is not entry for",
        replace="key not in self._entries for",
        killers=(f"{_IN_MEMORY}::test_slot_recycled_while_read_is_noticed",),
    ),
    Mutant(
        name="torn_look",
        why="A look-up believes what it saw while another process changed the index.",
        file=_INDEX,
        find="if self.words[_VERSION] == version:\n                    return seen",
        replace="if True:\n                    return seen",
        killers=(
            f"{_SHARING}::test_look_is_repeated_when_the_index_changed_meanwhile",
        ),
    ),
    # What becomes visible, and when.
    Mutant(
        name="visible_when_reserved",
        why="Look-ups find blocks whose bytes are still being written.",
        file="ucm/stores/slab/_reserving.py",
        find="index.state[slots] = RESERVED",
        replace="index.state[slots] = COMMITTED",
        killers=(f"{_SLAB}::test_uncommitted_blocks_are_invisible",),
    ),
    Mutant(
        name="published_unsealed",
        why="A block is published before anybody said that its bytes are final.",
        file=_MEMORY,
        find='raise ValueError(f"block {key.hex()} was not sealed")',
        replace="checksum = _digest(lease.slots, lease.keys.index(key), key)",
        killers=(f"{_IN_MEMORY}::test_one_unsealed_block_holds_back_all",),
    ),
    Mutant(
        name="half_a_publication",
        why="A death amid a commit leaves half of a lease visible.",
        file=_INDEX,
        find="            self.words[_PUBLISHING] = grant.generation\n",
        replace="",
        killers=(f"{_CRASH}::test_death_amid_the_states_of_a_commit_still_shows_all",),
    ),
    Mutant(
        name="others_published_too",
        why="After a death the slots that others are writing become visible.",
        file="ucm/stores/slab/_tables.py",
        find="                self.generation[slots] == publishing\n",
        replace="                self.generation[slots] > 0\n",
        killers=(f"{_CRASH}::test_publication_that_had_begun_is_completed",),
    ),
    Mutant(
        name="lost_lease_published",
        why="A writer that was taken for dead publishes a slot of somebody else.",
        file=_INDEX,
        find="        ours &= self.generation[slots] == grant.generation\n",
        replace="",
        killers=(f"{_CRASH}::test_lease_does_not_end_with_another_ones_slots",),
    ),
    # Who may write what.
    Mutant(
        name="two_writers_of_a_key",
        why="Two saves of one block both get slots, and one of them is never freed.",
        file=_MEMORY,
        find="if each[0] not in self._entries and each[0] not in self._writing",
        replace="if each[0] not in self._entries",
        killers=(f"{_IN_MEMORY}::test_keys_being_written_are_not_granted_again",),
    ),
    Mutant(
        name="discarded_twice",
        why="A slot is freed under the save that has it by now.",
        file=_MEMORY,
        find="if not lease.has_ended and self._is_open:",
        replace="if self._is_open:",
        killers=(
            "tests/stores/test_memory.py::test_slot_given_back_twice_is_free_once",
        ),
    ),
    Mutant(
        name="used_block_evicted",
        why="The blocks that everybody uses are evicted by a bound that is out of date.",
        file="ucm/stores/slab/_oldest.py",
        find="            is_done = len(slots) == count or limit >= before\n",
        replace="            is_done = True\n",
        killers=(
            "tests/stores/test_slab_index.py::test_oldest_are_what_sorting_all_finds",
        ),
    ),
    Mutant(
        name="lock_not_taken",
        why="Two processes change the index at once, and chains lose their slots.",
        file=_LOCKS,
        find="while not _try_lock(self.fd):",
        replace="while False:",
        killers=(f"{_REFUSALS}::test_lock_held_by_another_is_not_waited_for_for_ever",),
    ),
    # Deaths and restarts.
    Mutant(
        name="dead_owner_unnoticed",
        why="What a killed process had reserved is lost until the slab is removed.",
        file=_LOCKS,
        find="            if not _is_taken(self._fd, owner_id, 1)\n",
        replace="            if False\n",
        killers=(f"{_RESTART}::test_killed_user_loses_no_block",),
    ),
    Mutant(
        name="living_owner_buried",
        why="A process loses the slots into which its device is copying.",
        file=_LOCKS,
        find="            if not _is_taken(self._fd, owner_id, 1)\n",
        replace="            if True\n",
        killers=(f"{_PROCESSES}::test_writer_killed_before_commit_leaves_nothing",),
    ),
    Mutant(
        name="death_amid_a_change",
        why="Chains and counts that a death left half done are used as they are.",
        file=_INDEX,
        find="            self.repair(self.moment())\n",
        replace="            pass\n",
        killers=(f"{_RESTART}::test_half_done_change_is_put_right_by_the_next",),
    ),
    Mutant(
        name="locks_inherited",
        why="A child of a dead process keeps its slots reserved for ever.",
        file=_OPENED,
        find="            self._class.lock.abandon()\n",
        replace="",
        killers=(f"{_PROCESSES}::test_writer_killed_before_commit_leaves_nothing",),
    ),
    # Look-ups that are not answered.
    Mutant(
        name="look_ups_never_bypassed",
        why="Each request of each step waits for a store that does not answer.",
        file=_BYPASS,
        find="        if started < self._lookups.until or started < self._loads.until:\n",
        replace="        if False:\n",
        killers=(
            f"{_LOOK_UPS}::test_store_that_does_not_answer_is_not_asked_for_a_while",
            "tests/integration/vllm/test_halves.py::TestTogether::test_store_that_stands_still_holds_up_three_look_ups_at_most",
        ),
    ),
    Mutant(
        name="scheduler_asks_the_store_itself",
        why="The bypass is there, and nobody goes through it.",
        file="ucm/integration/vllm/scheduler.py",
        find="setup.make_decider(self._store)",
        replace="setup.make_decider(store)",
        killers=(
            "tests/integration/vllm/test_halves.py::TestTogether::test_store_that_stands_still_holds_up_three_look_ups_at_most",
        ),
    ),
    Mutant(
        name="one_failure_bypasses",
        why="A single late answer costs a second of hits.",
        file=_BYPASS,
        find="sum(self._bad) >= _MOST_BAD",
        replace="sum(self._bad) >= 1",
        killers=(f"{_LOOK_UPS}::test_single_failures_do_not_count",),
    ),
    Mutant(
        name="slow_answers_do_not_count",
        why="A store that is slow holds up every step.",
        file=_BYPASS,
        find="self._judge(Reason.SLOW, f",
        replace="self._judge(Reason.NONE, f",
        killers=(f"{_LOOK_UPS}::test_slow_store_is_not_asked_for_a_while",),
    ),
    Mutant(
        name="long_prompts_are_slow",
        why="Who asks for many blocks has no hits for a second.",
        file=_BYPASS,
        find="_SLOW_S + _SLOW_PER_KEY_S * num_keys",
        replace="_SLOW_S",
        killers=(f"{_LOOK_UPS}::test_long_prompt_may_take_longer",),
    ),
    Mutant(
        name="bypass_ends_with_three_more_waits",
        why="A store that stays away holds up three look-ups each second.",
        file=_BYPASS,
        find="if self._lookups.seconds or sum(",
        replace="if sum(",
        killers=(
            f"{_LOOK_UPS}::test_bypass_gets_longer_while_the_store_does_not_recover",
        ),
    ),
    Mutant(
        name="store_that_recovered_stays_on_trial",
        why="After one outage a single late answer bypasses the store again.",
        file=_BYPASS,
        find="        pause.seconds = pause.until = 0.0\n",
        replace="        pause.until = 0.0\n",
        killers=(
            f"{_LOOK_UPS}::test_bypass_gets_longer_while_the_store_does_not_recover",
        ),
    ),
    # Who may look.
    Mutant(
        name="readable_by_others",
        why="Any user of the machine reads what people asked the model.",
        file=_FILES,
        find="os.open(name, flags, 0o600, dir_fd=self.fd)",
        replace="os.open(name, flags, 0o644, dir_fd=self.fd)",
        killers=(f"{_REFUSALS}::test_nobody_else_may_look_into_a_slab",),
    ),
    Mutant(
        name="links_followed",
        why="Another user makes us write blocks into a file of our own.",
        file=_FILES,
        find="os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
        replace="os.O_CLOEXEC | os.O_NONBLOCK",
        killers=(f"{_REFUSALS}::test_unsafe_or_damaged_files_are_refused",),
    ),
    # Copies.
    Mutant(
        name="block_out_of_range",
        why="An id beyond the pool copies foreign memory into a stored block.",
        file="ucm/devices/_paged.py",
        find='        _check_range("block", blocks, tensors.num_blocks)\n',
        replace="",
        killers=(f"{_DEVICE}::test_an_id_out_of_range_is_refused_before_a_byte_moves",),
    ),
    Mutant(
        name="event_never_recorded",
        why="An event that proves nothing is taken for the end of the forward pass.",
        file=_CPU,
        find="if event is not None:",
        replace="if False:",
        killers=(f"{_DEVICE}::test_an_event_that_was_never_recorded_is_refused",),
    ),
)
