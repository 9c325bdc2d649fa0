# SPDX-License-Identifier: Apache-2.0
"""Each request has one line when all is over: what was found, loaded, saved, and why not."""

import contextlib
import json
import time
from types import SimpleNamespace

import pytest

from tests.integration.vllm.test_halves import Engine, make_setup, request
from tests.rig import null_log
from tests.traces import logs_closed
from ucm.integration.vllm.lifelog import LifeLog
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.running import Known
from ucm.scheduler.records import Records
from ucm.scheduler.requests import NO_WISHES
from ucm.story.files import Reading, find_logs, read_logs

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
OTHER_KEYS = {"v", "event", "level", "role", "timestamp_s", "began_s"}


@pytest.fixture
def engine(tmp_path):
    """Return both halves, which log into a directory."""
    log = {"directory": str(tmp_path / "traces")}
    with logs_closed():
        engine = Engine(make_setup(tmp_path, log=log))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.register()
            yield engine


def lines(engine, tmp_path, event):
    """Return the lines of an event, once both halves are closed."""
    with logs_closed():
        engine.scheduler.close()
        engine.worker.close()
    found = []
    for path in sorted((tmp_path / "traces").iterdir()):
        each = map(json.loads, path.read_text().splitlines())
        found += [line for line in each if line["event"] == event]
    return found


def told(line):
    """Return what a line says of its request."""
    return {key: value for key, value in line.items() if key not in OTHER_KEYS}


NOTHING = {
    "outcome": "finished",
    "prompt_tokens": 48,
    "computed_tokens": 0,
    "matched_tokens": 0,
    "loaded_tokens": 0,
    "saved_blocks": 0,
    "dropped_blocks": 0,
    "unsettled_blocks": 0,
    "preemptions": 0,
    "load_s": 0.0,
}


class TestRequest:
    def test_line_says_what_was_saved(self, engine, tmp_path):
        """A request that computed its prompt left it in the store."""
        before = time.time()
        engine.save()
        (line,) = lines(engine, tmp_path, "request.ended")
        saved = {"saved_blocks": 3, "miss": "never_offered", "first_missing": 0}
        assert NOTHING | {"request_id": "r", "life": 1} | saved == told(line)
        assert before <= line["began_s"] <= line["timestamp_s"]

    def test_id_of_many_kilobytes_is_cut_alike_in_all_lines(self, engine, tmp_path):
        """Clients choose ids: no line grows with one, and who reads lines knows it."""
        name = "x" * 5000
        engine.save(name)
        engine.worker.close()
        ended, missed, settled = (
            lines(engine, tmp_path, event)[-1]
            for event in ("request.ended", "prefix.missed", "ticket.settled")
        )
        cut = f"{'x' * 511}\N{HORIZONTAL ELLIPSIS}"
        assert [cut] * 3 == [each["request_id"] for each in (ended, missed, settled)]
        found = Reading()
        logs = find_logs(tmp_path / "traces")
        told = [line for line in read_logs(logs, found) if cut in line.owners]
        assert not found.garbage
        assert {"request.ended", "prefix.missed", "ticket.settled"} <= {
            line.event for line in told
        }

    def test_line_says_what_was_loaded(self, engine, tmp_path):
        """A request that found it has its tokens, and how long it waited."""
        engine.save()
        engine.load()
        engine.scheduler.finished("s")
        line = lines(engine, tmp_path, "request.ended")[-1]
        assert line["load_s"] > 0
        loaded = {"matched_tokens": 48, "loaded_tokens": 48, "load_s": line["load_s"]}
        loaded["hit_tokens"] = {"slab": 48}
        (matched,) = lines(engine, tmp_path, "prefix.matched")
        assert (48, {"slab": 48}) == (matched["external_tokens"], matched["hit_tokens"])
        assert NOTHING | loaded | {"request_id": "s", "life": 1} == told(line)

    def test_line_says_why_a_load_came_to_nothing(self, engine, tmp_path):
        """What was matched and not loaded has its reason."""
        engine.save()
        engine.worker._store.clear(b"")
        one = request("s")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.scheduler._store, "match", len)
            tokens, _ = engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], tokens)
        engine.work(engine.plan())
        engine.scheduler.finished("s")
        line = lines(engine, tmp_path, "request.ended")[-1]
        assert (48, 0, "evicted") == (
            line["matched_tokens"],
            line["loaded_tokens"],
            line["load_failure"],
        )

    def test_aborted_and_preempted_requests_are_told_apart(self, engine, tmp_path):
        """Who went away before it had blocks is told as well, as life 0."""
        engine.scheduler.match(request("gone"), 0)
        engine.scheduler.finished("gone", is_aborted=True)
        engine.scheduler.finished("never seen", is_aborted=True)
        one = request("r")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        engine.work(engine.plan([one], (1, 2, 3)))
        engine.work(engine.plan(preempted=["r"]))
        engine.work(engine.plan([one], (4, 5, 6)))
        engine.scheduler.finished("r")
        gone, back = lines(engine, tmp_path, "request.ended")
        assert NOTHING | {"request_id": "gone", "life": 0, "outcome": "aborted"} == (
            told(gone)
        )
        assert ("finished", 2, 1) == (
            back["outcome"],
            back["life"],
            back["preemptions"],
        )

    def test_engine_that_waits_on_tells_of_it_at_once(self, engine, tmp_path):
        """Whoever asks after one request need not send another to have the answer."""
        engine.save()
        engine.work(engine.plan())
        assert 0 == len(engine.scheduler._adapter.records)

    def test_line_has_what_others_found_out(self, engine, tmp_path):
        """Why a look-up fell short is put into the record by whoever knows."""
        engine.scheduler.match(request("r"), 0)
        record = engine.scheduler._adapter.records.present["r"]
        record.miss, record.first_missing = "never_offered", 0
        engine.scheduler.finished("r")
        (line,) = lines(engine, tmp_path, "request.ended")
        assert ("never_offered", 0) == (line["miss"], line["first_missing"])


class TestTrace:
    def test_lines_of_a_request_have_the_trace_that_it_brought(self, engine, tmp_path):
        """Whoever follows a request through several services finds our part of it."""
        one = request("r")
        one.trace_headers = {"traceparent": TRACEPARENT}
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        engine.work(engine.plan([one], (1, 2, 3)))
        engine.scheduler.finished("r")
        for event in ("request.ended", "ticket.settled"):
            (line,) = lines(engine, tmp_path, event)
            assert TRACE_ID == line["trace_id"]

    def test_plan_without_traces_says_nothing_of_them(self, engine):
        """R-18: who brings none pays for none."""
        one = request("r")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        assert {} == plan_in(engine.plan([one], (1, 2, 3))).traces

    def test_traces_of_a_plan_are_bounded(self):
        """A message is bounded, whoever sends traces along."""
        records = Records()
        log = LifeLog(records, null_log())
        orders = []
        for number in range(600):
            one = request(f"r{number}")
            one.trace_headers = {"traceparent": TRACEPARENT}
            log.begun(Known(one, NO_WISHES))
            life = (one.request_id, number)
            records.begun(life)
            owner = SimpleNamespace(life=life)
            orders.append(SimpleNamespace(owners=(owner,), transfer_id=number))
        plan = SimpleNamespace(loads=(), saves=orders)
        assert 512 == len(log.traces_of(plan))
