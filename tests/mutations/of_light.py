# SPDX-License-Identifier: Apache-2.0
"""Mutants of what the engine's thread does for each request, and no longer than needed."""

from tests.mutations.mutant import Mutant

__all__ = ["LIGHT"]

_CHAINS = "ucm/stores/slab/_chains.py"
_STORE = "ucm/stores/slab/_store.py"
_SHARING = "tests/stores/test_slab.py::TestSharing"
_FEW = "tests/stores/test_slab_look_up.py::TestFewKeys"
_DEADLINES = "ucm/pipeline/deadlines.py"
_POLLER = "ucm/devices/poller.py"
_RUNNER = "ucm/pipeline/runner.py"
_POLLS = "tests/devices/test_poller_waits.py::TestWaits"
_CUDA = "tests/devices/test_libcuda.py::TestWaits"
_FENCES = "tests/pipeline/test_runner.py::TestFences"
_PAGES = "tests/devices/test_pages.py"
_WORKERS = "tests/pipeline/test_workers.py"
_TURNS_OF_JOBS = (
    "test_interpreter_lock_is_given_up_between_small_jobs_that_come_at_once"
)
_SERVING = "tests/pipeline/test_serving.py::TestServing"
_THROUGH = "tests/pipeline/test_deadlines.py::TestLookThrough::test_whoever_has_something_to_end_is_found_among_those_who_wait"
_TURNS = "tests/test_intake.py::TestTurns::test_many_orders_of_a_step_are_taken_in_with_pauses[True]"
_DUE = "tests/integration/vllm/test_due.py"
_QUIET = (
    f"{_DUE}::TestQuiet::test_steps_in_which_nobody_can_be_due_pass_by_all_that_run"
)
_ALONE = f"{_FEW}::test_few_keys_are_looked_up_one_by_one_until_one_misses"

_LOCK = "tests/devices/test_cpu.py::TestLock"

