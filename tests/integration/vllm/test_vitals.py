# SPDX-License-Identifier: Apache-2.0
"""X-11: how an engine's processes are while no step tells, and who asks them."""

import contextlib
import gc
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.clocks import no_threads
from tests.integration.vllm.test_halves import request, traced_engine
from tests.test_status import files_left
from ucm import line_writer
from ucm.integration.vllm import stats, vitals
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.stats import UCMPromMetrics
from ucm.integration.vllm.vitals import begin_vitals
from ucm.scheduler.messages import StepReport, encode
from ucm.status import StatusServer, read_statuses
from ucm.threads import Threads


@attrs.define
class Clock:
    """A clock that a test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def serve(tmp_path):
    """Return what has a process of an engine tell its gauges; all end with the test."""
    with contextlib.ExitStack() as servers:

        def serving(role="scheduler", engine="e", tell=dict, **gauges):
            server = StatusServer(
                tmp_path, role, lambda: {"engine": engine, "gauges": gauges} | tell()
            )
            servers.callback(server.close)
            return server

        yield serving


@pytest.fixture
def engine(tmp_path):
    """Return both halves of an engine over a slab."""
    with traced_engine(tmp_path) as engine:
        yield engine


def config_of(engine_id="e", rank=0):
    """Return what of vLLM's configuration says whose process it is."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        parallel_config=SimpleNamespace(rank=rank),
    )


class TestHalves:
    def test_each_half_tells_who_asks_in_the_slab(self, engine) -> None:
        """X-11: gauges are brought up to date for each who asks, and sizes are told;
        nothing is left behind the end."""
        slab = engine.scheduler.store.directory
        with (
            contextlib.closing(begin_vitals(config_of(), engine.scheduler)),
            contextlib.closing(begin_vitals(config_of(rank=3), engine.worker)),
        ):
            head, worker = read_statuses(slab).answers
            assert [("scheduler", "e"), ("worker-3", "e")] == [
                (each.role, each.engine) for each in (head, worker)
            ]
            assert 0 == head.gauges["ucm_store_committed_parts"]
            assert (0, 0) == (head.sizes["requests"], worker.sizes["open"])
            engine.save()
            engine.idle()
            head, worker = read_statuses(slab).answers
            assert 3 == head.gauges["ucm_store_committed_parts"]
            stages = [(stage, edge) for _, _, stage, edge in worker.edges]
            assert ("gather", "begin") in stages
            assert ("commit", "end") == stages[-1]
        assert not (slab / "status").exists()

    def test_all_that_is_held_is_told_together(self, engine) -> None:
        """X-11: a report may come behind the last numbers of a step: blocks were held, without a
        byte, for as long as the engine idled."""
        one, half = request("r"), engine.scheduler
        half.match(one, 0)
        half.allocated(one, [[1, 2, 3]], 0)
        (save,) = plan_in(engine.plan([one], [1, 2, 3])).saves
        assert 3 == half.stats().data["gauges"]["ucm_held_blocks"]
        half._apply_report(encode(StepReport(rank=0, released=(save.transfer_id,))))
        half.refresh()
        gauges = half.counters.snapshot().gauges
        assert (0, 0) == (gauges["ucm_held_blocks"], gauges["ucm_held_bytes"])

    def test_gauges_are_fresh_where_nobody_asks(
        self, engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """X-11: our own timer; what it sees is told with the next step, wherever the
        front end is."""
        monkeypatch.setattr(vitals, "_LOOK_S", 0.001)
        counters = engine.scheduler.counters
        assert "ucm_store_capacity_parts" not in counters.snapshot().gauges
        with contextlib.closing(begin_vitals(config_of(), engine.scheduler)):
            while "ucm_store_capacity_parts" not in counters.snapshot().gauges:
                threading.Event().wait(0.001)

    def test_engine_may_have_the_lock_amid_what_is_told(
        self, engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-18: an answer is a millisecond of ours, in which a step would wait."""
        ways: list[int] = []
        monkeypatch.setattr(Threads, "give_way", lambda _: ways.append(1))
        half = engine.scheduler
        with contextlib.closing(begin_vitals(config_of(), half)):
            assert 1 == len(read_statuses(half.store.directory).answers)
        assert 4 == len(ways)  # gauges, the store's, counters, and the text of all

    @pytest.mark.parametrize("engine_id", [None, ""])
    def test_engine_without_an_id_is_not_looked_after(self, engine, engine_id) -> None:
        """X-11: nobody would know whose numbers they are; steps alone tell."""
        assert begin_vitals(config_of(engine_id), engine.scheduler) is None
        assert begin_vitals(config_of(), object()) is None

    def test_lines_that_the_log_lost_are_counted(
        self, engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-73: each once, however often somebody looks."""
        monkeypatch.setattr(line_writer, "MAX_CHARS", 0)
        half = engine.scheduler
        with contextlib.closing(begin_vitals(config_of(), half)):
            for _ in range(3):
                half.log.warning("store.short")
                read_statuses(half.store.directory)
            assert 3 == half.counters.total("ucm_dropped_log_lines_total")


class Front:
    """The front end of one engine, on the real client."""

    def __init__(self, slab: Path, clock: Clock, size: int = 1, **store) -> None:
        self.registry = CollectorRegistry()
        kinds = {
            kind: partial(kind, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)
        }
        store |= {"path": str(slab)}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                engine_id="e", kv_connector_extra_config={"store": store}
            ),
            parallel_config=SimpleNamespace(data_parallel_size=size),
        )
        engines = {each: ["m", str(each)] for each in range(size)}
        names = ["model_name", "engine"]
        self.metrics = UCMPromMetrics(config, kinds, names, engines, clock=clock)
        self.clock = clock

    def value(self, name: str, engine: str = "0") -> float | None:
        """Return what a scrape would find."""
        labels = {"model_name": "m", "engine": engine}
        return self.registry.get_sample_value(f"vllm:{name}", labels)

    def healthy(self, after_s: float = 0.0, engine: str = "0") -> float | None:
        """Return what a scrape would find of its health, after a look some time later."""
        self.clock.now += after_s
        self.metrics.look()
        return self.value("ucm_healthy", engine)


