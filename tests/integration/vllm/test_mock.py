# SPDX-License-Identifier: Apache-2.0
"""Made-up hits: how many, told once, loudly, and without a byte that moves."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.integration.vllm.kit import cache_config, engine_config, full, plain_cache
from ucm.errors import ConfigError, MessageError
from ucm.integration.vllm import mock as door_mock
from ucm.integration.vllm import setup as door_setup
from ucm.integration.vllm.messages import PlanEnvelope, plan_in
from ucm.integration.vllm.mock import MockSchedulerHalf, MockWorkerHalf
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.integration.vllm.worker import WorkerHalf
from ucm.stores import opening
from ucm.tracing import SETTING_UNSAFE

PAIRS = {
    f"{real.__name__}.{name}": (getattr(real, name), getattr(mock, name, None))
    for real, mock in (
        (SchedulerHalf, MockSchedulerHalf),
        (WorkerHalf, MockWorkerHalf),
    )
    for name in vars(real)
    if not name.startswith("_") or name == "__init__"
}


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    """Fail whoever opens a store or a device."""

    def fail(*_):
        pytest.fail("a store or a device was looked for")

    monkeypatch.setattr(door_setup, "load_class", fail)
    monkeypatch.setattr(opening, "load_class", fail)


@pytest.fixture
def setup(tmp_path):
    """Return a function that derives a mock's setup."""

    def make(hit_ratio=0.5, cache=None, role="kv_both"):
        extra = {"weights_revision": "r1", "log": {"level": "off"}}
        config = engine_config(str(tmp_path), hit_ratio=hit_ratio, **extra)
        config.kv_transfer_config.kv_role = role
        return Setup.of(config, cache or plain_cache())

    return make


def request(name="a", prompt=100, tokens=None):
    """Return as much of a request as is looked at; it may have output tokens too."""
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_tokens=tokens or prompt
    )


def transfer(connector, **extra):
    """Return as much of an engine's configuration as names its own connector."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector, kv_connector_extra_config=extra
        )
    )


class TestShape:
    @pytest.mark.parametrize("name", PAIRS)
    def test_mock_has_what_the_real_half_has(self, name):
        """The connector calls the halves alike, so each member of the real one is
        there with the same signature."""
        real, mock = PAIRS[name]
        assert mock is not None
        assert inspect.signature(real) == inspect.signature(mock)

    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_connector_takes_the_mock(self, tmp_path, role):
        """S4-33: with `hit_ratio` both roles are mocks, and neither looks for a store
        or a device."""
        extra = {"weights_revision": "r1", "hit_ratio": 0.5}
        config = engine_config(str(tmp_path), **extra)
        config.parallel_config.rank = 0
        connector = UCMConnector(config, role, plain_cache())
        half = connector._scheduler or connector._worker
        assert isinstance(half, MockSchedulerHalf | MockWorkerHalf)
        assert not connector.has_pending_push_work()
        connector.shutdown()


class TestClaims:
    @pytest.mark.parametrize(
        ("ratio", "prompt", "computed", "claimed"),
        [
            (0.5, 100, 0, 48),
            (0.5, 100, 32, 16),
            (0.5, 100, 64, 0),
            (0.29, 1600, 0, 464),  # 0.29 * 1600 is less than 464 in binary
            (0.0, 100, 0, 0),
            (1.0, 100, 0, 96),
            (1.0, 96, 0, 80),
            (1.0, 16, 0, 0),
            (1.0, 1, 0, 0),
        ],
    )
    def test_share_is_claimed_in_whole_blocks(
        self, setup, ratio, prompt, computed, claimed
    ):
        """S4-33: the share of the prompt, rounded down to blocks, less what is there,
        and never the last token."""
        half = MockSchedulerHalf(setup(ratio))
        assert (claimed, claimed > 0) == half.match(request(prompt=prompt), computed)

    @given(
        ratio=st.just(1.0) | st.floats(0, 1),
        prompt=st.integers(1, 5000) | st.integers(1, 300).map(lambda n: 16 * n),
        blocks=st.integers(0, 300),
    )
    def test_claim_is_one_that_an_engine_can_take(self, ratio, prompt, blocks):
        """H-08: whatever the ratio, a claim ends on a block boundary, within the ratio,
        and leaves a token to compute; asked twice it is the same."""
        half = MockSchedulerHalf.__new__(MockSchedulerHalf)
        half._ratio, half._alignment = ratio, 16
        computed = min(16 * blocks, prompt // 16 * 16)
        claimed, is_async = half.match(request(prompt=prompt), computed)
        assert claimed >= 0 == claimed % 16
        assert (claimed > 0) is is_async
        if claimed:
            assert computed + claimed <= min(prompt - 1, ratio * prompt + 1e-6)
        assert (claimed, is_async) == half.match(request(prompt=prompt), computed)

    def test_preempted_request_claims_of_its_prompt_only(self, setup):
        """What a request has put out is never part of a claim."""
        half = MockSchedulerHalf(setup(1.0))
        assert 96 == half.match(request(prompt=100, tokens=400), 0)[0]

    def test_claim_suits_every_group(self, setup):
        """With blocks of two sizes a claim ends where both end."""
        cache = cache_config((["a"], full(16)), (["b"], full(48)))
        half = MockSchedulerHalf(setup(1.0, cache))
        assert 96 == half.match(request(prompt=140), 0)[0]

    def test_producer_claims_nothing(self, setup):
        """An engine that never loads is not made to."""
        half = MockSchedulerHalf(setup(1.0, role="kv_producer"))
        assert (0, False) == half.match(request(), 0)


class TestLoads:
    def test_load_is_over_in_its_own_step_and_told_once(self, setup):
        """H-01: what the engine has decided to load is reported by each rank, once,
        however often its step is carried out."""
        made = setup()
        scheduler, ranks = (
            MockSchedulerHalf(made),
            [MockWorkerHalf(made, rank, "cpu") for rank in range(2)],
        )
        scheduler.allocated(request("a"), [[1, 2, 3]], 48)
        scheduler.allocated(request("b"), [[4]], 0)
        plan = scheduler.plan(None)
        assert {"claimed": 0} == scheduler.counts()
        for rank in ranks:
            rank.fence(plan)
            rank.bind(plan)
            for _ in range(2):
                rank.start_loads()
                rank.submit_saves()
            rank.clear()
            rank.start_loads()
            assert (set(), {"a"}, set()) == rank.finished()
            assert (set(), set(), set()) == rank.finished()
            assert rank.report() is None
            assert {"received": 0} == rank.counts()
        again = scheduler.plan(None)
        assert plan_in(plan).step + 1 == plan_in(again).step
        assert plan_in(again).is_empty

    def test_claimed_tokens_are_counted(self, setup):
        """The share shows in the same counter as a real hit."""
        half = MockSchedulerHalf(setup())
        half.allocated(request(), [[1]], 48)
        assert 48 == half.stats().data["counters"]["ucm_matched_tokens_total"]

    def test_nothing_is_held_or_saved(self, setup):
        """A finished request's blocks are free at once, and no plan has a save."""
        half = MockSchedulerHalf(setup())
        half.allocated(request(), [[1]], 48)
        plan = plan_in(half.plan(None))
        assert ((), ()) == (plan.saves, plan.fences)
        assert not half.finished("a")
        assert half.reset_cache()

    def test_plan_of_another_connector_is_refused(self, setup):
        """A worker does not guess what it cannot read."""
        with pytest.raises(MessageError, match="version"):
            MockWorkerHalf(setup(), 0, "cpu").bind(PlanEnvelope(b"\xff"))


