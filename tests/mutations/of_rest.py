# SPDX-License-Identifier: Apache-2.0
"""Mutants of blocks that come and go, and of loads that do not pay."""

from tests.mutations.mutant import Mutant

__all__ = ["REST"]

_ELSEWHERE = "ucm/scheduler/elsewhere.py"
_PLAN = "tests/scheduler/test_elsewhere.py::TestPlan"
_RANKS = "tests/integration/vllm/test_elsewhere.py"
_MACHINES = "tests/integration/vllm/test_machines.py"
_LAUNCH = "ucm/agent/launch.py"
_LAUNCHES = "tests/agent/test_launch.py"
_RUNS = "tests/agent/test_process.py::TestAgent"
_DISK = "ucm/backends/disk/_backend.py"
_CHANGING = "tests/backends/test_disk_changing.py::TestChanging"

_CREW = "ucm/backends/_crew.py"
_ROOM = "tests/backends/test_crew.py::TestRoom"
_ROW = "tests/backends/test_crew_rows.py::TestRow"
_AT_ONCE = "tests/backends/test_disk_runs.py::TestTogether::test_drive_has_so_many_bytes_to_move_at_a_time"

_DEVICE = "ucm/devices/accelerator.py"
_MEANWHILE = "tests/devices/test_accelerator_pinning.py::test_copy_that_is_being_submitted_is_of_no_piece_that_is_pinned_meanwhile"

