# SPDX-License-Identifier: Apache-2.0
"""Adapters count by content, and by nothing as long as that is not known."""

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from tests.integration.vllm.adapter_kit import (
    HASHES,
    SlowThreads,
    StillThreads,
    changed_ns,
    request,
    write_adapter,
)
from tests.integration.vllm.test_lookups import running, setup_of
from tests.traces import logs_closed
from ucm.integration.vllm.adapters import Adapters, SaltedHashes, adapter_settings
from ucm.integration.vllm.lookups import Lookups
from ucm.integration.vllm.running import Known
from ucm.metrics import Counters
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.requests import NO_WISHES
from ucm.testing.faults import raising

LATER = 10**18
MARGIN_NS = 250_000_000
COUNTER = "ucm_unkeyed_lookups_total"


def no_thread(target, name):
    """Return one that the system does not start."""
    return SimpleNamespace(start=raising(RuntimeError("can't start new thread")))


class Engine:
    """The part of an engine's scheduler that asks for hashes."""

    def __init__(self, settings="", *, started_ns=None, is_immutable=False):
        self.threads = StillThreads()
        self.counters = Counters()
        self.log = structlog.testing.CapturingLogger()
        self.adapters = Adapters(
            settings,
            is_immutable=is_immutable,
            counters=self.counters,
            log=self.log,
            threads=self.threads,
            started_ns=time.time_ns() + LATER if started_ns is None else started_ns,
        )

    def hashes(self, one):
        """Return a request's hashes once they can be told, as the engine begins it."""
        if not self.adapters.may_match(one):
            self.threads.work()
            assert self.adapters.may_match(one)
        self.adapters.begun(one.request_id)
        return list(self.adapters.hashes_of(one))

    def passed(self):
        """Return how many look-ups went without, by reason."""
        reasons = ("changed", "shared", "unreadable", "late", "crowded")
        totals = {each: self.counters.total(COUNTER, reason=each) for each in reasons}
        return {reason: total for reason, total in totals.items() if total}


@pytest.fixture
def adapter(tmp_path):
    """Return an adapter's directory."""
    return write_adapter(tmp_path / "adapter", b"one")


class TestContent:
    def test_request_without_adapter_costs_nothing(self):
        """R-05: its hashes are the engine's own, at once, and no thread is started."""
        engine, one = Engine(), request("r")
        assert engine.adapters.may_match(one)
        assert one.block_hashes is engine.adapters.hashes_of(one)
        del one.lora_request  # engines without adapters have no such field
        assert one.block_hashes is engine.adapters.hashes_of(one)
        assert (0, 0) == (engine.threads.started, len(engine.adapters))

    def test_other_content_at_one_path_has_other_hashes(self, adapter):
        """R-05: an adapter that was trained further shares nothing with what it was, and
        each of its engines finds its own again after a restart."""
        first = Engine().hashes(request("r", adapter))
        assert first == Engine().hashes(request("r", adapter))
        write_adapter(adapter, b"two")
        second = Engine().hashes(request("r", adapter))
        assert [] == [each for each in first if each in second or each in HASHES]
        write_adapter(adapter, b"one")
        assert first == Engine().hashes(request("r", adapter))

    def test_same_content_elsewhere_is_the_same(self, adapter, tmp_path):
        """A copy has the same digest; the engine's own hashes have the path."""
        shutil.copytree(adapter, tmp_path / "copy")
        first = Engine().hashes(request("r", adapter))
        assert first == Engine().hashes(request("r", tmp_path / "copy"))

    @pytest.mark.parametrize("name", ["adapter_config.json", "new_embeddings.bin"])
    def test_each_file_counts(self, adapter, name):
        """R-05: the scale of an adapter is in its configuration."""
        first = Engine().hashes(request("r", adapter))
        (adapter / name).write_text('{"r": 16}')
        assert first != Engine().hashes(request("r", adapter))

    def test_how_the_engine_applies_it_counts(self, adapter):
        """R-05: a type, the modules it is applied to, or how its files are read."""
        first = Engine().hashes(request("r", adapter))
        assert first != Engine("lora_dtype=x").hashes(request("r", adapter))
        stacked = request("r", adapter, is_3d_lora_weight=True)
        assert first != Engine().hashes(stacked)
        plain = request("r", adapter, is_3d_lora_weight=False)
        assert first == Engine().hashes(plain)

    def test_settings_name_what_decides(self):
        """What the engine has not set, or has no word for, is told as such."""
        told = adapter_settings(object())
        assert told is not None
        assert "lora_dtype=None;target_modules=None" in told

    def test_engine_without_adapters_is_asked_for_its_hashes_alone(self, adapter):
        """R-05: no request of it can have one, so that nobody looks for any."""
        assert adapter_settings(None) is None
        engine = Engine(adapter_settings(None))
        assert not engine.adapters.are_there
        asked = request("r", adapter)
        assert asked.block_hashes is engine.adapters.hashes_of(asked)


