# SPDX-License-Identifier: Apache-2.0
"""Traces: the fake host and the real engine obey one grammar."""

import json
from pathlib import Path

import attrs
import pytest

from tests.testing.host_kit import HYBRID, ONE_FULL, run, tiny_host
from tests.testing.tiny_connector import TinyScheduler
from ucm.testing.host import (
    SCHEDULER,
    HookCall,
    HookTrace,
    HostAssertionError,
    HostSettings,
    Odds,
    Rule,
    replay,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "hooks_llama.json"
IN_ORDER = Odds(hold_back=0.0, abort=0.05, preempt=0.05, reset=0.01)


def record(layout=ONE_FULL, acts: int = 400, num_ranks: int = 2) -> HookTrace:
    """Return the trace of a run of the fake host."""
    settings = HostSettings(odds=IN_ORDER)
    host = tiny_host(layout, settings=settings, num_ranks=num_ranks)
    trace = HookTrace()
    trace.watch(host.scheduler.hooks, SCHEDULER)
    for rank, runner in enumerate(host._runners):
        trace.watch(runner._hooks, f"worker-{rank}")
    run(host, acts)
    return trace


@pytest.fixture(scope="module")
def trace() -> HookTrace:
    """Return one trace that all tests spoil copies of."""
    return record()


class TestFakeHost:
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["full", "hybrid"])
    def test_own_runs_obey_the_grammar(self, layout) -> None:
        """Each hook of a run of the fake host comes in an order that is allowed, and
        text keeps all of it."""
        recorded = record(layout)
        again = HookTrace.from_json(recorded.to_json())
        assert recorded.calls == again.calls
        replay(
            again,
            alignment_tokens=layout.alignment_tokens,
            num_groups=len(layout.groups),
        )


def first(trace: HookTrace, hook: str, number: int = 20) -> int:
    """Return where a hook is called for the *number*-th time."""
    places = [at for at, call in enumerate(trace.calls) if call.hook == hook]
    return places[number]


def told(trace: HookTrace, hook: str, field: str) -> int:
    """Return where a hook is called, or answers, with something in *field*."""
    return next(
        at
        for at, call in enumerate(trace.calls)
        if call.hook == hook and {**call.told, **(call.result or {})}.get(field)
    )


def blame(calls: list[HookCall]) -> HostAssertionError:
    """Return what is wrong with a trace."""
    with pytest.raises(HostAssertionError) as caught:
        replay(HookTrace(calls), alignment_tokens=4)
    return caught.value


class TestRealEngine:
    def test_recorded_run_obeys_the_grammar(self) -> None:
        """H-01, H-06: a run of the real engine with saves, loads, preemptions and
        aborts passes the very rules that the fake host keeps."""
        real = HookTrace.from_json(GOLDEN.read_text(encoding="utf-8"))
        replay(real, alignment_tokens=32)
        happened = {
            field
            for call in real.calls
            for field in ("preempted", "resumed", "external", "received", "sent")
            if call.told.get(field)
        }
        assert {"preempted", "resumed", "external", "received", "sent"} == happened

    def test_both_call_the_same_hooks(self) -> None:
        """The fake host leaves out no hook that the real engine calls, and tells each
        the same things."""

        def forms(calls) -> set[tuple[object, ...]]:
            return {(call.side, call.hook, *sorted(call.told)) for call in calls}

        real = HookTrace.from_json(GOLDEN.read_text(encoding="utf-8"))
        fake = record(num_ranks=1)
        assert forms(real.calls) == forms(fake.calls)


class TestReplay:
    @pytest.mark.parametrize(
        "hook",
        [
            "handle_preemptions",
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ],
    )
    def test_missing_hook_is_noticed(self, trace, hook) -> None:
        """A step that leaves a worker's hook out is none that an engine makes."""
        calls = trace.calls.copy()
        at = first(trace, hook)
        # A hook may have been called more than once in its step.
        while calls[at].hook == hook:
            del calls[at]
        while calls[at - 1].hook == hook:
            at -= 1
            del calls[at]
        assert Rule.HOOK_ORDER is blame(calls).rule

    def test_forgotten_news_is_noticed(self, trace) -> None:
        """What the ranks told reaches the scheduler, all of it and nothing else."""
        calls = trace.calls.copy()
        at = told(trace, "update_connector_output", "received")
        calls[at] = attrs.evolve(calls[at], told={**calls[at].told, "received": []})
        assert Rule.HOOK_ORDER is blame(calls).rule

    def test_report_that_was_not_registered_is_noticed(self, trace) -> None:
        """H-01: a trace in which the load was never ordered is blamed for its report."""
        calls = trace.calls.copy()
        at = told(trace, "update_state_after_alloc", "external")
        calls[at] = attrs.evolve(calls[at], told={**calls[at].told, "external": 0})
        rules = {Rule.REPORT_UNREGISTERED, Rule.REPORT_UNKNOWN}
        assert blame(calls).rule in rules

    @pytest.mark.parametrize(
        ("rule", "result"),
        [
            (Rule.ASYNC_NOTHING, [0, True]),
            (Rule.MATCH_TOO_LONG, [4000, True]),
            (Rule.MATCH_UNALIGNED, [1, True]),
        ],
    )
    def test_wrong_match_is_noticed(self, trace, rule, result) -> None:
        """H-08, H-11: answers in a trace are held against the same rules."""
        calls = trace.calls.copy()
        at = next(
            at
            for at, call in enumerate(calls)
            if call.told.get("num_tokens", 0) > 8 and call.told["computed"] == 0
        )
        calls[at] = attrs.evolve(calls[at], result=result)
        assert rule is blame(calls).rule

    @pytest.mark.parametrize("field", ["scheduled", "new"])
    def test_impossible_plan_is_noticed(self, trace, field) -> None:
        """Who is scheduled has started before, and who starts is scheduled."""
        calls = trace.calls.copy()
        at = told(trace, "build_connector_meta", "new")
        value = {"x": 1} if field == "scheduled" else ["x"]
        calls[at] = attrs.evolve(calls[at], told={**calls[at].told, field: value})
        assert Rule.HOOK_ORDER is blame(calls).rule

    def test_changed_answer_is_noticed(self, trace) -> None:
        """S1-02: a second question with another answer is found in a trace."""
        calls = trace.calls.copy()
        at = first(trace, "request_finished_all_groups", 2)
        again = attrs.evolve(calls[at], result=not calls[at].result)
        calls.insert(at + 1, again)
        assert Rule.FINISHED_CHANGED is blame(calls).rule

    def test_watched_connector_answers_as_before(self) -> None:
        """A trace takes part in nothing, and passes over hooks that are not there."""
        side = TinyScheduler(ONE_FULL, 1, {})
        trace = HookTrace()
        trace.watch(side, SCHEDULER)
        trace.watch(object.__new__(TinyScheduler), "worker-0")
        assert side.reset_cache()
        assert [] == trace.calls
        assert [] == json.loads(trace.to_json())