REST = (
    Mutant(
        name="memory_comes_as_urgently_as_tokens",
        why="R-18: an engine's first prompt takes half as long again on the CPU.",
        file="ucm/stores/slab/_populate.py",
        find="        give_way()  # a first prompt is computed meanwhile\n",
        replace="",
        killers=(
            "tests/stores/test_slab_populate.py::TestJoining::test_memory_comes_behind_what_an_engine_computes",
        ),
    ),
    Mutant(
        name="who_gives_way_takes_more",
        why="R-18: in an engine that was started with a low priority ours has a higher one.",
        file="ucm/affinity.py",
        find="max(os.getpriority(os.PRIO_PROCESS, 0), _LOW_PRIORITY)",
        replace="_LOW_PRIORITY",
        killers=(
            "tests/stores/test_slab_populate.py::TestJoining::test_thread_of_a_lower_priority_keeps_it",
        ),
    ),
    Mutant(
        name="drive_asked_for_two_calls_at_once",
        why="Both end together, and a drive stands still for an eighth of its time.",
        file=_CREW,
        find="        if not wanted:\n",
        replace="        if batch:\n",
        killers=(
            f"{_ROOM}::test_items_come_behind_those_that_fill_the_room",
            f"{_AT_ONCE}[read]",
        ),
    ),
    Mutant(
        name="block_larger_than_the_room_waits_for_ever",
        why="Blocks of more than 32 MB never come from a drive.",
        file=_CREW,
        find="min(batch.nbytes, self._size)",
        replace="batch.nbytes * bool(self._size)",
        killers=(f"{_ROOM}::test_larger_item_goes_by_itself",),
    ),
    Mutant(
        name="room_lost_with_a_step",
        why="A drive is asked for less and less, and at last for nothing.",
        file=_CREW,
        find="                self._left += wanted\n",
        replace="                pass\n",
        killers=(f"{_ROOM}::test_items_come_behind_those_that_fill_the_room",),
    ),
    Mutant(
        name="writes_have_no_bytes",
        why="Spills of large blocks end together, and the drive stands still.",
        file=_DISK,
        find="self._write, told, nbytes=nbytes",
        replace="self._write, told, nbytes=0",
        killers=(f"{_AT_ONCE}[write]",),
    ),
    Mutant(
        name="reads_have_no_bytes",
        why="Fetches of large blocks end together, and the drive stands still.",
        file=_DISK,
        find="self._read, told, nbytes=nbytes",
        replace="self._read, told, nbytes=0",
        killers=(f"{_AT_ONCE}[read]",),
    ),
    Mutant(
        name="block_to_come_back_written_anew",
        why="A block is in two slots; one is never freed, and outlasts a removal on the drive.",
        file=_DISK,
        find="[key for slot in slots for key in (slot.key, slot.previous[0]) if key]",
        replace="[slot.key for slot in slots]",
        killers=(
            f"{_CHANGING}::test_block_is_not_written_anew_while_it_may_come_back",
            f"{_CHANGING}::test_block_that_may_come_back_is_deleted_all_the_same",
        ),
    ),
    Mutant(
        name="removal_of_what_may_come_back_not_done",
        why="Who deletes a block is told that it is not there, and then it is there again.",
        file=_DISK,
        find="while changing := [key for key in keys if key in self._changing]:",
        replace="while changing := []:",
        killers=(
            f"{_CHANGING}::test_block_that_may_come_back_is_deleted_all_the_same",
        ),
    ),
    Mutant(
        name="no_room_told_as_a_missing_part",
        why="An operator looks for a rank that lost blocks where plans were full.",
        file="ucm/integration/vllm/tiers.py",
        find="computed_tokens, Reason.QUEUE_TICKETS)",
        replace="computed_tokens, Reason.NONE)",
        killers=(
            "tests/integration/vllm/test_tiers.py::TestNoRoom::test_want_without_room_says_so_and_asks_again",
        ),
    ),
    Mutant(
        name="long_prompt_asked_for_in_part",
        why="R-60: of a prompt of a million tokens a fifth is found, wherever the rest is.",
        file=_ELSEWHERE,
        find="        self._later.extend(wants[1:])\n",
        replace="",
        killers=(f"{_PLAN}::test_prompt_beyond_a_plan_is_asked_for_in_parts",),
    ),
    Mutant(
        name="parts_behind_a_gap_count",
        why="R-60: a hit covers blocks that a rank does not have.",
        file=_ELSEWHERE,
        find="            if reach < part.want.stop:\n                break\n",
        replace="",
        killers=(f"{_PLAN}::test_parts_reach_as_far_as_the_first_that_falls_short",),
    ),
    Mutant(
        name="forgotten_here_only",
        why="Who asked for a prompt to be deleted has it kept on every other machine.",
        file="ucm/integration/vllm/elsewhere.py",
        find="            if self._rank in forgotten.ranks:\n",
        replace="            if False:\n",
        killers=(f"{_RANKS}::TestForget::test_rank_deletes_its_own_part",),
    ),
    Mutant(
        name="forgotten_nowhere_else",
        why="Who asked for a prompt to be deleted has it kept on every other machine.",
        file="ucm/integration/vllm/scheduler.py",
        find="            self._tiers.elsewhere.forget(matcher, end.hashes, end.prompt_tokens)\n",
        replace="",
        killers=(
            f"{_MACHINES}::TestMachines::test_forgotten_prompt_is_deleted_on_each_machine",
        ),
    ),
    Mutant(
        name="older_index_believed",
        why="A drive of an older release loses what its index did not know.",
        file="ucm/backends/disk/_index.py",
        find="    if (magic, version) != (_HEAD_MAGIC, _VERSION):\n",
        replace="    if magic != _HEAD_MAGIC:\n",
        killers=(
            "tests/backends/test_disk_older.py::test_drive_of_an_older_release_is_served",
        ),
    ),
    Mutant(
        name="pause_grows_while_one_comes",
        why="R-63: an agent that needs four seconds to start is found after seven.",
        file=_LAUNCH,
        find="        if lasted_s > _LONGEST_S or self._is_coming():\n",
        replace="        if lasted_s > _LONGEST_S:\n",
        killers=(
            f"{_LAUNCHES}::TestPauses::test_agent_on_its_way_is_looked_for_all_the_time",
        ),
    ),
    Mutant(
        name="nobody_is_coming",
        why="R-63: hits come back up to ten seconds behind the agent.",
        file=_LAUNCH,
        find="            return now < self._started_at + _COMING_S\n",
        replace="            return False\n",
        killers=(
            f"{_LAUNCHES}::TestLauncher::test_agent_that_was_started_is_on_its_way",
        ),
    ),
    Mutant(
        name="dying_agent_started_at_once",
        why="R-63: an agent that cannot run is started ten times a second, for good.",
        file=_LAUNCH,
        find="        self._not_before = now + pause_s\n",
        replace="        self._not_before = now\n",
        killers=(
            f"{_LAUNCHES}::TestLauncher::test_agent_that_dies_soon_is_started_less_and_less_often",
        ),
    ),
    Mutant(
        name="client_hears_of_no_start",
        why="R-63: the client pauses longer and longer while its agent is on its way.",
        file="ucm/agent/joining.py",
        find=", tiers, launch.is_coming)",
        replace=", tiers)",
        killers=(
            "tests/agent/test_joining.py::test_client_knows_that_an_agent_is_on_its_way",
        ),
    ),
    Mutant(
        name="agent_is_the_engines_child",
        why="R-55: vLLM kills the agent when it ends, and what it was to spill is not spilled.",
        file=_LAUNCH,
        find="if os.fork():\n    os._exit(0)\n",
        replace="",
        killers=(
            "tests/agent/test_orphan.py::TestOrphan::test_agent_is_no_child_of_the_engine_that_starts_it",
        ),
    ),
    Mutant(
        name="agent_bound_with_its_rank",
        why="On one core with a rank that polls, an agent gets no turn for half a minute.",
        file=_LAUNCH,
        find="format_cpulist(engine_cpus())",
        replace="format_cpulist(os.sched_getaffinity(0))",
        killers=(
            f"{_RUNS}::test_agent_is_not_bound_to_the_core_of_the_rank_that_starts_it",
        ),
    ),
    Mutant(
        name="limited_look_up_without_keys_says_nothing",
        why="R-71: ranks elsewhere have told nothing yet, the keys are in doubt: no reason.",
        file="ucm/scheduler/matching.py",
        find="        if not self.keyspace_digest:\n            return num_tokens\n",
        replace="",
        killers=(
            "tests/scheduler/test_misses.py::TestDeclined::test_unkeyed_long_ids_and_partial_blocks_are_told_apart",
        ),
    ),
    Mutant(
        name="last_block_loaded_while_its_step_waits",
        why="Whoever asks a prompt again waits a step longer than without a connector.",
        file="ucm/scheduler/paying.py",
        find="if compute_s and len(loaded) <= _FEW_TOKENS:",
        replace="if False:",
        killers=(
            (
                "tests/scheduler/test_paying.py::TestDeclines::"
                "test_few_tokens_are_computed_with_the_last_one"
            ),
        ),
    ),
    Mutant(
        name="long_steps_charged_to_loads",
        why="R-59: a busy engine hears late of its loads, takes them for slow, and computes all.",
        file="ucm/scheduler/paying.py",
        find="max(0.0, self._planned_at - max(self._heard_at, began))",
        replace="now - max(self._heard_at, began)",
        killers=(
            "tests/scheduler/test_paying.py::TestLearns::test_load_that_is_over_with_its_step_took_no_time",
        ),
    ),
    Mutant(
        name="long_hits_judged_by_short_loads",
        why="R-59: behind many loads of a short prompt a long one looks a hundred times as slow.",
        file="ucm/worth.py",
        find="_KNOWN * self._largest",
        replace='float("inf")',
        killers=(
            "tests/scheduler/test_paying.py::TestDeclines::test_hit_much_larger_than_any_load_is_tried",
            "tests/test_worth.py::TestChoice::test_much_more_than_was_ever_seen_is_tried",
        ),
    ),
    Mutant(
        name="rest_of_what_is_forgotten_sleeps",
        why="R-60: a long prompt that was to be deleted stays on other machines till the next request.",
        file=_ELSEWHERE,
        find="        return bool(self._forgotten or self._dropped)\n",
        replace="        return False\n",
        killers=(
            "tests/scheduler/test_elsewhere.py::TestForget::test_engine_is_asked_for_a_step_until_all_is_told",
        ),
    ),
    Mutant(
        name="pinned_under_a_submission",
        why="A piece comes while a copy is on its way, the driver refuses that, and the device has failed for good.",
        file=_DEVICE,
        find="                with lane.lock:  # copies that know no edge of it are submitted by then\n",
        replace="                if lane:\n",
        killers=(_MEANWHILE,),
    ),
    Mutant(
        name="edges_of_before_the_lane",
        why="A copy that waited for another knows no piece that came by then, and the device has failed for good.",
        file=_DEVICE,
        find="""        digest = None
        with self._runtime(visits=copy is None), lane.lock:
            if copy is not None:
                batch = self._pinned.cut(""",
        replace="""        digest, pinned = None, self._pinned
        with self._runtime(visits=copy is None), lane.lock:
            if copy is not None:
                batch = pinned.cut(""",
        killers=(_MEANWHILE,),
    ),
    Mutant(
        name="calls_of_a_row_end_together",
        why="A drive stands still until all calls under way are looked at: at one request a time half of it is lost.",
        file=_CREW,
        find="nbytes, self._rows.get(row))",
        replace="nbytes)",
        killers=(f"{_ROW}::test_calls_of_a_row_come_one_after_the_other",),
    ),
    Mutant(
        name="helper_of_a_row_does_not_come_back",
        why="A call whose threads have all helped the one before hangs until its deadline.",
        file=_CREW,
        find="for batch in turn.row():",
        replace="for batch in turn.row()[:1]:",
        killers=(
            f"{_ROW}::test_thread_that_finds_all_of_the_call_before_taken_begins_its_own",
        ),
    ),
    Mutant(
        name="short_call_waits_for_long_ones",
        why="What one short prompt waits for is read behind whole calls of others.",
        file=_DISK,
        find='return verb if _LONG * nbytes >= self.capabilities.batch_bytes else ""',
        replace="return verb",
        killers=(
            "tests/backends/test_disk_runs.py::TestTogether::test_short_call_does_not_wait_for_the_end_of_long_ones",
        ),
    ),
    Mutant(
        name="row_keeps_its_last_call",
        why="Its memory, a whole batch of slots, is kept until the next one.",
        file=_CREW,
        find="            if self._rows.get(row) is batch:\n                del self._rows[row]\n",
        replace="",
        killers=(f"{_ROW}::test_calls_of_a_row_come_one_after_the_other",),
    ),
    Mutant(
        name="calls_are_looked_at_together",
        why="Of a spill a tier has nothing to do until the checksums of two calls are computed, and each has half the cores.",
        file="ucm/agent/spill.py",
        find="                async with self._reading:\n                    await",
        replace="                if True:\n                    await",
        killers=(
            "tests/agent/test_spill_calls.py::TestCalls::test_one_call_is_looked_at_while_the_one_before_is_put",
        ),
    ),
    Mutant(
        name="request_of_more_pieces_than_a_call_takes",
        why="The system refuses it: a drive is told to have failed, and blocks go one by one.",
        file="ucm/backends/disk/_runs.py",
        find=" or len(runs[-1]) == _MOST_BLOCKS",
        replace="",
        killers=("tests/backends/test_disk_runs.py::TestCutting::test_run_is_bounded",),
    ),
)