class TestKnown:
    def test_adapter_that_was_written_after_the_start_is_passed_over(self, adapter):
        """R-05: the engine may have loaded what was there before; such a request has no
        hashes, is counted, and warned of once."""
        engine = Engine(started_ns=changed_ns(adapter) + MARGIN_NS)
        assert [] == engine.hashes(request("r", adapter))
        assert [] == engine.hashes(request("s", adapter))
        assert {"changed": 2} == engine.passed()
        (call,) = engine.log.calls
        assert ("warning", "adapter.passed") == (call.method_name, *call.args)
        assert "immutable_adapters" in call.kwargs["remedy"]

    def test_adapter_that_changes_while_the_engine_runs_is_passed_over(self, adapter):
        """R-05: nobody says when the engine reads it again, so that from then on neither
        content is sure."""
        engine = Engine(started_ns=changed_ns(adapter) + MARGIN_NS + 1)
        assert 3 == len(engine.hashes(request("r", adapter)))
        write_adapter(adapter, b"two")
        assert [] == engine.hashes(request("s", adapter))
        write_adapter(adapter, b"one")
        assert [] == engine.hashes(request("t", adapter))

    def test_number_of_two_adapters_is_passed_over(self, adapter, tmp_path):
        """R-05: the engine takes what it has loaded under a number for whatever else has
        it, so that neither content is sure any more; others are."""
        engine = Engine()
        other = write_adapter(tmp_path / "other", b"two")
        assert 3 == len(engine.hashes(request("r", adapter)))
        assert [] == engine.hashes(request("s", other))
        assert [] == engine.hashes(request("t", adapter))
        assert {"shared": 2} == engine.passed()
        assert "lora_int_id" in engine.log.calls[0].kwargs["remedy"]
        one = request("u", other)
        one.lora_request.lora_int_id = 2
        assert 3 == len(engine.hashes(one))

    def test_home_of_nobody_ends_no_thread(self, adapter):
        """R-05: a path that cannot be made out is one that cannot be read."""
        engine = Engine()
        one = request("r", "~nobody-of-this-name/adapter")
        one.lora_request.lora_int_id = 2
        assert [] == engine.hashes(one)
        assert {"unreadable": 1} == engine.passed()
        assert 3 == len(engine.hashes(request("s", adapter)))

    def test_path_that_leads_elsewhere_is_passed_over(self, adapter, tmp_path):
        """R-05: a link that was set after the start leads to files older than it."""
        link = tmp_path / "current"
        started_ns = changed_ns(adapter) + MARGIN_NS + 1
        while (
            not link.is_symlink() or link.lstat().st_ctime_ns < changed_ns(adapter) + 2
        ):
            link.unlink(missing_ok=True)
            link.symlink_to(adapter.name)
        assert 3 == len(Engine(started_ns=started_ns).hashes(request("r", adapter)))
        assert [] == Engine(started_ns=started_ns).hashes(request("r", link))
        assert 3 == len(Engine().hashes(request("r", link)))

    def test_promise_of_the_operator_is_taken_until_it_is_broken(self, adapter):
        """With immutable_adapters what was written after the start counts, and one path
        that changes nevertheless is passed over for good."""
        engine = Engine(started_ns=0, is_immutable=True)
        assert 3 == len(engine.hashes(request("r", adapter)))
        write_adapter(adapter, b"two")
        assert [] == engine.hashes(request("s", adapter))
        assert [] == engine.hashes(request("t", adapter))

    @pytest.mark.parametrize("spoil", ["gone", "no weights", "on the hub", "remote"])
    def test_adapter_that_cannot_be_read_is_passed_over(self, adapter, spoil):
        """R-05: of what is not here nothing is known; warned of once."""
        options = {"remote": {"tensorizer_config_dict": {"uri": "s3://a"}}}
        if spoil == "gone":
            shutil.rmtree(adapter)
        elif spoil == "no weights":
            (adapter / "adapter_model.safetensors").unlink()
        engine = Engine()
        path = "owner/adapter" if spoil == "on the hub" else adapter
        for name in "rs":
            one = request(name, path, **options.get(spoil, {}))
            assert [] == engine.hashes(one)
        assert ({"unreadable": 2}, 1) == (engine.passed(), len(engine.log.calls))

    def test_home_directory_is_found(self, adapter, monkeypatch):
        """The engine takes a path that begins with a tilde for one of its user's."""
        monkeypatch.setenv("HOME", str(adapter.parent))
        first = Engine().hashes(request("r", adapter))
        assert first == Engine().hashes(request("r", f"~/{adapter.name}"))


