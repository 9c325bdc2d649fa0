# SPDX-License-Identifier: Apache-2.0
"""X-11: what an engine's processes leave while no step tells, and who reads it."""

import gc
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.rig import null_log
from ucm import line_writer
from ucm.config import LogConfig
from ucm.integration.vllm import stats, vitals
from ucm.integration.vllm.signs import Sign, leave, name_of, read_signs, sweep
from ucm.integration.vllm.stats import UCMPromMetrics
from ucm.integration.vllm.vitals import Vitals, begin_vitals
from ucm.metrics import Counters
from ucm.status import read_statuses
from ucm.tracing import close_log, num_dropped, open_log


@attrs.define
class Clock:
    """A clock that a test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that is not there yet, below one of this user's own."""
    return tmp_path / "vitals"


def process(place: Path, clock: Clock, role: str = "scheduler", **gauges: float):
    """Return what looks after a process that has these gauges."""
    counters = Counters()
    for name, value in gauges.items():
        counters.set(name, value)
    return Vitals("e", role, counters, null_log(), directory=place, clock=clock)


class TestStatus:
    def test_who_asks_in_the_slab_is_told_at_once(self, tmp_path: Path) -> None:
        """X-11: gauges are brought up to date for each who asks, and sizes are told."""
        one = process(tmp_path / "vitals", Clock(), ucm_healthy=0)
        one.look = lambda: one.counters.set("ucm_healthy", 1)
        one.answer(tmp_path, lambda: {"requests": 3})
        (told,) = read_statuses(tmp_path).answers
        assert ("scheduler", "e", {"ucm_healthy": 1}, {"requests": 3}) == (
            told.role,
            told.engine,
            told.gauges,
            told.sizes,
        )
        one.close()
        assert [] == [*tmp_path.iterdir()]