@pytest.fixture
def front(tmp_path) -> Front:
    """Return the front end of an engine, whose clock only a test moves."""
    return Front(tmp_path, Clock())


class TestFront:
    def test_gauges_of_an_idle_engine_are_as_fresh(self, serve, front) -> None:
        """X-11: no step tells anything; the worst of all processes is its health, and
        another engine over the same slab has no part in it."""
        serve(ucm_healthy=1, ucm_held_blocks=3)
        serve("worker-0", engine="other", ucm_healthy=0)
        assert (1, 3) == (front.healthy(), front.value("ucm_held_blocks"))
        serve("worker-0", ucm_healthy=0)
        assert 0 == front.healthy()
        assert front.value("ucm_last_sign_timestamp_seconds") > 1e9

    def test_engine_that_hangs_or_is_gone_is_not_healthy(self, serve, front) -> None:
        """X-11: what was told last does not stand for good."""
        one = serve(ucm_healthy=1)
        assert 1 == front.healthy()
        one.close()
        assert 1 == front.healthy(29.0)
        signed = front.value("ucm_last_sign_timestamp_seconds")
        assert 0 == front.healthy(2.0)
        assert pytest.approx(signed, abs=3.0) == front.value(
            "ucm_last_sign_timestamp_seconds"
        )
        serve(ucm_healthy=1)
        assert 1 == front.healthy()

    @pytest.mark.parametrize("left", [0, 1])
    def test_server_without_files_to_ask_with_calls_nobody_unhealthy(
        self, serve, front, left
    ) -> None:
        """X-11: many clients have them all; an engine that serves them was told to be gone."""
        serve(ucm_healthy=1)
        assert 1 == front.healthy()
        with files_left(left):
            assert 1 == front.healthy(31.0)
        assert 1 == front.healthy()

    def test_rank_that_is_gone_is_missed(self, serve, front) -> None:
        """X-11: the others are well and say so; an engine that is started again under
        its id is not its former self."""
        serve(ucm_healthy=1)
        rank = serve("worker-0")
        assert 1 == front.healthy()
        rank.close()
        assert 0 == front.healthy(31.0)
        serve("worker-0")
        assert 1 == front.healthy()

    def test_step_that_told_later_is_believed(self, serve, front) -> None:
        """X-11: what was asked before a step does not undo what the step said."""

        def step() -> dict[str, object]:
            front.clock.now += 1.0
            front.metrics.observe({"gauges": {"ucm_healthy": 0}})
            return {}

        one = serve(tell=step, ucm_healthy=1)
        assert 0 == front.healthy()
        one.close()
        serve(ucm_healthy=1)
        assert 1 == front.healthy(1.0)

    def test_engine_elsewhere_is_told_of_by_steps_alone(self, front) -> None:
        """X-11: where no process ever answered, nothing is said of the engine's health."""
        assert front.healthy() is None
        front.metrics.observe({"gauges": {"ucm_healthy": 1}})
        assert 1 == front.healthy()

    def test_settings_that_make_no_sense_are_for_the_engine_to_refuse(
        self, tmp_path
    ) -> None:
        """X-11: the front end serves what steps tell, and looks nowhere."""
        before = threading.active_count()
        front = Front(tmp_path, Clock(), capacity="much")
        assert (None, before) == (front.healthy(), threading.active_count())

    def test_server_without_a_thread_that_asks_serves(self, tmp_path) -> None:
        """R-25: it did not start; steps tell of its engines."""
        with no_threads("ucm-health"):
            front = Front(tmp_path, Clock())
        front.metrics.observe({"gauges": {"ucm_healthy": 1}})
        assert 1 == front.value("ucm_healthy")

    def test_engines_of_a_group_are_told_apart(self, serve, tmp_path) -> None:
        """X-11: vLLM names each after its number; one that hangs is that one."""
        front = Front(tmp_path, Clock(), size=2)
        for number in (0, 1):
            serve(engine=f"e_dp{number}", ucm_healthy=number)
        assert [0, 1] == [front.healthy(engine=each) for each in "01"]

    def test_names_that_are_not_ours_are_passed_over(self, serve, front) -> None:
        """X-11: a process of another release may know other gauges."""
        told = {"ucm_new": 1.0, "ucm_healthy|x": 1.0, "ucm_saved_blocks_total": 1.0}
        serve(**told)
        assert front.healthy() is None

    def test_timer_of_the_front_end_does_not_keep_it(
        self, serve, tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """X-11: it looks by itself, and metrics that nobody has any more are let go."""
        monkeypatch.setattr(stats, "_PERIOD_S", 0.001)
        serve(ucm_healthy=1)
        before = set(threading.enumerate())
        front = Front(tmp_path, Clock())
        (timer,) = set(threading.enumerate()) - before
        while front.value("ucm_healthy") is None:
            threading.Event().wait(0.001)
        del front
        gc.collect()
        timer.join(60.0)
        assert not timer.is_alive()