class TestWarning:
    def test_start_says_that_output_is_garbage(self, tmp_path, caplog, monkeypatch):
        """S4-33: each start warns in our log by the key, and in the engine's own,
        whatever the level of ours."""
        extra = {"weights_revision": "r1", "hit_ratio": 0.25}
        made = Setup.of(engine_config(str(tmp_path), **extra), plain_cache())
        engine_log = logging.getLogger("vllm.ucm")
        engine_log.addHandler(caplog.handler)
        monkeypatch.setattr(engine_log, "propagate", False)
        structlog.configure()
        try:
            with structlog.testing.capture_logs() as events:
                MockSchedulerHalf(made)
        finally:
            structlog.reset_defaults()
            engine_log.removeHandler(caplog.handler)
        assert [(SETTING_UNSAFE, "hit_ratio", 0.25)] == [
            (event["event"], event["key"], event["value"]) for event in events
        ]
        assert ["WARNING"] == [record.levelname for record in caplog.records]
        assert "OUTPUT IS GARBAGE" in caplog.text


class TestAlone:
    @pytest.mark.parametrize(
        ("engine", "is_refused"),
        [
            (None, False),
            (SimpleNamespace(kv_transfer_config=None), False),
            (transfer("UCMConnector", hit_ratio=0.5), False),
            (transfer("UCMConnector"), False),
            (transfer("Derived", hit_ratio=0.5), False),
            (transfer("MultiConnector", connectors=[{}, {}]), True),
        ],
        ids=["unknown", "none", "own", "elsewhere", "derived", "several"],
    )
    def test_mock_is_the_engines_only_connector(
        self, setup, monkeypatch, engine, is_refused
    ):
        """S4-33: a worker whose engine has other connectors is refused by the key, as
        these would store what was never computed; nobody else is, also where a file or a
        variable says ``hit_ratio``."""
        made = setup()
        monkeypatch.setattr(
            door_mock, "get_current_vllm_config_or_none", lambda: engine
        )
        if not is_refused:
            assert {"received": 0} == MockWorkerHalf(made, 0, "cpu").counts()
            return
        with pytest.raises(ConfigError, match="MultiConnector") as caught:
            MockWorkerHalf(made, 0, "cpu")
        assert ("hit_ratio", 0.5) == (caught.value.key, caught.value.value)
