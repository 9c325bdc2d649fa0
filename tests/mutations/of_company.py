# SPDX-License-Identifier: Apache-2.0
"""Mutants of saves that wait for others to share a ticket with."""

from tests.mutations.mutant import Mutant

__all__ = ["COMPANY"]

_COMPANY = "ucm/scheduler/company.py"
_SAVES = "ucm/scheduler/saves.py"
_LIVES = "ucm/scheduler/lives.py"
_SETUP = "ucm/integration/vllm/setup.py"
_TOUCHES = "ucm/scheduler/touches.py"
_TOUCHED = "tests/scheduler/test_touches.py::TestCompany"
_LIMITS = "tests/integration/vllm/test_setup.py::TestSaveLimits::test_small_saves_wait_unless_others_do_for_them"
_WAITING = "tests/scheduler/test_company.py::TestWaiting"
_ENDS = "tests/scheduler/test_company.py::TestEnds"

_TOGETHER = "tests/integration/vllm/test_due.py::TestTogether"

COMPANY = (
    Mutant(
        name="look_for_each_block",
        why="R-18: a look at one request costs a step five times what it adds to others.",
        file="ucm/scheduler/adapter.py",
        find="waits=limits.may_wait)\n        self.records",
        replace="waits=False)\n        self.records",
        killers=(
            "tests/scheduler/test_company.py::TestWaiting::test_looks_wait_for_others_as_saves_do[layout0-10.0-4]",
        ),
    ),
    Mutant(
        name="window_looked_at_late",
        why="A window has given its block back when it is looked at.",
        file="ucm/scheduler/due.py",
        find="if waits and stay else 0",
        replace="if waits else 0",
        killers=(
            f"{_TOGETHER}::test_it_waits_only_where_saves_do_and_blocks_stay[True-kinds2-0]",
        ),
    ),
    Mutant(
        name="first_who_is_due_waits_for_nobody",
        why="R-18: each of those that are due a token apart has a look of its own.",
        file="ucm/scheduler/due.py",
        find="        quiet = tokens + self.patience\n",
        replace="        quiet = tokens\n",
        killers=(f"{_TOGETHER}::test_who_is_due_waits_a_few_tokens_for_others",),
    ),
    Mutant(
        name="small_saves_never_wait",
        why="R-18: each step of an engine that decodes costs the workers a ticket.",
        file=_SAVES,
        find="        self._goes = self._company.goes(step, self._transfers.denied.now) or hurries\n",
        replace="        self._goes = True\n",
        killers=(f"{_WAITING}::test_few_blocks_of_several_steps_share_a_ticket",),
    ),
    Mutant(
        name="small_save_waits_for_ever",
        why="A request that is alone is not saved before it ends.",
        file=_COMPANY,
        find="        return step - since >= MOST_STEPS or now",
        replace="        return now",
        killers=(f"{_WAITING}::test_whoever_is_alone_waits_for_some_steps_only",),
    ),
    Mutant(
        name="small_save_waits_for_steps_that_take_long",
        why="The blocks of a prompt are seconds late where steps take long.",
        file=_COMPANY,
        find=" or now - began >= self._seconds",
        replace="",
        killers=(f"{_WAITING}::test_nobody_waits_longer_than_is_allowed",),
    ),
    Mutant(
        name="last_step_takes_nothing",
        why="Blocks of the last request wait for a step that never comes.",
        file=_SAVES,
        find="hurries = facts.is_idle or self._decoded.hurries",
        replace="hurries = self._decoded.hurries",
        killers=(f"{_WAITING}::test_step_that_computes_nothing_takes_all",),
    ),
    Mutant(
        name="small_saves_wait_while_memory_is_short",
        why="What waits is lost with the next preemption.",
        file=_SAVES,
        find="hurries = facts.is_idle or self._decoded.hurries",
        replace="hurries = facts.is_idle",
        killers=(f"{_ENDS}::test_preempted_request_saves_nothing_and_others_go",),
    ),
    Mutant(
        name="time_runs_on_after_all_have_gone",
        why="Whoever comes after the first ones never waits.",
        file=_COMPANY,
        find="        self._nbytes, self._since = 0, None\n",
        replace="        self._nbytes = 0\n",
        killers=(f"{_WAITING}::test_whoever_is_alone_waits_for_some_steps_only",),
    ),
    Mutant(
        name="later_blocks_go_first",
        why="A prompt is found nowhere although all but its first block are stored.",
        file=_SAVES,
        find="            self._take_left([(life.stay, life.queued)], is_over=False)  # comes before\n",
        replace="",
        killers=(f"{_WAITING}::test_what_fills_a_ticket_does_not_wait",),
    ),
    Mutant(
        name="window_waits",
        why="Blocks that the engine has given to another request are saved.",
        file=_SAVES,
        find="        if group.kind is not GroupKind.FULL:\n            return False\n",
        replace="",
        killers=(f"{_WAITING}::test_blocks_of_windows_do_not_wait",),
    ),
    Mutant(
        name="former_life_is_saved",
        why="Blocks that are another request's are stored under the keys of the former.",
        file=_COMPANY,
        find=" and life.may_save and not life.is_over",
        replace=" and life.may_save",
        killers=(
            f"{_ENDS}::test_preempted_request_saves_nothing_and_others_go",
            f"{_ENDS}::test_blocks_of_a_former_life_are_not_saved",
        ),
    ),
    Mutant(
        name="waiting_blocks_outlive_a_doubt",
        why="What a request computed on bad blocks is stored with what others wait for.",
        file=_COMPANY,
        find=" and life.may_save and not life.is_over",
        replace=" and not life.is_over",
        killers=(f"{_ENDS}::test_life_that_is_not_saved_any_more_waits_for_nothing",),
    ),
    Mutant(
        name="waiting_blocks_lost_uncounted",
        why="A preempted request's blocks are neither saved nor dropped.",
        file=_LIVES,
        find="        waiting += sum(len(run.hashes) for _, run in self.queued)\n",
        replace="",
        killers=(
            f"{_ENDS}::test_preempted_request_saves_nothing_and_others_go",
            f"{_ENDS}::test_doubt_about_the_weights_drops_what_waits",
        ),
    ),
    Mutant(
        name="end_forgets_what_waited",
        why="The first blocks of a request that ends soon are never saved.",
        file=_LIVES,
        find="            mine += self.pending[at]\n",
        replace="            mine = self.pending[at]\n",
        killers=(
            f"{_ENDS}::test_request_that_ends_takes_what_waited_along",
            f"{_ENDS}::test_blocks_beyond_what_was_accepted_are_not_saved",
        ),
    ),
    Mutant(
        name="lock_given_up_to_count",
        why="R-18: numbers for a few blocks are made anew, and an engine waits for our threads.",
        file=_TOUCHES,
        find="(start + _AT[: len(hashes)])",
        replace="np.arange(start, start + len(hashes))",
        killers=(
            "tests/integration/vllm/test_life_calls.py::test_life_of_a_request_gives_the_interpreter_lock_to_nobody",
        ),
    ),
    Mutant(
        name="each_prefix_told_alone",
        why="R-18: each request that begins costs the engine's thread a call of the store.",
        file=_TOUCHES,
        find="FEW_PREFIXES if waits else 1",
        replace="1",
        killers=(f"{_TOUCHED}::test_few_prefixes_are_told_together",),
    ),
    Mutant(
        name="burst_of_prefixes_waits",
        why="The oldest of many prefixes are dropped, and evicted while they are used.",
        file=_TOUCHES,
        find="if len(self._waiting) < self._few and step",
        replace="if step",
        killers=(f"{_TOUCHED}::test_many_prefixes_do_not_wait",),
    ),
    Mutant(
        name="last_prefixes_never_told",
        why="What the last requests used is evicted as if nobody had.",
        file=_TOUCHES,
        find=" and not at_once:",
        replace=":",
        killers=(f"{_TOUCHED}::test_step_that_computes_nothing_tells_all",),
    ),
    Mutant(
        name="whole_pool_waits",
        why="A small engine's blocks are all of requests that ended, and nobody may begin.",
        file=_COMPANY,
        find="pool_nbytes // _POOL_PARTS",
        replace="pool_nbytes",
        killers=(f"{_WAITING}::test_small_part_of_the_engines_blocks_waits",),
    ),
    Mutant(
        name="producer_waits",
        why="A consumer asks for a prompt whose end its producer has not saved yet.",
        file=_SETUP,
        find="not self.may_wait or self.mode.loads is Loads.NOTHING:",
        replace="not self.may_wait:",
        killers=(f"{_LIMITS}[kv_producer-EngineCore-True-0]",),
    ),
    Mutant(
        name="stepped_engine_waits",
        why="The host makes no step once all have their answers, and what waits is lost.",
        file=_SETUP,
        find="            may_wait=_steps_by_itself()\n            and bool(",
        replace="            may_wait=bool(",
        killers=(f"{_LIMITS}[kv_both-MainProcess-True-0]",),
    ),
    Mutant(
        name="engine_without_a_cache_waits",
        why="A turn that follows at once finds nothing: what waits is nowhere else.",
        file=_SETUP,
        find="            may_wait=_steps_by_itself()\n            and bool(vllm_config.cache_config.enable_prefix_caching),\n",
        replace="            may_wait=_steps_by_itself(),\n",
        killers=(f"{_LIMITS}[kv_both-EngineCore-False-0]",),
    ),
    Mutant(
        name="what_waits_of_a_former_life_is_forgotten",
        why="Blocks are neither saved nor dropped when an id is used again.",
        file=_LIVES,
        find="            self._on_lost(former, known_tokens)\n",
        replace="            pass\n",
        killers=(f"{_ENDS}::test_what_a_former_life_leaves_counts_as_dropped",),
    ),
    Mutant(
        name="blocks_of_a_life_apart",
        why="Later blocks of a request are stored before those that waited.",
        file="ucm/scheduler/budget.py",
        find="        if runs and runs[-1].at.stop == run.start:\n",
        replace="        if False:\n",
        killers=(
            f"{_WAITING}::test_what_waited_goes_before_the_same_request_s_later_blocks",
        ),
    ),
    Mutant(
        name="time_begins_with_the_next_step",
        why="Blocks wait for twice as long as is allowed where steps take long.",
        file=_COMPANY,
        find="        self._plan = step, now\n        if",
        replace="        self._plan = step + 1, now + self._seconds\n        if",
        killers=(f"{_WAITING}::test_time_begins_with_the_step_that_lets_wait",),
    ),
    Mutant(
        name="life_that_goes_on_at_once_loses_nothing",
        why="An engine that resets its cache drops decoded blocks that no figure tells of.",
        file="ucm/integration/vllm/scheduler.py",
        find="            known_tokens=request.num_tokens - 1,\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_halves.py::TestTogether::test_request_that_loads_what_it_lost_counts_what_it_had_decoded",
        ),
    ),
    Mutant(
        name="life_that_goes_on_at_once_was_not_preempted",
        why="What a request's story tells of it does not add up.",
        file="ucm/scheduler/lives.py",
        find="            former.record.preemptions += former.was_scheduled\n",
        replace="",
        killers=(
            f"{_ENDS}::test_life_that_is_taken_back_and_goes_on_with_a_load_counts_as_preempted",
        ),
    ),
    Mutant(
        name="session_that_goes_on_was_preempted",
        why="Blocks that its next life saves count as dropped, and its story tells of a preemption.",
        file="ucm/scheduler/lives.py",
        find="                self.end(request.request_id)\n            life = self.begin",
        replace="                pass\n            life = self.begin",
        killers=(
            "tests/scheduler/test_company.py::TestTurns::test_blocks_that_wait_as_a_session_goes_on_are_saved_and_not_counted_as_dropped",
        ),
    ),
    Mutant(
        name="look_at_which_a_request_is_long_enough_is_late",
        why="R-56: one that ends within these tokens is never saved, nor counted as dropped.",
        file="ucm/scheduler/lives.py",
        find="patience if life.cursors is None else 0",
        replace="0",
        killers=(
            "tests/scheduler/test_shortest.py::TestShortest::test_request_that_ends_just_above_the_limit_is_saved",
        ),
    ),
    Mutant(
        name="what_waits_keeps_a_failed_engine_awake",
        why="An engine whose weights are doubted steps for ever, though nothing is saved.",
        file=_SAVES,
        find="        self._company.leave_all()\n",
        replace="",
        killers=(f"{_WAITING}::test_engine_is_not_kept_awake_by_what_nobody_saves",),
    ),
    Mutant(
        name="engine_sleeps_on_what_waits",
        why="Blocks of a session that its client leaves idle wait for its next words.",
        file="ucm/integration/vllm/scheduler.py",
        find="self._adapter.awaits_step()",
        replace="False",
        killers=(
            "tests/integration/vllm/test_awake.py::TestAwake::test_engine_steps_until_nothing_waits",
        ),
    ),
    Mutant(
        name="sleeping_engine_waits",
        why="vLLM 0.23 sleeps on blocks that wait: a session's next turn elsewhere misses them.",
        file="ucm/integration/vllm/setup.py",
        find='    asks = hasattr(KVConnectorBase_V1, "has_pending_push_work")\n',
        replace="    asks = True\n",
        killers=(
            "tests/integration/vllm/test_setup.py::TestSaveLimits::test_nothing_waits_in_an_engine_that_asks_no_connector",
        ),
    ),
)
