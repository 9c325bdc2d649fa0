# SPDX-License-Identifier: Apache-2.0
"""What a request that waits for its blocks costs the engine, over both halves."""

import contextlib
from types import SimpleNamespace

import pytest

from tests.integration.vllm.agent_kit import FakeClient
from tests.integration.vllm.kit import engine_config, plain_cache
from tests.integration.vllm.test_halves import request, traced_engine
from ucm.integration.vllm.messages import RankHandshake
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup


class Counting:
    """An index that counts what it is asked."""

    def __init__(self, index) -> None:
        self._index = index
        self.num_asked = 0

    def __getattr__(self, name):
        """Count, and pass on."""
        self.num_asked += 1
        return getattr(self._index, name)


class TestEngine:
    @pytest.mark.slow
    def test_pending_answer_costs_no_look_up(self, tmp_path) -> None:
        """R-54, R-18: while a want is pending the engine is told that nothing is known yet,
        in every step, and neither the index nor the agent is asked; then the slab says what
        there is, and when the request ends nothing is left of it."""
        with traced_engine(tmp_path) as engine:
            scheduler, client = engine.scheduler, FakeClient()
            engine.save()
            group, third = (
                scheduler._setup.layout.groups[0],
                request("r").block_hashes[2:],
            )
            scheduler._store.forget(scheduler._adapter.matcher.keys_of(group, third))
            scheduler._tiers._client = client
            scheduler._tiers.are_there = True
            matcher = scheduler._adapter.matcher
            matcher._index = index = Counting(matcher._index)
            one = request("s")
            assert (None, False) == scheduler.match(one, 0)
            assert 3 == client.wanted[0][1]
            asked = index.num_asked
            assert {(None, False)} == {scheduler.match(one, 0) for _ in range(1000)}
            assert (asked, 1) == (index.num_asked, len(client.wanted))
            client.say("s", 2, "absent")
            assert (32, True) == scheduler.match(one, 0)
            assert (32, True) == scheduler.match(one, 0)
            scheduler.finished("s")
            assert ["s"] == client.dropped
            assert engine.idle()

    @pytest.mark.slow
    def test_request_that_arrives_is_fetched_for(self, tmp_path) -> None:
        """R-54, R-53: an arriving request has asked before the engine looks it up; one that
        is aborted before its turn leaves nothing."""
        with traced_engine(tmp_path) as engine:
            scheduler, client = engine.scheduler, FakeClient()
            scheduler.arrived(request("r"))
            scheduler._tiers._client = client
            scheduler._tiers.are_there = True
            for name in ("s", "t"):
                scheduler.arrived(request(name))
            assert [("s", 3), ("t", 3)] == [each[:2] for each in client.wanted]
            assert (None, False) == scheduler.match(request("s"), 0)
            client.say("s", 0, "absent")
            assert (0, False) == scheduler.match(request("s"), 0)
            for name in ("r", "s", "t"):
                scheduler.finished(name, is_aborted=True)
            assert ["s", "t"] == client.dropped
            assert engine.idle()

    @pytest.mark.slow
    def test_what_the_engine_has_itself_holds_nobody(self, tmp_path) -> None:
        """R-54: a request whose prefix is in the engine's cache begins at once, though the
        tiers that it asked when it arrived have not answered."""
        with traced_engine(tmp_path) as engine:
            scheduler, client = engine.scheduler, FakeClient()
            scheduler._tiers._client = client
            scheduler._tiers.are_there = True
            one = request("s")
            scheduler.arrived(one)
            assert (None, False) == scheduler.match(one, 0)
            assert (0, False) == scheduler.match(one, 48)
            assert ["s"] == client.dropped
            scheduler.finished("s")
            assert engine.idle()


@pytest.mark.parametrize(("policy", "expected"), [("priority", -3), ("fcfs", 0)])
def test_engine_s_policy_decides_whose_fetch_is_first(
    tmp_path, policy, expected
) -> None:
    """R-58: the agent hears a request's priority from an engine that runs requests by it,
    and from no other."""
    store = {"path": str(tmp_path / "slab"), "capacity": "1MiB"}
    config = engine_config(str(tmp_path), weights_revision="r", store=store)
    config.scheduler_config = SimpleNamespace(policy=policy)
    setup, client = Setup.of(config, plain_cache()), FakeClient()
    one = request("s")
    one.priority = -3
    with contextlib.closing(SchedulerHalf(setup)) as scheduler:
        scheduler.agree([RankHandshake.of(setup.facts(0))])
        scheduler._tiers._client = client
        scheduler._tiers.are_there = True
        assert (None, False) == scheduler.match(one, 0)
        assert [expected] == [terms["priority"] for terms in client.terms]
        scheduler.finished("s")
