# SPDX-License-Identifier: Apache-2.0
"""Requests with LoRA adapters through both halves of the connector."""

import contextlib
import os
from types import SimpleNamespace

import attrs
import pytest

from tests.integration.vllm.adapter_kit import SlowThreads, request, write_adapter
from tests.integration.vllm.host_kit import world
from tests.integration.vllm.test_halves import Engine, make_setup
from ucm.integration.vllm.scheduler import SchedulerHalf

BLOCKS = (1, 2, 3)


class LoraEngine(Engine):
    """An engine whose look-ups are put off as long as it takes."""

    def __init__(self, setup):
        super().__init__(setup)
        self.scheduler.close()
        setup = attrs.evolve(setup, threads=SlowThreads(), adapters="")
        self.scheduler = SchedulerHalf(setup)
        self.register()

    def match(self, one):
        """Ask until the connector can tell."""
        while (answer := self.scheduler.match(one, 0))[0] is None:
            assert answer == (None, False)
            os.sched_yield()
        return answer

    def compute(self, one):
        """Compute a request that hits nothing, and save it; return what was held."""
        assert (0, False) == self.match(one)
        self.scheduler.allocated(one, [list(BLOCKS)], 0)
        plan = self.plan([one], BLOCKS)
        held = self.scheduler.counts()["held_blocks"]
        self.work(plan)
        self.scheduler.finished(one.request_id)
        return held

    def close(self):
        """End both halves, with nothing left behind."""
        assert self.idle()
        self.scheduler.close()
        self.worker.close()


@contextlib.contextmanager
def an_engine(tmp_path, **config):
    """Run an engine over the one slab; another one is as if it were restarted."""
    config = {"immutable_adapters": True, "log": {"level": "off"}} | config
    engine = LoraEngine(make_setup(tmp_path, **config))
    with contextlib.closing(engine):
        yield engine


@pytest.fixture
def adapter(tmp_path):
    """Return an adapter's directory."""
    return write_adapter(tmp_path / "adapter", b"one")


class TestReuse:
    def test_adapter_hits_its_own_content_only(self, tmp_path, adapter):
        """R-05: what was saved for an adapter is a hit after a restart, and neither for
        the model alone nor for the adapter that was trained further at its path, though
        the engine's hashes are the same."""
        with an_engine(tmp_path) as engine:
            assert 3 == engine.compute(request("r", adapter))
            assert 3 == engine.compute(request("s"))
        write_adapter(adapter, b"two")
        with an_engine(tmp_path) as engine:
            assert 3 == engine.compute(request("t", adapter))
        write_adapter(adapter, b"one")
        with an_engine(tmp_path) as engine:
            one = request("u", adapter)
            tokens, parks = engine.match(one)
            assert (48, True) == (tokens, parks)
            engine.scheduler.allocated(one, [[5, 6, 7]], tokens)
            assert (set(), {"u"}, set()) == engine.work(engine.plan())
            engine.scheduler.finished("u")

    def test_request_of_an_unknown_adapter_neither_loads_nor_saves(
        self, tmp_path, adapter
    ):
        """R-05: without its content known there is no key to find or to save under."""
        with an_engine(tmp_path) as engine:
            engine.compute(request("r", adapter))
        with an_engine(tmp_path, immutable_adapters=False) as engine:
            write_adapter(adapter, b"one")
            assert 0 == engine.compute(request("s", adapter))
            assert 3 == engine.compute(request("t"))

    def test_engine_that_only_saves_knows_the_adapter_as_well(self, tmp_path, adapter):
        """R-05: a producer looks nothing up, and saves under what the adapter holds; a
        consumer loads by the same hashes."""
        setup = make_setup(tmp_path, immutable_adapters=True, log={"level": "off"})
        mode = attrs.evolve(setup.mode, loads=type(setup.mode.loads).NOTHING)
        engine = LoraEngine(attrs.evolve(setup, mode=mode))
        with contextlib.closing(engine):
            assert 3 == engine.compute(request("r", adapter))
        with an_engine(tmp_path) as engine:
            one = request("s", adapter)
            assert (48, True) == engine.match(one)
            engine.scheduler.allocated(one, [[5, 6, 7]], 48)
            assert (set(), {"s"}, set()) == engine.work(engine.plan())
            engine.scheduler.finished("s")


class _WithAdapter:
    """A request of the fake host, with an adapter."""

    def __init__(self, one, path):
        self._one = one
        self.lora_request = SimpleNamespace(lora_int_id=1, lora_path=str(path))

    def __getattr__(self, name):
        return getattr(self._one, name)


class _Adapted:
    """A connector whose every other request has an adapter."""

    def __init__(self, connector, path):
        self._connector = connector
        self._path = path

    def __getattr__(self, name):
        return getattr(self._connector, name)

    def _with(self, one):
        is_even = sum(one.request_id.encode()) % 2 == 0
        return _WithAdapter(one, self._path) if is_even else one

    def get_num_new_matched_tokens(self, one, computed):
        return self._connector.get_num_new_matched_tokens(self._with(one), computed)

    def update_state_after_alloc(self, one, blocks, tokens):
        self._connector.update_state_after_alloc(self._with(one), blocks, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_host_whose_requests_have_adapters_breaks_no_rule(
    seed, tmp_path, adapter, monkeypatch
):
    """R-05: look-ups that are put off, preemptions, aborts and hits of requests with and
    without an adapter leave nothing behind, and load what was saved."""
    monkeypatch.setattr("ucm.integration.vllm.adapters._MARGIN_NS", -(10**18))
    with world(
        seed,
        num_ranks=1,
        is_whole=True,
        wrap=lambda connector: _Adapted(connector, adapter),
    ) as running:
        running.run(400)
        seen = running.host.seen
        assert seen["load"]
        assert seen["finished"]
