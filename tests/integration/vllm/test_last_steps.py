# SPDX-License-Identifier: Apache-2.0
"""The steps behind the last answer, under the fake host, where it takes none by itself."""

from multiprocessing import current_process

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.integration.vllm.host_kit import World, world
from tests.testing.host_kit import HYBRID
from ucm.integration.vllm import last_steps
from ucm.testing.host import HostSettings, Odds
from ucm.testing.host.requests import KVOutput

pytestmark = pytest.mark.slow

RARELY = Odds(arrive=0.15, abort=0.0, preempt=0.02, hold_back=0.0)
"""Often nobody runs. What is aborted ends in no step, and what is held back came before."""


class Told:
    """A worker whose answers the host hears of, though it is not the host that asks."""

    def __init__(self, it: World) -> None:
        self._it = it
        (self._door,) = it.doors
        self.num_steps = self.num_early = 0
        """Of those that are not the host's, and of these while somebody was there."""

    def __getattr__(self, name: str):
        return getattr(self._door, name)

    def get_transfer_results(self, finished: set[str]):
        """Forward, and tell the host."""
        requests = self._it.host.scheduler.requests.values()
        self.num_steps += 1
        self.num_early += not all(request.is_finished() for request in requests)
        told = self._door.get_transfer_results(finished)
        output = KVOutput(
            finished_sending=told.finished_sending,
            finished_recving=told.finished_recving,
        )
        registrations = self._it.host.scheduler.registrations
        registrations.check(0, output, is_single_group=False)
        return told


def kept_behind_all(it: World, acts: int) -> int:
    """Let the host act; return how often blocks were kept though nobody was there."""
    kept = 0
    for _ in range(acts):
        it.host.act()
        counts = it.scheduler.counts()
        kept += not counts["requests"] and counts["deferred"] > 0
    it.run(0)
    return kept


class TestLastSteps:
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_where_nobody_else_takes_them_nothing_is_kept_when_nobody_runs(
        self, monkeypatch: pytest.MonkeyPatch, in_flight: int
    ) -> None:
        """R-08: in the host's own process what ended is saved and freed with the last answer,
        also with a step more on its way, and what is found of it is right."""
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        monkeypatch.setattr(last_steps, "_LONGEST_S", 60.0)
        settings = HostSettings(odds=RARELY, in_flight=in_flight)
        with world(7, HYBRID, num_ranks=1, settings=settings, is_whole=True) as it:
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", Told(it))
            kept = kept_behind_all(it, 1500)
            assert 100 < it.host.seen["finished"]
            assert 20 < it.host.seen["deferred"]
        assert 0 == kept or in_flight > 1  # amid a step they are that step's

    def test_while_somebody_waits_they_are_steps_of_the_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-08: an answer behind which others are to run is not the last one, and they do not wait for
        copies that go on beside them."""
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        odds = Odds(arrive=0.15, abort=0.0, preempt=0.02, hold_back=0.0, admit=0.5)
        settings = HostSettings(odds=odds)
        with world(7, HYBRID, num_ranks=1, settings=settings, is_whole=True) as it:
            told = Told(it)
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", told)
            kept_behind_all(it, 1500)
            assert 0 < told.num_steps
            assert 0 == told.num_early

    @pytest.mark.parametrize(
        "change", ["own process", "process of a server", "two ranks", "another engine"]
    )
    def test_where_others_take_them_the_last_answer_waits_for_nothing(
        self, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        """R-16: an engine with a process of its own, with several ranks, or that is not the
        one of this process, takes these steps itself."""
        alone = change != "own process"
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(not alone)))
        if change == "process of a server":  # which has inherited the setting
            monkeypatch.setattr(current_process(), "name", "EngineCore_DP0")
        settings, ranks = HostSettings(odds=RARELY), 1 + (change == "two ranks")
        with world(7, HYBRID, num_ranks=ranks, settings=settings, is_whole=True) as it:
            worker = it.doors[0]
            if change == "another engine":
                worker.engine_id = "another"
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
            assert 0 < kept_behind_all(it, 600)
