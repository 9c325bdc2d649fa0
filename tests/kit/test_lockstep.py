# SPDX-License-Identifier: Apache-2.0
"""The trace automaton: good traces pass, and each rule is broken by a trace."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.broken_traces import BREAKS, Break, changed, doubled, overtaking
from tests.kit.good_traces import (
    BOUNDS,
    GOOD,
    NBYTES,
    Trace,
    accepted,
    cancelled,
    process,
    scheduler,
    through,
    worker,
)
from tests.kit.lockstep import (
    Rule,
    TraceChecker,
    TraceFormatError,
    Tracer,
    TraceViolationError,
    check_trace,
    read_traces,
)
from tests.kit.lockstep_tickets import CHAINS, OPTIONAL, OWN
from tests.rig import BLOCK_BYTES, NUM_BLOCKS, order, running
from ucm.devices.cpu import CPUDevice
from ucm.pipeline.load import load_chain
from ucm.pipeline.save import save_chain
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore

FREE = {
    "runtime.started": "nobody knows that there should be an end, either",
    "runtime.failed": "what fails with it has reasons of its own",
    "stage.failed": "the last word tells of it",
    "scheduler.started": "see runtime.started",
    "scheduler.closed": "the scheduler may be killed when all is told",
    "prefix.matched": "what the host was promised is between them",
}
"""Events that a trace may lack, and why."""

REPEATED = FREE.keys() - {"stage.failed", "runtime.started"} | {"save.passed"}
"""Events that a trace may have twice."""

MAY_LACK = {
    ("torn", "stage.started"): "the wait went on without its deadline",
    ("torn", "stage.finished"): "the process ended first",
    ("stuck", "hold.quarantined"): "nobody was left to tell",
    ("late", "stage.started"): "it did not come to that",
    ("given_up", "hold.quarantined"): "it was told too late, or nobody was left",
    ("confused", "hold.taken"): "the numbers of a confused scheduler are no proof",
}
"""Lines that one trace may lack, and why."""


class TestGood:
    @pytest.mark.parametrize("name", GOOD)
    def test_good_trace_passes(self, name: str) -> None:
        """Nothing is said of a trace in which all is well."""
        check_trace(GOOD[name], bounds=BOUNDS)

    def test_summary_counts_tickets_and_blocks(self) -> None:
        """Who compares counters with a trace finds both by direction and outcome."""
        summary = check_trace(GOOD["engine"])
        assert 3 == summary.tickets["save", "offered"]
        assert 2 == summary.tickets["save", "committed"]
        assert 12 == summary.blocks["save", "offered"]
        assert 8 == summary.blocks["save", "committed"]
        assert 4 == summary.blocks["save", "refused"]
        assert 3 == summary.events["hold.taken"]

    def test_bounds_are_those_of_saves(self) -> None:
        """Loads are bounded elsewhere: any number of them may wait."""
        many = {"queue_tickets": 9, "queue_nbytes": 90 * NBYTES}
        check_trace([accepted(1, "load") | many], is_whole=False, bounds=BOUNDS)
        with pytest.raises(TraceViolationError) as caught:
            check_trace([accepted(1) | many], is_whole=False, bounds=BOUNDS)
        assert Rule.QUEUE_BOUND is caught.value.rule

    def test_lives_of_a_request_are_lanes_of_their_own(self) -> None:
        """A request that was preempted and came back is not held to its old order."""
        trace = [
            each | {"generation": 2} if each.get("transfer_id") == 2 else each
            for each in overtaking()
        ]
        check_trace(trace)

    def test_chains_are_those_of_the_pipeline(self) -> None:
        """The stages that traces are checked against are the ones that run, but for
        those of hosts; one that may run in two places counts where it has to by then."""
        device, names = CPUDevice(NUM_BLOCKS), {}
        with MemoryStore(1, BLOCK_BYTES) as store:
            for synchronous in (True, False):
                device.is_synchronous = synchronous  # type: ignore[misc]
                confirming = functools.partial(save_chain, confirms=not synchronous)
                for word, make in (("save", confirming), ("load", load_chain)):
                    chain: Any = make(store, device)  # type: ignore[operator]
                    last_first = dict.fromkeys(each.name for each in chain.stages[::-1])
                    names[word, synchronous] = [*last_first][::-1]
        for word, chain in CHAINS.items():
            assert [each for each in chain if each not in OWN] == names[word, False]
            short = [name for name in chain if name not in OPTIONAL]
            assert short == names[word, True]


class TestBroken:
    @pytest.mark.parametrize(
        "broken", BREAKS, ids=lambda each: f"{each.rule.name}-{each.trace}"
    )
    def test_broken_trace_names_its_rule(self, broken: Break) -> None:
        """Each change of a good trace is found, with the invariant it breaks."""
        with pytest.raises(TraceViolationError) as caught:
            check_trace(broken.apply(), bounds=BOUNDS)
        assert broken.rule is caught.value.rule
        assert f"invariant {broken.rule.invariant} is broken" in str(caught.value)

    def test_every_rule_is_broken_by_a_trace(self) -> None:
        """No rule stands in the table that could be dropped unnoticed."""
        assert set(Rule) == {broken.rule for broken in BREAKS}

    def test_rules_belong_to_the_invariants_that_a_log_shows(self) -> None:
        """Six and eight cannot be seen in a log; all others have a rule."""
        assert {1, 2, 3, 4, 5, 7, 9, 10} == {rule.invariant for rule in Rule}

    @pytest.mark.parametrize("name", GOOD)
    def test_no_line_can_be_left_out(self, name: str) -> None:
        """Whatever a good trace lacks, somebody notices, apart from what is listed."""
        for at, event in enumerate(GOOD[name]):
            word = event["event"]
            if word in FREE or (name, word) in MAY_LACK:
                continue
            with pytest.raises(TraceViolationError):
                check_trace(GOOD[name][:at] + GOOD[name][at + 1 :], bounds=BOUNDS)

    @pytest.mark.parametrize("name", GOOD)
    def test_no_line_can_be_written_twice(self, name: str) -> None:
        """Whatever a good trace has once more, somebody notices, apart from the same."""
        for at, event in enumerate(GOOD[name]):
            word = event["event"]
            if word in REPEATED:
                continue
            with pytest.raises(TraceViolationError):
                check_trace(GOOD[name][: at + 1] + GOOD[name][at:], bounds=BOUNDS)

    def test_error_shows_the_ticket_and_what_was_before(self) -> None:
        """A reader sees the ticket's own lines, those around, and their numbers."""
        trace = process(cancelled(1), through(2, "save", waits=False) * 2)
        with pytest.raises(TraceViolationError) as caught:
            check_trace(trace)
        told, around = str(caught.value).split("the lines before:")
        assert "save 2 was offered before" in told
        assert '5 {"event": "ticket.accepted"' in told
        assert '"transfer_id": 1' not in told
        assert '16 {"event": "ticket.accepted"' in around

    @pytest.mark.parametrize(
        ("event", "key"),
        [
            ("ticket.accepted", "blocks"),
            ("ticket.accepted", "direction"),
            ("stage.started", "stage"),
            ("source.released", "transfer_id"),
            ("ticket.settled", "committed"),
            ("ticket.settled", "outcome"),
            ("runtime.closed", "abandoned"),
        ],
    )
    def test_event_without_its_key_is_no_event(self, event: str, key: str) -> None:
        """What cannot be checked is an error and no success."""
        trace = changed(event, **{key: None})(GOOD["save"])
        with pytest.raises(TraceFormatError, match=key):
            check_trace(trace)


