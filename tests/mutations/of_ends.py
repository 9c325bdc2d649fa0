# SPDX-License-Identifier: Apache-2.0
"""Mutants of requests that end in the step that loads, and of turns of a session."""

from tests.mutations.mutant import Mutant

__all__ = ["ENDS"]

_ENDINGS = "ucm/scheduler/endings.py"
_LIVES = "ucm/scheduler/lives.py"
_SAVES = "ucm/scheduler/saves.py"
_TESTS = "tests/scheduler/test_ends_loading.py"
_SAVED = f"{_TESTS}::test_what_a_request_computes_that_ends_before_its_load_is_told_over_is_saved"
_FAILED = f"{_TESTS}::test_nothing_is_saved_of_one_whose_load_fails_on_any_rank"
_LEFT = f"{_TESTS}::test_one_that_leaves_nothing_to_save_is_not_waited_for"
_TURNS = "tests/scheduler/test_write_back.py::TestTurns"
_HOST = "tests/scheduler/test_host.py::test_random_acts_leave_nothing_behind"
_TOGETHER = "tests/scheduler/test_failures.py"

ENDS = (
    Mutant(
        name="ended_life_is_due",
        why="What is kept of requests that ended on a failed load grows for ever.",
        file=_LIVES,
        find="                if not life.is_over:\n    ",
        replace="                if True:\n    ",
        killers=(_FAILED,),
    ),
    Mutant(
        name="end_in_the_step_that_loads_saves_nothing",
        why="Where loads are layer-wise, what a request of one token computes is never saved.",
        file=_SAVES,
        find="        if life.loads and not decoded.is_short(",
        replace="        if not life.may_save and not decoded.is_short(",
        killers=(_SAVED,),
    ),
    Mutant(
        name="short_request_that_loads_is_saved",
        why="A request that is too short to be saved is saved where it loads.",
        file=_SAVES,
        find="        if life.loads and not decoded.is_short(",
        replace="        if life.loads or not decoded.is_short(",
        killers=(f"{_LEFT}[short]",),
    ),
    Mutant(
        name="saved_on_a_load_that_is_open",
        why="What was computed on blocks that do not come is stored under good keys.",
        file=_ENDINGS,
        find="if not each.life.loads]\n",
        replace="if each.life.loads is not None]\n",
        killers=(_SAVED,),
    ),
    Mutant(
        name="saved_on_a_load_that_failed",
        why="What was computed on blocks that did not come is stored under good keys.",
        file=_LIVES,
        find="        self.may_save &= not self.is_over  # nobody computes it anew\n",
        replace="",
        killers=(_FAILED, f"{_HOST}[loads-in-step]"),
    ),
    Mutant(
        name="ended_life_hears_of_no_failed_load",
        why="A load that fails on one rank and not on the last has garbage stored.",
        file=_LIVES,
        find="in (*self._lives.values(), *self._finished):\n",
        replace="in self._lives.values():\n",
        killers=(_FAILED,),
    ),
    Mutant(
        name="waited_for_in_both_directions",
        why="The engine frees a request's blocks twice, and crashes.",
        file=_LIVES,
        find="not life.was_scheduled or (self._parks and life.loading[0])",
        replace="not life.was_scheduled",
        killers=(f"{_LEFT}[parks]",),
    ),
    Mutant(
        name="ended_life_is_kept_for_ever",
        why="Each request that ends in the step that loads leaves its life behind.",
        file=_LIVES,
        find="        self._finished = [life for life in self._finished if life.loads]\n",
        replace="",
        killers=(_SAVED,),
    ),
    Mutant(
        name="open_load_holds_up_the_saves_of_others",
        why="A load that hangs has all requests that end keep their blocks.",
        file=_ENDINGS,
        find="        ended = [each for each in self._waiting if not each.life.loads]\n",
        replace="        ended = []\n"
        "        for each in self._waiting:\n"
        "            if each.life.loads:\n"
        "                break\n"
        "            ended.append(each)\n",
        killers=(f"{_TESTS}::test_another_that_ended_passes_one_whose_load_is_open",),
    ),
    Mutant(
        name="failed_load_told_as_a_full_queue",
        why="A miss has the operator enlarge a queue that was never full.",
        file=_SAVES,
        find="why = NOT_TAKEN if life.may_save else LOAD_FAILED",
        replace="why = NOT_TAKEN",
        killers=(_FAILED,),
    ),
    Mutant(
        name="answer_counts_as_prompt_in_the_next_turn",
        why="A consumer never saves the answers of a session whose input streams.",
        file=_LIVES,
        find="layout.groups, self.record.prompt_tokens, *tokens",
        replace="layout.groups, request.prompt_tokens, *tokens",
        killers=(
            f"{_TURNS}::test_answers_of_a_session_are_saved_although_they_are_prompt_of_its_next_turn",
            f"{_TURNS}::test_answer_of_a_turn_is_saved_after_a_preemption_in_the_next",
        ),
    ),
    Mutant(
        name="all_lives_gone_through_for_each_failure",
        why="R-18: a thousand requests whose loads fail at once hold the scheduler up for seconds.",
        file="ucm/scheduler/adapter.py",
        find="            self._lives.loads_failed(report.failures)\n",
        replace="""\
            for failure in report.failures:
                self._lives.loads_failed((failure,))
""",
        killers=(f"{_TOGETHER}::test_lives_are_gone_through_once_for_all_of_a_report",),
    ),
    Mutant(
        name="reason_told_last",
        why="R-20: a failed load counts under what followed from its failure, and not under what it came from.",
        file="ucm/scheduler/loads.py",
        find="for at in sorted(told)]",
        replace="for at in sorted(told, reverse=True)]",
        killers=(f"{_TOGETHER}::test_failures_of_a_report_are_those_told_one_by_one",),
    ),
    Mutant(
        name="sharer_of_a_failed_load_passed_over",
        why="What was computed on blocks that another's load did not bring is stored as good.",
        file="ucm/scheduler/loads.py",
        find="for each in (life, *loads) for at",
        replace="for each in (life,) for at",
        killers=(f"{_TOGETHER}::test_failures_of_a_report_are_those_told_one_by_one",),
    ),
)
