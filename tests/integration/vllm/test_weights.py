# SPDX-License-Identifier: Apache-2.0
"""A rank that answers doubts about its weights, and sees them being written."""

import threading

import pytest

from tests.clocks import no_threads
from tests.integration.vllm.weights_kit import (
    PackedModel,
    TinyModel,
    TinyRunner,
    parts_of,
)
from ucm.config import LogConfig
from ucm.integration.vllm import weights as module
from ucm.integration.vllm.weights import EngineParts, WeightsKeeper, calling_parts
from ucm.scheduler.messages import WeightsNews
from ucm.threads import SYSTEM
from ucm.tracing import open_log


def make(parts, calls=None):
    """Return a keeper, told of sleep and waking."""
    calls = [] if calls is None else calls
    return WeightsKeeper(
        parts,
        threads=SYSTEM,
        log=open_log(LogConfig(level="off"), "worker-0"),
        on_sleep=lambda: calls.append("sleeps"),
        on_wake=lambda: calls.append("woke"),
    )


def asked(keeper, epoch):
    """Return what a keeper answers to a plan's number."""
    keeper.begin_step(epoch)
    keeper.wait(60.0)
    return keeper.news()


class TestAnswers:
    def test_base_is_told_once(self):
        """R-08: the first report carries what the weights were at the start."""
        keeper = make(parts_of(TinyModel()))
        news = keeper.news()
        assert (0, False) == (news.epoch, news.is_written)
        assert news.base == news.digest != b""
        assert keeper.news() is None
        assert news == make(parts_of(TinyModel())).news()

    def test_number_is_answered_once(self):
        """R-08: a plan with a new number has the weights read; each further step of the
        same number costs nothing."""
        model = TinyModel()
        keeper = make(parts_of(model))
        base = keeper.news().base
        assert WeightsNews(epoch=1, digest=base, base=base) == asked(keeper, 1)
        assert asked(keeper, 1) is None
        model.fill(3.0)
        changed = asked(keeper, 2)
        assert (2, base) == (changed.epoch, changed.base)
        assert changed.digest not in (b"", base)

    def test_reading_that_gets_no_thread_begins_in_a_later_step(self):
        """A step in which the system starts no thread goes on, and one that gets it answers."""
        keeper = make(parts_of(TinyModel()))
        base = keeper.news().base
        with no_threads("ucm-weights"):
            assert asked(keeper, 1) is None
        assert WeightsNews(epoch=1, digest=base, base=base) == asked(keeper, 1)

    def test_engine_without_a_model_proves_nothing(self):
        """R-07: whoever cannot be read answers so, and at once."""
        keeper = make(EngineParts())
        assert (b"", b"") == (keeper.news().base, asked(keeper, 1).digest)

    def test_packed_weights_are_told_apart_by_packing(self):
        """R-07, R-08: out of reach, weights are the same until they were packed anew;
        then they are nobody's."""
        model = PackedModel()
        keeper = make(parts_of(model))
        base = keeper.news().base
        assert base == asked(keeper, 1).digest
        model.load_weights(1.0)
        first = asked(keeper, 2).digest
        assert first == asked(keeper, 3).digest
        assert first not in (b"", base)
        model.load_weights(1.0)
        assert first != asked(keeper, 4).digest