class TestWaiting:
    def test_look_up_is_put_off_for_a_short_time_only(self, adapter):
        """A file system that hangs holds up no request: it goes without, and so does what
        would be saved; the next one finds what was read meanwhile."""
        engine, one = Engine(), request("r", adapter)
        assert not engine.adapters.may_match(one)
        assert [] == list(engine.adapters.hashes_of(one))
        engine.threads.now = 0.049
        assert not engine.adapters.may_match(one)
        engine.threads.now = 0.05
        assert engine.adapters.may_match(one)
        engine.threads.work()
        assert engine.adapters.may_match(one)
        assert [] == list(engine.adapters.hashes_of(one))
        assert ({"late": 1}, []) == (engine.passed(), engine.log.calls)
        assert 3 == len(engine.hashes(request("s", adapter)))

    def test_looks_that_wait_are_bounded(self, adapter):
        """Beyond so many, requests go without at once."""
        engine = Engine()
        many = [request(f"r{number}", adapter) for number in range(65)]
        assert [False] * 64 + [True] == [engine.adapters.may_match(one) for one in many]
        assert {"crowded": 1} == engine.passed()
        engine.threads.work()
        assert 3 == len(engine.hashes(request("s", adapter)))

    def test_looks_for_which_there_was_no_thread_keep_no_others_out(self, adapter):
        """R-25: once as many waited as may, nobody asked for a thread again, for good."""
        engine = Engine()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.threads, "thread", no_thread)
            many = [request(f"r{number}", adapter) for number in range(64)]
            assert not any(engine.adapters.may_match(one) for one in many)
        assert engine.adapters.may_match(request("r64", adapter))
        engine.threads.work()
        assert 3 == len(engine.hashes(request("s", adapter)))

    def test_request_that_begins_anew_is_looked_at_anew(self, adapter):
        """R-05: one that was preempted comes back to what the engine reads then; while
        it runs, its hashes stay."""
        engine = Engine(started_ns=changed_ns(adapter) + MARGIN_NS + 1)
        one = request("r", adapter)
        first = engine.hashes(one)
        write_adapter(adapter, b"two")
        assert first == list(engine.adapters.hashes_of(one))
        assert [] == engine.hashes(one)

    def test_request_that_waits_long_is_looked_at_anew(self, adapter):
        """R-05: an answer is of the time when it was given; asked again at once, it is
        the same."""
        engine = Engine(started_ns=changed_ns(adapter) + MARGIN_NS + 1)
        one = request("r", adapter)
        assert not engine.adapters.may_match(one)
        engine.threads.work()
        assert [True, True] == [engine.adapters.may_match(one) for _ in range(2)]
        write_adapter(adapter, b"two")
        engine.threads.now = 1.5
        assert not engine.adapters.may_match(one)
        assert [] == engine.hashes(one)

    def test_finished_request_is_forgotten(self, adapter):
        """Nothing is kept of it."""
        engine = Engine()
        engine.hashes(request("r", adapter))
        engine.adapters.forget("r")
        engine.adapters.forget("unknown")
        engine.adapters.begun("unknown")
        assert (0, []) == (
            len(engine.adapters),
            list(engine.adapters.hashes_of(request("r", adapter))),
        )

    def test_thread_of_its_own_reads_and_ends(self, adapter):
        """With real threads: what it reads is told, and close ends it, twice as well."""
        adapters = Adapters(
            "",
            is_immutable=True,
            counters=Counters(),
            log=structlog.testing.CapturingLogger(),
            threads=SlowThreads(),
        )
        one = request("r", adapter)
        while not adapters.may_match(one):
            os.sched_yield()
        assert 3 == len(adapters.hashes_of(one))
        adapters.close()
        adapters.close()
        names = {thread.name for thread in threading.enumerate()}
        assert "ucm-adapters" not in names
        assert adapters.may_match(request("s", adapter))
        assert [] == list(adapters.hashes_of(request("s", adapter)))


