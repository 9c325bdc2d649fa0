# SPDX-License-Identifier: Apache-2.0
"""What operators see of both halves: whether they serve, and their logs."""

import contextlib
import fcntl
import os
from pathlib import Path

import attrs
import pytest

from tests.clocks import AdvancingThreads
from tests.integration.vllm.test_halves import (
    Engine,
    make_setup,
    request,
    traced_engine,
)
from tests.kit.lockstep import check_trace, read_traces
from tests.stores.slab_kit import index_path
from tests.traces import Drain, filled_pipe
from ucm.integration.vllm.messages import RankHandshake
from ucm.integration.vllm.stats import UCMStats
from ucm.scheduler.messages import StepReport, encode
from ucm.stores.slab._layout import Word


@pytest.fixture
def engine(tmp_path):
    """Return both halves, with the KV cache registered; checks their trace."""
    with traced_engine(tmp_path) as engine:
        yield engine


class TestHealth:
    """R-19: ``ucm_healthy`` is told by the scheduler, who hears of every rank."""

    def healthy(self, engine):
        """Return what the engine would export behind a step, as it adds numbers up."""
        told = UCMStats()
        for half in (engine.worker, engine.scheduler):
            told = told.aggregate(half.stats() or UCMStats())
        return told.data["gauges"].get("ucm_healthy")

    def test_engine_is_healthy_once_it_knows_what_its_ranks_store(self, tmp_path):
        """R-19: before that nothing is served; behind it no news is good news."""
        engine = Engine(make_setup(tmp_path))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            assert 0 == self.healthy(engine)
            engine.register()
            assert 1 == self.healthy(engine)
            assert self.healthy(engine) is None

    def test_failed_rank_is_not_outvoted(self, engine):
        """R-19: a rank that is well and busy says nothing of the engine's health."""
        assert 1 == self.healthy(engine)
        report = StepReport(rank=1, healthy=False)
        engine.scheduler._apply_report(encode(report))
        assert 0 == self.healthy(engine)
        engine.worker._counters.observe("ucm_fence_wait_seconds", 1)
        assert self.healthy(engine) is None

    def test_report_that_cannot_be_read_is_told(self, engine):
        """R-19: from then on nothing is served."""
        engine.scheduler._apply_report(b"?")
        assert 0 == self.healthy(engine)

    def test_rank_that_disagrees_late_is_told(self, engine):
        """R-19: ranks that disagree in the middle of serving end our work."""
        engine.scheduler._agree_late([RankHandshake(b"?")])
        assert 0 == self.healthy(engine)

    def test_store_that_does_not_answer_is_told(self, engine, tmp_path):
        """R-19: a bypassed store serves nothing, and says so."""
        assert 1 == self.healthy(engine)
        engine.save()
        with index_path(tmp_path / "slab").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            engine.worker._store._slab.index.header[Word.VERSION] |= 1
            for _ in range(3):
                assert (0, False) == engine.scheduler.match(request("s"), 0)
        assert 0 == self.healthy(engine)

    def test_closed_store_is_told(self, engine):
        """R-19: a closed scheduler's half serves nothing."""
        assert 1 == self.healthy(engine)
        engine.scheduler.close()
        assert 0 == self.healthy(engine)


class TestRefresh:
    """X-11: what a timer brings up to date while no step does."""

    def gauges(self, engine):
        """Return all gauges behind a look."""
        engine.scheduler.refresh()
        return engine.scheduler.counters.snapshot().gauges

    def test_what_is_held_and_open_is_told_with_its_age(self, tmp_path):
        """X-11: a save that nobody ends is open, and its hold grows older by itself."""
        engine = Engine(attrs.evolve(make_setup(tmp_path), threads=AdvancingThreads()))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.register()
            one = request("r")
            engine.scheduler.match(one, 0)
            engine.scheduler.allocated(one, [[1, 2, 3]], 0)
            assert 0 == self.gauges(engine)["ucm_oldest_hold_seconds"]
            engine.plan([one], (1, 2, 3))
            engine.scheduler._setup.threads.advance(7.0)
            told = self.gauges(engine)
            assert 7.0 == pytest.approx(told["ucm_oldest_hold_seconds"], abs=1.0)
            assert 1 == told["ucm_open_tickets|save"]
            assert 0 == told["ucm_open_tickets|load"]
            assert 0 < told["ucm_held_bytes"]

    def test_store_is_told_of_by_the_scheduler_alone(self, engine):
        """X-11: capacity, what is stored and what is there of the memory, once for all
        ranks."""
        engine.save()
        engine.idle()
        told = self.gauges(engine)
        assert 3 == told["ucm_store_committed_parts"]
        assert 0 == told["ucm_store_reserved_parts"]
        assert told["ucm_store_capacity_parts"] > 3
        assert told["ucm_store_capacity_bytes"] >= told["ucm_store_populated_bytes"] > 0
        stats = engine.worker.stats().data
        assert not [key for key in stats["gauges"] if "_store_" in key]

    def test_idle_engine_whose_slab_is_gone_is_not_healthy(self, engine, tmp_path):
        """X-11: no step runs, nobody looks anything up, and it is told."""
        assert 1 == self.gauges(engine)["ucm_healthy"]
        for path in (tmp_path / "slab").glob("index-*"):
            path.unlink()
        engine.scheduler._store.inner._slab._look_at = 0.0  # the quarter second is over
        assert 0 == self.gauges(engine)["ucm_healthy"]


class TestLog:
    def test_both_halves_close_their_logs(self, tmp_path):
        """R-22: what was logged is in the files when the halves are closed, and nothing
        of them is open any more."""

        def open_files():
            found = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
            return [path.name for path in found if path.suffix == ".jsonl"]

        setup = make_setup(tmp_path, log={"directory": str(tmp_path / "traces")})
        engine = Engine(setup)
        engine.register()
        assert 2 == len(open_files())
        engine.worker.close()
        engine.scheduler.close()
        assert [] == open_files()
        summary = check_trace(read_traces(tmp_path / "traces"))
        assert (
            1 == summary.events["scheduler.closed"] == summary.events["runtime.closed"]
        )

    def test_no_hook_waits_for_a_standard_error_that_nobody_reads(self, tmp_path):
        """R-22: requests are saved, loaded and finished while not one line can be
        written; all of them come once somebody reads."""
        setup = make_setup(tmp_path, log={"level": "debug"})
        with filled_pipe() as (reader, writer):
            with os.fdopen(writer, "w") as stream, contextlib.redirect_stderr(stream):
                engine = Engine(setup)
            engine.register()
            assert not engine.save()
            assert (set(), {"s"}, set()) == engine.load()
            engine.scheduler.finished("s")
            assert engine.idle()
            drained = Drain(reader)
            engine.worker.close()
            engine.scheduler.close()
            summary = check_trace(drained.events())
        assert 2 == summary.events["ticket.settled"]