LIGHT = (
    Mutant(
        name="short_prompt_asked_in_a_batch",
        why="Each new request costs the engine's thread a batch's twenty calls of numpy.",
        file=_STORE,
        find="_FEW = 12\n",
        replace="_FEW = 0\n",
        killers=(_ALONE,),
    ),
    Mutant(
        name="batch_for_a_prompt_that_differs_at_once",
        why="Each long prompt that is new costs a look at all its first blocks.",
        file=_STORE,
        find="        if num_before < len(few):\n",
        replace="        if len(keys) > _FEW:\n"
        "            num_before = 0\n"
        "        elif num_before < len(few):\n",
        killers=(_ALONE,),
    ),
    Mutant(
        name="equal_bucket_believed_of_one_key",
        why="A short prompt hits the block of another one that is in the same chain.",
        file=_CHAINS,
        find="if self._bytes[at : at + _KEY_FIELD] == field:",
        replace="if True:",
        killers=(f"{_SHARING}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        name="chain_ends_for_one_key",
        why="A block behind another one of its chain is a miss for ever.",
        file=_CHAINS,
        find="            slot = self._nexts[slot]\n",
        replace="            return NO_SLOT\n",
        killers=(f"{_SHARING}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        name="reserved_block_found_alone",
        why="A hit is promised on a block that nobody has written yet.",
        file="ucm/stores/slab/_index.py",
        find="is_there = slot != NO_SLOT and self.states[slot] == COMMITTED",
        replace="is_there = slot != NO_SLOT",
        killers=(f"{_FEW}::test_key_that_is_being_written_is_not_found_alone",),
    ),
    Mutant(
        name="short_hit_not_touched",
        why="The blocks of a short prompt are evicted while they are used.",
        file=_STORE,
        find="index.touch(slots[slots != NO_SLOT], moments[slots != NO_SLOT])",
        replace="index.touch(slots[slots == NO_SLOT], moments[slots == NO_SLOT])",
        killers=(f"{_FEW}::test_few_keys_are_touched_without_a_batch",),
    ),
    Mutant(
        name="step_of_hundreds_taken_in_at_once",
        why="The engine's thread waits for the lock until all its tickets are made.",
        file="ucm/intake.py",
        find="for order in each_of(batch.orders)]",
        replace="for order in batch.orders]",
        killers=(_TURNS,),
    ),
    Mutant(
        name="hundreds_offered_at_once",
        why="The engine's thread waits for the lock until all its tickets are offered.",
        file="ucm/intake.py",
        find="in each_of(tickets):",
        replace="in tickets:",
        killers=(_TURNS,),
    ),
    Mutant(
        name="all_that_waits_looked_through_at_once",
        why="Under a thousand tickets the engine's thread waits for the lock meanwhile.",
        file="ucm/pipeline/pipeline.py",
        find="look_through(self._threads.slowly(tickets), now)",
        replace="look_through(tickets, now)",
        killers=(f"{_SERVING}::test_look_at_all_that_waits_has_pauses",),
    ),
    Mutant(
        name="nobody_given_way",
        why="Pauses in which the lock is kept are none.",
        file="ucm/threads.py",
        find="                self.give_way()\n",
        replace="                pass\n",
        killers=(
            "tests/test_threads.py::TestSlowly::test_items_come_as_they_are_with_pauses_where_they_take_long[1.0-9]",
        ),
    ),
    Mutant(
        name="answer_in_one_go",
        why="A front end that asks every five seconds costs a step a millisecond.",
        file="ucm/status.py",
        find="        self._give_way()  #",
        replace="        #",
        killers=(
            "tests/integration/vllm/test_vitals.py::TestHalves::test_engine_may_have_the_lock_amid_what_is_told",
        ),
    ),
    Mutant(
        name="lock_kept_by_a_burst_of_copies",
        why="The engine's thread waits for the lock until a burst of small copies is over.",
        file="ucm/pipeline/workers.py",
        find="                    self._give_way()",
        replace="                    pass",
        killers=(f"{_WORKERS}::{_TURNS_OF_JOBS}",),
    ),
    Mutant(
        name="lock_given_up_behind_each_copy",
        why="Each large copy of many waits for a wake-up that nobody needs.",
        file="ucm/pipeline/workers.py",
        find="ended + _AT_ONCE_S if is_brief else 0.0",
        replace="ended + _AT_ONCE_S",
        killers=(f"{_WORKERS}::{_TURNS_OF_JOBS}",),
    ),
    Mutant(
        name="answer_made_that_nobody_asked_for",
        why="Every few seconds a status that nobody reads keeps the lock for a millisecond.",
        file="ucm/status.py",
        find="                self._look()\n",
        replace="                self._answer()\n",
        killers=(
            "tests/test_status.py::TestLooks::test_it_looks_by_itself_where_nobody_asks[True]",
        ),
    ),
    Mutant(
        name="blocks_taken_back_passed_over",
        why="A save of blocks that were taken back keeps its place until its deadline.",
        file=_DEADLINES,
        find="guard.torn or guard.revoked or ",
        replace="",
        killers=(_THROUGH,),
    ),
    Mutant(
        name="behind_a_hung_thread_passed_over",
        why="Saves behind a store that hangs wait for their own deadlines.",
        file=_DEADLINES,
        find=" or self._hung[ticket.direction]\n",
        replace="\n",
        killers=(_THROUGH,),
    ),
    Mutant(
        name="late_rows_passed_over",
        why="A copy that was late once, and got more time, is given up at the next delay.",
        file=_DEADLINES,
        find="ticket.outcome or ticket.is_late or now",
        replace="ticket.outcome or now",
        killers=(_THROUGH,),
    ),
    Mutant(
        name="all_that_run_gone_through_in_each_step",
        why="R-18: a thousand requests that complete nothing cost a look at each.",
        file="ucm/scheduler/due.py",
        find="        return self._quiet > 0\n",
        replace="        return False\n",
        killers=(_QUIET,),
    ),
    Mutant(
        name="quiet_steps_uncounted",
        why="After one quiet step nobody is looked at any more before the end.",
        file="ucm/scheduler/due.py",
        find="        self._quiet -= most\n",
        replace="",
        killers=(
            f"{_DUE}::TestAnySteps::test_all_that_are_due_are_looked_at_and_nobody_else[0]",
        ),
    ),
    Mutant(
        name="who_sits_out_is_short_as_well",
        why="A request that was not scheduled when all were looked through is looked at late.",
        file="ucm/scheduler/due.py",
        find="quiet if num_known == len(self) else 0",
        replace="quiet",
        killers=(
            f"{_DUE}::TestAnySteps::test_all_that_are_due_are_looked_at_and_nobody_else[0]",
        ),
    ),
    Mutant(
        name="newcomers_do_not_end_the_quiet",
        why="A request that begins while others are quiet is looked at when they are.",
        file="ucm/scheduler/due.py",
        find="        self._quiet = min(self._quiet, due - tokens + self.patience)\n",
        replace="",
        killers=(
            f"{_DUE}::TestAnySteps::test_all_that_are_due_are_looked_at_and_nobody_else[0]",
        ),
    ),
    Mutant(
        name="failed_load_waits_for_the_quiet_to_end",
        why="What is computed anew after a failed load is saved late, or never.",
        file="ucm/scheduler/due.py",
        find="        self[request_id] = self._quiet = 0\n",
        replace="        self[request_id] = 0\n",
        killers=(
            f"{_DUE}::TestQuiet::test_request_that_is_forgotten_is_due_in_the_next_step[at_once-0]",
        ),
    ),
    Mutant(
        name="long_prompt_ends_the_quiet",
        why="Beside each new prompt all that run are gone through.",
        file="ucm/integration/vllm/running.py",
        find="            most -= counts[new.req_id]\n",
        replace="            pass\n",
        killers=(_QUIET,),
    ),
    Mutant(
        name="guesses_advance_by_one",
        why="Requests that advance by several tokens are looked at late.",
        file="ucm/integration/vllm/running.py",
        find="self._due.is_nobody(most)",
        replace="self._due.is_nobody(1)",
        killers=(
            f"{_DUE}::TestAnySteps::test_all_that_are_due_are_looked_at_and_nobody_else[0]",
        ),
    ),
    Mutant(
        name="forgotten_request_sits_out_unseen",
        why="A failed load's request that sits out a step is looked at late.",
        file="ucm/scheduler/due.py",
        find="        self[request_id] = self._quiet = 0\n",
        replace="        self.pop(request_id, None)\n        self._quiet = 0\n",
        killers=(
            f"{_DUE}::TestAnySteps::test_all_that_are_due_are_looked_at_and_nobody_else[0]",
        ),
    ),
    Mutant(
        name="engine_gives_way_to_us",
        why="The engine's thread sleeps in between where it takes orders in itself.",
        file="ucm/intake.py",
        find="self._threads.slowly if gives_way else iter",
        replace="self._threads.slowly",
        killers=(f"{_TURNS[:-6]}[False]",),
    ),
    # Hops: what the interpreter lock is taken for.
    Mutant(
        name="event_asked_from_python_all_the_time",
        why="At full load our threads take the interpreter lock a thousand times a second.",
        file=_POLLER,
        find="            if not passed and self._driver.await_any(",
        replace="            if passed is None and self._driver.await_any(",
        killers=(f"{_POLLS}::test_runtime_that_waits_is_not_asked_meanwhile",),
    ),
    Mutant(
        name="event_behind_that_of_another_stream",
        why="A copy of a millisecond is seen to end with the forward pass beside it.",
        file=_POLLER,
        find="                if len(queue) == 1:\n                    self._tell()\n",
        replace="",
        killers=(f"{_POLLS}::test_event_of_another_stream_is_asked_for_at_once",),
    ),
    Mutant(
        name="native_wait_deaf_to_news",
        why="As above, in the wait of native code.",
        file="ucm/native.c",
        find="spent < limit_ns && atomic_load(news) == seen;",
        replace="spent < limit_ns && (news || seen);",
        killers=(f"{_CUDA}::test_wait_ends_with_news",),
    ),
    Mutant(
        name="loop_woken_amid_a_copy",
        why="The loop takes the interpreter lock once more for each span, to no end.",
        file=_RUNNER,
        find="    copy_wait.begin_wait(item)\n    return copy\n",
        replace="    copy_wait.begin_wait(item)\n    return None\n",
        killers=(f"{_FENCES}::test_loop_sleeps_while_a_copy_is_under_way",),
    ),
    Mutant(
        name="loop_not_woken_by_who_cannot",
        why="A save behind a fence that calls nobody waits for the next sweep, for 50 ms.",
        file=_RUNNER,
        find="        if copy is None or not _calls(copy, self._ring):\n            self._ring()\n",
        replace="        if copy is None:\n            self._ring()\n        else:\n            copy.call_when_over(self._ring)\n",
        killers=(f"{_FENCES}::test_loop_is_woken_where_no_copy_will_wake_it",),
    ),
    Mutant(
        name="failed_fence_waited_for",
        why="A ticket behind a device that has failed is open until its deadline.",
        file=_RUNNER,
        find="                self._begin_wait(item)  # the fence failed: it says why\n",
        replace="                pass\n",
        killers=(f"{_FENCES}::test_fence_that_fails_ends_its_ticket",),
    ),
    Mutant(
        name="pages_merged_that_part_in_the_pool",
        why="A save takes the bytes behind a block for those of the next one.",
        file="ucm/native.c",
        find="            if (count && page == pages[last] + nbytes[last] &&\n",
        replace="            if (count &&\n",
        killers=(f"{_PAGES}::test_neighbours_on_both_sides_are_one_copy",),
    ),
    Mutant(
        name="wait_for_an_event_takes_no_time",
        why="The log says that nothing waited for the forward pass, and all stood still.",
        file="ucm/pipeline/stage.py",
        find="        if self._loop_stage.awaited(item) is not None:\n            self.begin_wait(item)\n",
        replace="",
        killers=(f"{_FENCES}::test_wait_for_a_fence_is_told_with_its_time",),
    ),
    Mutant(
        name="rows_that_wait_together_wait_in_sum",
        why="Of a ticket of 32 rows the log says that it waited ten times as long as it was there.",
        file="ucm/pipeline/stage.py",
        find="    elapsed = now - max(started, last)",
        replace="    elapsed = now - started",
        killers=(f"{_FENCES}::test_rows_that_wait_beside_each_other_wait_once",),
    ),
    Mutant(
        name="wait_of_a_copy_begins_with_its_end",
        why="The log tells no stage for the time of the copy itself.",
        file=_RUNNER,
        find="    copy_wait.begin_wait(item)\n    return copy\n",
        replace="    return copy\n",
        killers=(f"{_FENCES}::test_wait_for_a_copy_begins_with_it",),
    ),
    Mutant(
        name="foreign_fence_ends_the_copy_thread",
        why="A fence of a host's own that raises ends all saves, and not its own ticket.",
        file=_RUNNER,
        find="        return fence.call_when_over(callback)\n    except Exception:",
        replace="        return fence.call_when_over(callback)\n    except WorkerDiedError:",
        killers=(f"{_FENCES}::test_fence_that_breaks_its_word_ends_its_ticket",),
    ),
    Mutant(
        name="news_read_behind_the_looks",
        why="An event that comes amid a look is asked for 50 ms later.",
        file=_POLLER,
        find="            if not passed and self._driver.await_any([each for _, each in heads], news):",
        replace="            news = News(self._news, self._news.value)\n            if not passed and self._driver.await_any([each for _, each in heads], news):",
        killers=(f"{_POLLS}::test_event_that_comes_amid_a_look_is_asked_for_at_once",),
    ),
    Mutant(
        name="step_that_failed_made_again",
        why="The end of one row's copy counts twice: blocks are released under another's.",
        file=_RUNNER,
        find="        fail(item, exc)  # and not once more: half of the step may be done\n        return True\n",
        replace="        return False\n",
        killers=(f"{_FENCES}::test_step_that_fails_is_not_made_again",),
    ),
    Mutant(
        name="large_copy_keeps_the_lock",
        why="R-18: an engine's thread waits for each load of several megabytes.",
        file="ucm/devices/cpu.py",
        find="move = library.brief_moves if is_brief else library.moves",
        replace="move = library.brief_moves",
        killers=(f"{_LOCK}::test_only_a_brief_copy_keeps_the_lock",),
    ),
    Mutant(
        name="brief_copy_gives_the_lock_up",
        why="A copy of some microseconds waits five milliseconds to have the lock again.",
        file="ucm/devices/cpu.py",
        find="move = library.brief_moves if is_brief else library.moves",
        replace="move = library.moves",
        killers=(f"{_LOCK}::test_only_a_brief_copy_keeps_the_lock",),
    ),
    Mutant(
        name="tiers_asked_where_there_are_none",
        why="R-18: each life of an engine without tiers costs calls that ask for nothing.",
        file="ucm/integration/vllm/tiers.py",
        find="        self.are_there = client is not None\n",
        replace="        self.are_there = True\n",
        killers=(
            "tests/integration/vllm/test_life_calls.py::test_life_of_a_request_is_so_many_calls",
        ),
    ),
)