class TestTruncated:
    @pytest.mark.parametrize("name", GOOD)
    def test_trace_may_end_anywhere(self, name: str) -> None:
        """Of a process that was killed nothing is missed, at whichever line."""
        for length in range(len(GOOD[name]) + 1):
            check_trace(GOOD[name][:length], is_whole=False, bounds=BOUNDS)

    def test_what_it_says_must_hold_nevertheless(self) -> None:
        """A second last word is one too many, also in a trace that breaks off."""
        trace = doubled("ticket.settled")(GOOD["save"])[:-1]
        with pytest.raises(TraceViolationError, match="invariant 2 "):
            check_trace(trace, is_whole=False)


class TestOnline:
    def test_memory_is_bounded_by_what_is_open(self) -> None:
        """However long a run, what is over is forgotten but for a short while."""
        checker = TraceChecker()
        checker.feed(worker("runtime.started"))
        for number in range(1, 1100):
            checker.feed(scheduler("hold.taken", hold_id=number, ranks_left=1))
            for event in through(number, "save", waits=False):
                assert 2 >= checker.num_open
                checker.feed(event)
            checker.feed(scheduler("hold.released", hold_id=number, rank=0))
            assert 0 == checker.num_open
        (runtime,) = (
            each.runtime for each in checker._processes.values() if each.runtime
        )
        assert 1024 == len(runtime._over)
        assert not runtime._lanes
        assert not checker._parts._left
        checker.feed(worker("runtime.closed", abandoned=0, quiet=True))
        assert 1099 == checker.finish().tickets["save", "committed"]

    def test_log_never_hurts_who_logs(self) -> None:
        """What is found on a thread of the pipeline is raised at the end."""
        checker = TraceChecker()
        for event in doubled("ticket.settled")(GOOD["save"]):
            checker.log.info(**event)
        with pytest.raises(TraceViolationError, match="settled before"):
            checker.finish()

    def test_log_that_lacks_a_key_is_told_at_the_end(self) -> None:
        """An event that cannot be read is not passed over either."""
        checker = TraceChecker()
        checker.log.info("ticket.accepted")
        with pytest.raises(TraceFormatError, match="transfer_id"):
            checker.finish()