class TestSigns:
    def test_each_process_of_an_engine_leaves_its_gauges(self, place: Path) -> None:
        """X-11: read by the engine's id, those of other engines left alone."""
        clock = Clock()
        process(place, clock, ucm_healthy=1, ucm_held_blocks=3).tell()
        process(place, clock, "worker-0", ucm_healthy=0).tell()
        leave(
            place / name_of("other", "scheduler"), Sign(1, 1000.0, {"ucm_healthy": 1})
        )
        found = sorted(read_signs("e", place), key=lambda sign: len(sign.gauges))
        told = [{"ucm_healthy": 0}, {"ucm_healthy": 1, "ucm_held_blocks": 3}]
        assert told == [sign.gauges for sign in found]
        assert {1000.0} == {sign.at for sign in found}

    def test_files_are_for_this_user_alone_and_go_with_their_process(
        self, place: Path
    ) -> None:
        """X-11: closed to others, and nothing is left behind a clean end."""
        one = process(place, Clock())
        one.tell()
        (path,) = place.iterdir()
        assert (0o700, 0o600) == (
            place.stat().st_mode & 0o777,
            path.stat().st_mode & 0o777,
        )
        one.close()
        one.close()
        assert [] == list(place.iterdir())

    def test_directory_that_others_can_write_to_is_not_used(self, place: Path) -> None:
        """X-11: nothing is left there, and nothing that is there is believed."""
        clock = Clock()
        process(place, clock).tell()
        assert 1 == len(read_signs("e", place))
        place.chmod(0o777)
        assert [] == read_signs("e", place)
        process(place, clock, "worker-0").tell()
        assert 1 == len(list(place.iterdir()))

    @pytest.mark.parametrize(
        "text",
        [
            *(b"", b"{", b"[]", b"\xff\x00", b'{"v":1}', b"[" * 70000),
            *(b'{"v":2,"at":1,"gauges":{}}', b'{"v":1,"at":1,"gauges":{"a":"b"}}'),
        ],
    )
    def test_file_that_makes_no_sense_is_passed_over(
        self, place: Path, text: bytes
    ) -> None:
        """X-11: truncated, of another release or hostile: not read, and not fatal."""
        process(place, Clock()).tell()
        (place / name_of("e", "worker-0")).write_bytes(text)
        assert 1 == len(read_signs("e", place))

    @given(text=st.binary(max_size=200))
    def test_no_bytes_at_all_are_fatal(self, text: bytes, tmp_path_factory) -> None:
        """X-11: whatever is in a file, reading it gives signs or nothing."""
        place = tmp_path_factory.mktemp("signs")
        place.chmod(0o700)
        (place / name_of("e", "worker-0")).write_bytes(text)
        assert all(isinstance(sign, Sign) for sign in read_signs("e", place))

    def test_links_and_pipes_are_not_followed(self, place: Path) -> None:
        """X-11: a name that leads elsewhere, or that would never end, is passed over."""
        process(place, Clock()).tell()
        (path,) = place.iterdir()
        (place / name_of("e", "worker-0")).symlink_to(path)
        os.mkfifo(place / name_of("e", "worker-1"))
        assert 1 == len(read_signs("e", place))

    def test_what_the_killed_have_left_is_swept_away(self, place: Path) -> None:
        """X-11: old files go; those of the living stay, and what was never one of ours."""
        place.mkdir(mode=0o700)
        (place / "notes.txt").touch()
        os.utime(place / "notes.txt", (1.0, 1.0))
        for age in (0, 500, 700):
            path = place / name_of("e", f"worker-{age}")
            leave(path, Sign(1, 1.0, {}))
            now = path.stat().st_mtime
            os.utime(path, (now - age, now - age))
        mine = place / name_of("e", "scheduler")
        leave(mine, Sign(1, 1.0, {}))
        sweep(mine)
        assert 4 == len(list(place.iterdir()))
        assert not [path for path in place.iterdir() if "worker-700" in path.name]

    def test_engine_that_is_started_again_under_its_id_is_not_its_former_self(
        self, place: Path
    ) -> None:
        """X-11: what the killed one left goes, of ranks that are no more as well; a
        process that hangs since this one began is still seen."""
        clock = Clock()
        process(place, clock, "worker-1", ucm_healthy=0).tell()
        clock.now += 5.0
        hung, one = process(place, clock, "worker-0"), process(place, clock)
        hung.tell()
        for _ in range(5):
            one.tell()
            clock.now += 5.0
        assert [1005.0, 1025.0] == sorted(sign.at for sign in read_signs("e", place))

    def test_look_that_outlasts_its_end_leaves_nothing(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """X-11: a store that does not answer while the engine ends costs no false sign."""
        monkeypatch.setattr(vitals, "_JOIN_S", 0.0)
        inside, go_on = threading.Event(), threading.Event()
        one = process(place, Clock())

        def look() -> None:
            inside.set()
            assert go_on.wait(60)

        one.look = look
        one.start()
        assert inside.wait(60)
        one.close()
        go_on.set()
        one._thread.join(60)
        assert [] == list(place.iterdir())

    def test_disk_that_cannot_be_written_costs_the_sign_alone(self, tmp_path: Path):
        """X-11: there is nothing to tell it to; the next look tries again."""
        (tmp_path / "vitals").write_text("a file")
        process(tmp_path / "vitals", Clock()).tell()
        assert "a file" == (tmp_path / "vitals").read_text()


class TestVitals:
    def test_thread_looks_at_once_and_ends_when_it_is_closed(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """X-11: our own timer; what it sees is left without any step."""
        monkeypatch.setattr(vitals, "_PERIOD_S", 0.001)
        looks = []
        one = process(place, Clock(), ucm_healthy=1)
        one.look = lambda: looks.append(len(looks))
        one.start()
        while len(looks) < 3:
            one._over.wait(0.001)
        one.close()
        assert not one._thread.is_alive()
        assert list(range(len(looks))) == looks

    @pytest.mark.parametrize(
        "transfer", [None, object(), SimpleNamespace(engine_id="")]
    )
    def test_engine_without_an_id_is_not_looked_after(self, transfer: object) -> None:
        """X-11: nobody could find what is left; steps alone tell."""
        config = SimpleNamespace(kv_transfer_config=transfer)
        assert begin_vitals(config, object()) is None

    def test_lines_that_the_log_lost_are_counted(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-73: each once, however often somebody looks; a host's own log has none."""
        monkeypatch.setattr(line_writer, "MAX_CHARS", 0)
        log = open_log(LogConfig(directory=str(tmp_path)), "scheduler")
        one = process(place, Clock())
        one.log = log
        for _ in range(3):
            log.warning("store.short")
            one.tell()
        assert 3 == one.counters.total("ucm_dropped_log_lines_total")
        close_log(log)
        assert 0 == num_dropped(null_log())


class Front:
    """The front end of one engine, on the real client."""

    def __init__(self, place: Path, clock: Clock, size: int = 1) -> None:
        self.registry = CollectorRegistry()
        kinds = {
            kind: partial(kind, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="e"),
            parallel_config=SimpleNamespace(data_parallel_size=size),
        )
        engines = {each: ["m", str(each)] for each in range(size)}
        names = ["model_name", "engine"]
        self.metrics = UCMPromMetrics(
            config, kinds, names, engines, directory=place, clock=clock
        )

    def value(self, name: str, engine: str = "0") -> float | None:
        """Return what a scrape would find."""
        labels = {"model_name": "m", "engine": engine}
        return self.registry.get_sample_value(f"vllm:{name}", labels)


class TestFront:
    def test_gauges_of_an_idle_engine_are_as_fresh(self, place: Path) -> None:
        """X-11: no step tells anything; the worst of all processes is its health."""
        clock = Clock()
        front = Front(place, clock)
        scheduler = process(place, clock, ucm_healthy=1, ucm_held_blocks=3)
        scheduler.tell()
        front.metrics.look()
        assert (1, 3) == (front.value("ucm_healthy"), front.value("ucm_held_blocks"))
        process(place, clock, "worker-0", ucm_healthy=0).tell()
        front.metrics.look()
        assert 0 == front.value("ucm_healthy")
        assert front.value("ucm_last_sign_timestamp_seconds") > 1e9

    def test_engine_that_hangs_or_is_gone_is_not_healthy(self, place: Path) -> None:
        """X-11: what was told last does not stand for good."""
        clock = Clock()
        front, one = Front(place, clock), process(place, clock, ucm_healthy=1)
        one.tell()
        front.metrics.look()
        clock.now += 29.0
        front.metrics.look()
        assert 1 == front.value("ucm_healthy")
        signed = front.value("ucm_last_sign_timestamp_seconds")
        clock.now += 2.0
        front.metrics.look()
        assert 0 == front.value("ucm_healthy")
        assert pytest.approx(signed, abs=3.0) == front.value(
            "ucm_last_sign_timestamp_seconds"
        )
        one.tell()
        front.metrics.look()
        assert 1 == front.value("ucm_healthy")
        one.close()
        front.metrics.look()
        assert 0 == front.value("ucm_healthy")

    def test_step_that_told_later_is_believed(self, place: Path) -> None:
        """X-11: what was left before a step does not undo what the step said."""
        clock = Clock()
        front, one = Front(place, clock), process(place, clock, ucm_healthy=1)
        one.tell()
        clock.now += 1.0
        front.metrics.observe({"gauges": {"ucm_healthy": 0}})
        front.metrics.look()
        assert 0 == front.value("ucm_healthy")
        clock.now += 1.0
        one.tell()
        front.metrics.look()
        assert 1 == front.value("ucm_healthy")

    def test_engine_elsewhere_is_told_of_by_steps_alone(self, place: Path) -> None:
        """X-11: where no file was ever seen, nothing is said of the engine's health."""
        front = Front(place, Clock())
        front.metrics.look()
        assert front.value("ucm_healthy") is None
        front.metrics.observe({"gauges": {"ucm_healthy": 1}})
        front.metrics.look()
        assert 1 == front.value("ucm_healthy")

    def test_engines_of_a_group_are_told_apart(self, place: Path) -> None:
        """X-11: vLLM names each after its number; one that hangs is that one."""
        clock = Clock()
        front = Front(place, clock, size=2)
        for number in (0, 1):
            one = process(place, clock, ucm_healthy=number)
            one = attrs.evolve(one, engine_id=f"e_dp{number}")
            one.tell()
        front.metrics.look()
        assert [0, 1] == [front.value("ucm_healthy", each) for each in "01"]

    def test_names_that_are_not_ours_are_passed_over(self, place: Path) -> None:
        """X-11: a process of another release may know other gauges."""
        told = {"ucm_new": 1.0, "ucm_healthy|x": 1.0, "ucm_saved_blocks_total": 1.0}
        clock = Clock()
        leave(place / name_of("e", "scheduler"), Sign(1, 1000.0, told))
        front = Front(place, clock)
        front.metrics.look()
        assert front.value("ucm_healthy") is None

    def test_timer_of_the_front_end_does_not_keep_it(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """X-11: it looks by itself, and metrics that nobody has any more are let go."""
        monkeypatch.setattr(stats, "_PERIOD_S", 0.001)
        clock = Clock()
        process(place, clock, ucm_healthy=1).tell()
        before = set(threading.enumerate())
        front = Front(place, clock)
        (timer,) = set(threading.enumerate()) - before
        while front.value("ucm_healthy") is None:
            threading.Event().wait(0.001)
        del front
        gc.collect()
        timer.join(20.0)
        assert not timer.is_alive()