class TestHashes:
    def test_hashes_follow_the_engines_own(self):
        """They grow with it, and where a session's end is replaced, so are they."""
        one = request("r", "a", blocks=3)
        salted = SaltedHashes(one, b"salt")
        first = list(salted)
        one.block_hashes = [*one.block_hashes, HASHES[3]]
        assert (first, 4) == (list(salted)[:3], len(salted))
        one.block_hashes[2:] = [HASHES[7]]
        assert first[:2] == salted[:2]
        assert salted[2] not in (first[2], HASHES[7])
        assert (3, salted[2]) == (len(salted), salted[-1])
        with pytest.raises(IndexError):
            salted[3]

    def test_hashes_are_as_long_as_the_engines(self):
        """Keys have the engine's length, and a salt keeps two contents apart."""
        one = request("r", "a")
        one.block_hashes = [bytes(8), bytes(64)]
        salted = [list(SaltedHashes(one, salt)) for salt in (b"a", b"b")]
        assert [[8, 64], [8, 64]] == [[len(each) for each in of] for of in salted]
        assert 4 == len({each for of in salted for each in of})


class TestLookups:
    @pytest.mark.parametrize(
        ("problem", "expected"), [("late", "late"), ("changed", "unkeyed")]
    )
    def test_adapter_that_is_not_known_says_why(
        self, tmp_path: Path, problem: str, expected: str
    ) -> None:
        """R-71: not known in time is another thing than not known at all; it wanted its whole
        blocks either way."""
        counters = Counters()
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            lookups = Lookups(
                engine.scheduler._setup.layout,
                engine.scheduler._adapter.misses,
                elsewhere=lambda key: None,
                problem_of=lambda request_id: problem if request_id == "r" else "",
                paying=engine.scheduler._paying,
                counters=counters,
            )
            known = {name: Known(request(name), NO_WISHES) for name in "rs"}
            for each in known.values():
                lookups.looked(each, PrefixMatch(0, MatchReason.TOO_SHORT), 0.0)
                lookups.decided(each)
            miss = known["r"].miss
            assert miss is not None
            assert f"its adapter: {problem}" == miss.detail["text"]
        missed = "ucm_missed_lookups_total"
        assert (
            32 == known["r"].wanted_tokens == counters.total("ucm_wanted_tokens_total")
        )
        assert 1 == counters.total(missed, reason=expected)
        assert 1 == counters.total(missed, reason="too_short")