class TestRuns:
    def test_real_run_is_recorded_and_passes(self) -> None:
        """The automaton reads what the pipeline writes, stage by stage."""
        with running() as rig:
            rig.submit(order(1, Direction.SAVE, range(4), range(1, 5)))
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind
            rig.submit(order(2, Direction.LOAD, range(4), range(11, 15)))
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind
        summary = rig.tracer.check()
        assert {"save", "load"} == {direction for direction, _ in summary.tickets}
        assert 8 == summary.events["stage.finished"]
        assert 2 == summary.events["source.released"]
        rig.tracer.events.remove(
            next(
                each for each in rig.tracer.events if each["event"] == "source.released"
            )
        )
        with pytest.raises(TraceViolationError, match="invariant 1 "):
            rig.tracer.check()

    def test_tracer_keeps_what_is_bound_and_the_level(self) -> None:
        """Events are those that a file would have."""
        tracer = Tracer()
        tracer.log.bind(rank=3).debug("hold.taken", hold_id=1)
        assert [
            {"rank": 3, "hold_id": 1, "event": "hold.taken", "level": "debug"}
        ] == tracer.events


def written(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the file and the line of each event, as ``open_log`` writes them."""
    for at, event in enumerate(trace):
        keys = {key: value for key, value in event.items() if key != "process"}
        yield event["process"], json.dumps(keys | {"timestamp_s": float(at)}) + "\n"


class TestFiles:
    def test_files_of_all_processes_are_one_trace(self, tmp_path) -> None:
        """What was written in turn by several processes is read in turn."""
        for name, line in written(GOOD["engine"]):
            with (tmp_path / f"ucm-{name}-1.jsonl").open("a") as file:
                file.write(line)
        events = list(read_traces(tmp_path))
        assert [e["event"] for e in GOOD["engine"]] == [e["event"] for e in events]
        assert {"ucm-scheduler-1", "ucm-worker-0-1"} == {e["process"] for e in events}
        check_trace(events)

    def test_clocks_of_processes_decide_nothing(self, tmp_path) -> None:
        """A scheduler whose clock is late or early hears of the same releases."""
        for shift in (-1000.0, 1000.0):
            for name in ("scheduler", "worker-0"):
                lines = []
                for owner, line in written(GOOD["engine"]):
                    event = json.loads(line)
                    if name == "scheduler":
                        event["timestamp_s"] += shift
                    lines += [json.dumps(event) + "\n"] if owner == name else []
                (tmp_path / f"ucm-{name}-1.jsonl").write_text("".join(lines))
            check_trace(read_traces(tmp_path))

    def test_line_cut_off_by_a_kill_is_left_out(self, tmp_path) -> None:
        """Half a line at the end is nothing; half a line before others is an error."""
        path = tmp_path / "ucm-worker-0-1.jsonl"
        lines = [line for _, line in written(GOOD["save"])]
        path.write_text("".join(lines[:4]) + lines[4][:9])
        assert 4 == len(list(read_traces(tmp_path)))
        path.write_text(lines[0][:9] + "\n" + lines[1])
        with pytest.raises(TraceFormatError, match="line 1"):
            list(read_traces(tmp_path))
