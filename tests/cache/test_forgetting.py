# SPDX-License-Identifier: Apache-2.0
"""What a host wants forgotten, as its agent hears it and answers."""

import threading

import pytest

from tests.cache.fetching import GONE, SILENT, beside_agent, blocking, served
from tests.cache.kit import LIMIT_S, Host, both_loops, keys_of, leaving_nothing, run
from ucm.agent.protocol import Done, Drop, Forget
from ucm.cache import forgetting
from ucm.cache.forgetting import Forgotten
from ucm.errors import KeyFormatError, PipelineClosedError, StoreUnavailableError
from ucm.fates import Fate
from ucm.reasons import Reason
from ucm.stores.wrap import WrapperStore

pytestmark = pytest.mark.anyio

KEYS = keys_of(6)


def gone(told: Forget) -> Done:
    """Say that tiers had two blocks of each question, and have none any more."""
    return Done(told.number, 2, Reason.NONE)


def kept(told: Forget) -> Done:
    """Say that a tier may have some yet."""
    return Done(told.number, 1, Reason.KEPT, b"\1")


@both_loops
def test_agent_is_told_once_the_slab_has_it_no_more(loop: str, tmp_path) -> None:
    """R-41, R-53: on any loop, with the time for which somebody waits; who waits hears what tiers
    had, and nothing is left of the question."""
    host = Host()

    def say(told: Forget) -> Done:
        in_slab.append(any(host.store.contains(told.keys)))
        return gone(told)

    async def main() -> None:
        async with host.cache() as cache:
            await cache.save(KEYS, range(6)).committed
            assert Forgotten(4, 2) == await cache.forget(KEYS[:4])
            told = agent.hear()
            assert KEYS[:4] == [key[-len(KEYS[0]) :] for key in told.keys]
            assert 0.85 * host.core.timeout.load < told.deadline_s
            assert told.deadline_s <= 0.9 * host.core.timeout.load
            assert Drop(told.number) == agent.hear()

    in_slab: list[bool] = []
    with beside_agent(host, tmp_path, say) as agent, leaving_nothing(host):
        run(loop, main)
    assert [False] == in_slab


def test_tier_that_may_have_kept_some_is_named(tmp_path) -> None:
    """R-52, R-63: who has to be sure asks again."""
    host = Host()
    with served(host, tmp_path, kept) as (_, cache):
        assert Forgotten(0, 1, ("memory",)) == cache.forget(KEYS)


def test_more_keys_than_a_message_takes_are_one_question(tmp_path, monkeypatch) -> None:
    """R-41: over with the last answer, which says all; each tier is named once."""
    monkeypatch.setattr(forgetting, "MOST_KEYS", 2)
    host = Host()
    with served(host, tmp_path, kept) as (agent, cache):
        cache.save(KEYS, range(6)).wait_committed()
        assert Forgotten(6, 3, ("memory",)) == cache.forget(KEYS)
        told = [agent.hear() for _ in range(3)]
        assert [2, 2, 2] == [len(each.keys) for each in told]


@both_loops
async def test_without_an_agent_all_tiers_may_have_kept_it(tmp_path) -> None:
    """R-63: one that dies amid it, and one that is not there, cost no deadline, and are counted by
    the names of tiers; the slab has forgotten all the same."""
    host = Host()
    with beside_agent(host, tmp_path, lambda _: GONE) as agent:
        async with host.cache() as cache:
            await cache.save(KEYS, range(6)).committed
            assert Forgotten(3, 0, ("memory",)) == await cache.forget(KEYS[:3])
            agent.close()
            assert Forgotten(3, 0, ("memory",)) == await cache.forget(KEYS[3:])
            name = "ucm_unforgotten_parts_total"
            assert 6 == host.core._counters.total(name, tier="memory")
        host.check_left()


def test_agent_without_room_has_kept_all(tmp_path) -> None:
    """R-63: who is refused hears that nobody has asked a tier."""
    host = Host()

    def refuse(told: Forget) -> Done:
        return Done(told.number, 0, Reason.QUEUE_TICKETS)

    with served(host, tmp_path, refuse) as (_, cache):
        assert Forgotten(0, 0, ("memory",)) == cache.forget(KEYS)


@both_loops
async def test_agent_that_says_nothing_costs_the_deadline(tmp_path) -> None:
    """R-63: who waits hears that nobody has answered, and waits for it no more."""
    host = Host(config={"timeout": {"load": 0.5}})
    silent = beside_agent(host, tmp_path, lambda _: SILENT)
    with silent as agent:
        async with host.cache() as cache:
            await cache.save(KEYS, range(6)).committed
            with pytest.raises(StoreUnavailableError, match="did not answer in time"):
                await cache.forget(KEYS)
            assert {0} == set(host.core.fetches._client.counts().values())
            assert not any(await cache.contains(KEYS))
            told = agent.hear()
            assert (6, Drop(told.number)) == (len(told.keys), agent.hear())
        host.check_left()


def test_without_tiers_nobody_is_asked() -> None:
    """R-41: nor for no keys; and mistakes are found before anything is done."""
    host = Host()
    with leaving_nothing(host), blocking(host) as cache:
        cache.save(KEYS, range(6)).wait_committed()
        assert Forgotten(6) == cache.forget(KEYS)
        assert Forgotten(0) == cache.forget([])
        with pytest.raises(KeyFormatError):
            cache.forget(["text"])
    with pytest.raises(PipelineClosedError):
        cache.forget(KEYS)


def test_no_keys_are_no_question(tmp_path) -> None:
    """R-41: they are forgotten at once, and the agent hears nothing."""
    host = Host()
    with served(host, tmp_path, gone) as (agent, cache):
        assert Forgotten(0) == cache.forget([])
        assert agent.heard.empty()


class Refusing(WrapperStore):
    """A store that forgets nothing."""

    def forget(self, keys, fate=Fate.FORGOTTEN) -> int:
        """Refuse."""
        raise StoreUnavailableError("gone")


def test_store_in_trouble_is_told_and_no_tier_is_asked(tmp_path) -> None:
    """R-63: what the slab still has would go to its tiers again."""
    host = Host()
    host.store = Refusing(host.store)
    with served(host, tmp_path, gone) as (agent, cache):
        with pytest.raises(StoreUnavailableError, match="gone"):
            cache.forget(KEYS)
        assert agent.heard.empty()


def test_who_gives_up_before_its_turn_has_nothing_forgotten(tmp_path) -> None:
    """As with each question: nobody is asked once nobody waits."""
    host, is_answered = Host(), threading.Event()
    with served(host, tmp_path, gone) as (agent, cache):
        cache.save(KEYS, range(6)).wait_committed()
        host.core._questions.ask(lambda: is_answered.wait(LIMIT_S))
        host.core.fetches.forget(KEYS, 0).end(None, StoreUnavailableError("late"))
        is_answered.set()
        assert all(cache.contains(KEYS))
        assert agent.heard.empty()