class TestWriting:
    @pytest.mark.parametrize(
        "write",
        [
            pytest.param(lambda p: p.models[0].load_weights(2.0), id="model"),
            pytest.param(lambda p: p.owners[0].reload_weights(2.0), id="runner"),
            pytest.param(lambda p: p.owners[1].reload_weights(2.0), id="worker"),
        ],
    )
    def test_whoever_writes_is_seen(self, write):
        """R-10: a rank knows that its weights were written before anybody else, says
        so once, and until a plan knows."""
        parts = parts_of(TinyModel())
        keeper = make(parts)
        base = keeper.news().base
        write(parts)
        assert keeper.is_written
        assert WeightsNews(epoch=0, is_written=True, base=base) == keeper.news()
        keeper.begin_step(0)
        assert (True, None) == (keeper.is_written, keeper.news())
        told = asked(keeper, 1)
        assert (False, False) == (keeper.is_written, told.is_written)
        assert told.digest not in (b"", base)

    def test_writer_that_raises_is_seen_and_raises(self):
        """R-10: half a load is a change as well."""
        parts = parts_of(TinyModel())
        parts.models[0].load_weights = None
        keeper = make(parts)
        with pytest.raises(TypeError):
            parts.owners[0].reload_weights(2.0)
        assert keeper.is_written

    def test_weights_of_a_step_in_between_are_not_forgotten(self):
        """R-07: weights that were written twice, with a step between, have computed
        blocks that no digest names: the next answer says so, once."""
        model = TinyModel()
        keeper = make(parts_of(model))
        base = keeper.news().base
        model.load_weights(2.0)
        keeper.begin_step(0)
        model.load_weights(1.0)
        told = [asked(keeper, epoch) for epoch in (1, 2)]
        assert [base, base] == [news.digest for news in told]
        assert [True, False] == [news.is_torn for news in told]

    def test_close_leaves_the_engine_as_it_was(self):
        """What is watched is the engine's own again."""
        model = TinyModel()
        parts = parts_of(model)
        keeper = make(parts)
        for _ in range(2):
            keeper.close(1)
        assert "loaded" == model.load_weights(2.0)
        assert not keeper.is_written
        assert all("load_weights" not in vars(each) for each in parts.models)
        assert all("sleep" not in vars(each) for each in parts.owners)

    @pytest.mark.parametrize("first", [0, 1])
    def test_two_connectors_of_an_engine_both_watch(self, first):
        """R-08, R-10: side by side in one engine each sees weights being written and
        memory going away; one that has closed leaves the other one watching."""
        calls = [[], []]
        parts = parts_of(TinyModel())
        keepers = [make(parts, each) for each in calls]
        parts.owners[1].reload_weights(2.0)
        parts.owners[1].sleep()
        assert [True, True] == [keeper.is_written for keeper in keepers]
        assert [["sleeps"], ["sleeps"]] == calls
        keepers[first].close(1)
        parts.owners[1].sleep()
        assert [1, 2] == sorted(map(len, calls))
        assert 2 == len(calls[1 - first])
        keepers[1 - first].close(1)
        parts.owners[1].sleep()
        assert [1, 2] == sorted(map(len, calls))

    def test_sleep_and_waking_are_told_in_time(self):
        """R-08: memory goes away behind our back only after we have heard of it, and is
        ours again once it is back."""
        calls = []
        parts = parts_of(TinyModel())
        make(parts, calls)
        worker = parts.owners[1]
        worker.asleep = calls
        worker.sleep(level=2)
        worker.wake_up()
        assert ["sleeps", "sleep 2", "wake up", "woke"] == calls


class TestReading:
    def test_reading_ends_before_memory_goes_away(self, monkeypatch):
        """R-08: a reading under way is given up and waited for; the next step begins it
        again, and what was given up is no answer."""
        began, goes_on = threading.Event(), threading.Event()
        real = module.read_weights

        def held(models, is_given_up):
            began.set()
            assert goes_on.wait(60.0)
            return real(models, is_given_up)

        keeper = make(parts_of(TinyModel()))
        base = keeper.news().base
        monkeypatch.setattr(module, "read_weights", held)
        keeper.begin_step(1)
        assert began.wait(60.0)
        assert not keeper.pause(0)
        keeper.begin_step(1)
        assert not keeper.pause(0)
        goes_on.set()
        assert keeper.news() is None
        assert base == asked(keeper, 1).digest
        assert keeper.pause(0)

    def test_write_makes_a_reading_worthless(self, monkeypatch):
        """R-07: what was read while somebody wrote is no answer."""
        goes_on = threading.Event()
        real = module.read_weights

        def held(models, is_given_up):
            assert goes_on.wait(60.0)
            return real(models, lambda: False)

        model = TinyModel()
        keeper = make(parts_of(model))
        monkeypatch.setattr(module, "read_weights", held)
        keeper.begin_step(1)
        job = keeper._job
        model.load_weights(1.0)
        goes_on.set()
        assert job.over.wait(60.0)
        news = keeper.news()
        assert (True, None) == (news.is_written, news.digest)


class Calls:
    """Calls a hook from within, as a runner does."""

    def __init__(self, model, drafter=None):
        self.model = model
        self.drafter = drafter

    def get_model(self):
        """Return the model."""
        return self.model

    def register(self):
        """Call the hook."""
        return calling_parts()


class Worker(Calls):
    """Calls the runner."""

    def start(self, runner):
        """Have the hook called."""
        return runner.register()


class TestFinding:
    def test_runner_and_worker_are_found_by_who_calls(self):
        """R-07: the models of target and drafter, the runner and the worker are those
        from which the hook was called."""
        model, draft = TinyModel(), TinyModel()
        runner = Calls(model, TinyRunner(draft))
        worker = Worker(model)
        parts = worker.start(runner)
        assert (runner, worker) == parts.owners
        assert [model, draft] == list(parts.models)

    def test_nobody_is_found_where_no_engine_calls(self):
        """R-07: without an engine there is nothing to read, and that is no error."""
        parts = calling_parts()
        assert ((), ()) == (parts.models, parts.owners)
