# SPDX-License-Identifier: Apache-2.0
"""What a host of its own has fetched from tiers, and what is left of that."""

import threading

import pytest

from tests.cache.fetching import GONE, SILENT, beside_agent, blocking, served
from tests.cache.kit import (
    LAYOUT,
    LIMIT_S,
    Host,
    both_loops,
    keys_of,
    leaving_nothing,
)
from tests.cache.test_cancel import cancel_at
from tests.cache.test_tiers import until
from tests.clocks import AdvancingThreads
from ucm.agent.protocol import LONGEST_S, Ask, Done, Drop, encode_frame
from ucm.cache.staged import Staged
from ucm.errors import KeyFormatError, PipelineClosedError, StoreUnavailableError
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, raising

pytestmark = pytest.mark.anyio

KEYS = keys_of(6)
WANTS = "ucm_fetch_wants_total"


def all_found(ask: Ask) -> Done:
    """Say that all came."""
    return Done(ask.number, len(ask.keys), Reason.NONE, b"\1" * len(ask.keys))


def four_found(ask: Ask) -> Done:
    """Say that no tier has the last two."""
    return Done(ask.number, 4, Reason.ABSENT, b"\1" * 4)


@both_loops
async def test_tiers_are_asked_for_whom_the_place_names(tmp_path) -> None:
    """R-41: what a tenant has fetched takes slots of its own share; else nobody's."""
    host = Host()
    with beside_agent(host, tmp_path, all_found) as agent:
        async with host.cache() as cache:
            for place in (Place(tenant=7), Place()):
                found = await cache.prefetch(KEYS, place=place, timeout=30.0)
                assert place.tenant == agent.hear().tenant
                found.give_up()
                assert isinstance(agent.hear(), Drop)
        host.check_left()


def test_tiers_are_asked_for_a_tenant_by_the_blocking_face(tmp_path) -> None:
    """R-41: at once, and begun, and for what is staged."""
    host = Host()
    with beside_agent(host, tmp_path, all_found) as agent, blocking(host) as cache:
        cache.prefetch(KEYS, place=Place(tenant=7), timeout=30.0)
        cache.begin_prefetch(KEYS, place=Place(tenant=8), timeout=30.0)
        assert [7, 8] == [agent.hear().tenant for _ in range(2)]
        staged = Staged(cache, len(KEYS), tenant=9)
        staged.stage(KEYS, 30.0)
        assert 9 == agent.hear().tenant


@both_loops
async def test_what_tiers_bring_is_found(tmp_path) -> None:
    """R-41, R-53: on any loop the agent is asked for a prefix that the slab lacks, once, with
    the sizes of its blocks; of one that the slab has nobody is asked."""
    host = Host()

    def told(fetched) -> tuple[int, str]:
        return fetched.found, fetched.reason

    with beside_agent(host, tmp_path, four_found) as agent:
        async with host.cache() as cache:
            await cache.save(KEYS[:2], range(2)).committed
            assert (2, "") == told(await cache.prefetch(KEYS[:2]))
            assert (4, "absent") == told(await cache.prefetch(KEYS, timeout=30.0))
            ask = agent.hear()
            assert [LAYOUT.max_block_bytes] * 6 == ask.sizes
            assert KEYS == [key[-len(KEYS[0]) :] for key in ask.keys]
            assert 27.0 >= ask.deadline_s
            assert 1 == host.core._counters.total(WANTS, reason="absent")
        host.check_left()


def test_fetched_blocks_are_kept_until_the_last_is_loaded(tmp_path) -> None:
    """R-53: a prompt may be loaded in parts; behind the last one nothing is kept for it, nor
    for another prompt that was given up."""
    host = Host()
    with served(host, tmp_path, four_found) as (agent, cache):
        assert 4 == cache.prefetch(KEYS, timeout=30.0).found
        cache.load(KEYS[:2], [0, 1])
        other = cache.prefetch(keys_of(6, 1), timeout=30.0)
        assert (1, 2) == (agent.hear().number, agent.hear().number)
        other.give_up()
        other.give_up()
        assert Drop(2) == agent.hear()
        cache.load(KEYS[2:4], [2, 3])
        assert Drop(1) == agent.hear()


def test_what_is_given_up_is_over(tmp_path) -> None:
    """Who looks step by step whether it is would look until its time is up."""
    host = Host()
    with served(host, tmp_path, lambda _: SILENT) as (agent, cache):
        begun = cache.begin_prefetch(KEYS, timeout=30.0)
        assert 1 == agent.hear().number
        begun.give_up()
        assert begun.is_over
        assert (0, Reason.DEADLINE) == (begun.result().found, begun.result().reason)
        assert Drop(1) == agent.hear()


def test_load_right_behind_the_answer_ends_what_is_kept(tmp_path, monkeypatch) -> None:
    """R-53: who loads before the thread that has asked gets on keeps no slots, either."""
    host, is_loaded = Host(), threading.Event()
    with served(host, tmp_path, four_found) as (agent, cache):
        client = host.core.fetches._client
        ask = client.want

        def want(*given, **terms) -> bool:
            is_asked = ask(*given, **terms)
            assert is_loaded.wait(LIMIT_S)
            return is_asked

        monkeypatch.setattr(client, "want", want)
        assert 4 == cache.prefetch(KEYS, timeout=30.0).found
        cache.load(KEYS[:4], range(4))
        is_loaded.set()
        assert 1 == agent.hear().number
        cache.match(KEYS)  # asked behind it
        assert 0 == len(host.core.fetches)
        assert Drop(1) == agent.hear()


def test_fetched_blocks_are_forgotten_with_their_time(tmp_path) -> None:
    """R-53: a host that never loads what it has fetched keeps no book of it for ever."""
    threads = AdvancingThreads()
    host = Host(threads=threads)
    with served(host, tmp_path, four_found) as (agent, cache):
        cache.prefetch(KEYS, timeout=30.0)
        threads.advance(LONGEST_S + 1)
        cache.prefetch(keys_of(6, 1), timeout=30.0)
        assert 1 == len(host.core.fetches)
        heard = [agent.hear() for _ in range(3)]
        assert [1, 1, 2] == [each.number for each in heard]


def test_nothing_is_kept_where_nothing_came(tmp_path) -> None:
    """R-53: the slots that a question had in vain are the next one's at once."""
    host = Host()

    def nothing_found(ask: Ask) -> Done:
        return Done(ask.number, 0, Reason.CORRUPT)

    with served(host, tmp_path, nothing_found) as (agent, cache):
        fetched = cache.prefetch(KEYS, timeout=30.0)
        assert (0, "corrupt", 0) == (
            fetched.found,
            fetched.reason,
            len(host.core.fetches),
        )
        assert (1, Drop(1)) == (agent.hear().number, agent.hear())


@both_loops
async def test_agent_that_says_nothing_costs_the_deadline_once(tmp_path) -> None:
    """R-54, R-63: what the slab has is found then, and the next question is no at once."""
    host = Host()
    with beside_agent(host, tmp_path, lambda _: SILENT):
        async with host.cache() as cache:
            await cache.save(KEYS[:2], range(2)).committed
            first = await cache.prefetch(KEYS, timeout=0.15)
            assert Reason.DEADLINE is first.reason
            while host.core.fetches.is_served:  # a busy machine may ask too late
                await cache.prefetch(KEYS, timeout=0.15)
            second = await cache.prefetch(KEYS, timeout=LIMIT_S)
            assert (2, Reason.UNAVAILABLE) == (second.found, second.reason)
        host.check_left()


def test_fetch_that_is_begun_is_looked_at_and_not_waited_for(tmp_path) -> None:
    """R-54, R-63: by a host whose thread may not wait; it is over with the answer, of which
    it is counted what tiers had, or with its time, which is put forward here."""
    threads = AdvancingThreads()
    host = Host(threads=threads)
    with served(host, tmp_path, lambda _: SILENT) as (agent, cache):
        silent = cache.begin_prefetch(KEYS, timeout=30.0)
        assert 1 == agent.hear().number
        assert not silent.is_over
        threads.advance(31.0)
        assert silent.is_over
        assert (0, Reason.DEADLINE) == (silent.result().found, silent.result().reason)
        assert Drop(1) == agent.hear()
        agent.say = four_found
        late = encode_frame(Done(1, 0, Reason.ABSENT))  # nobody waits for it
        agent._peer.sendall(late)
        until(lambda: host.core.fetches.is_served)
        begun = cache.begin_prefetch(KEYS, timeout=LONGEST_S)
        assert 2 == agent.hear().number
        until(lambda: begun.is_over)
        assert (4, Reason.ABSENT) == (begun.result().found, begun.result().reason)
        fetched = host.core._counters.total("ucm_fetched_parts_total", tier="memory")
        assert 4 == fetched
        begun.give_up()
        assert Drop(2) == agent.hear()


def test_what_the_slab_had_is_no_tiers(tmp_path) -> None:
    """R-53: it is counted by tier what came from below, and from nowhere else."""
    host = Host()

    def some_found(ask: Ask) -> Done:
        return Done(ask.number, 4, Reason.ABSENT, b"\0\1\0\1")

    with served(host, tmp_path, some_found) as (_, cache):
        assert 4 == cache.prefetch(KEYS, timeout=LIMIT_S).found
        assert 2 == host.core._counters.total("ucm_fetched_parts_total")


@both_loops
async def test_agent_that_dies_is_not_waited_for(tmp_path) -> None:
    """R-63: whoever waits for it hears so, long before the deadline."""
    host = Host()
    with beside_agent(host, tmp_path, lambda _: GONE):
        async with host.cache() as cache:
            fetched = await cache.prefetch(KEYS, timeout=LIMIT_S)
            assert (0, Reason.UNAVAILABLE) == (fetched.found, fetched.reason)
        host.check_left()


def test_without_tiers_no_tier_has_it() -> None:
    """R-63: a host without tiers asks all the same, and hears what its slab has."""
    host = Host()
    with leaving_nothing(host), blocking(host) as cache:
        fetched = cache.prefetch(KEYS)
        assert (0, Reason.ABSENT) == (fetched.found, fetched.reason)
        assert (0, Reason.NONE) == (cache.prefetch([]).found, cache.prefetch([]).reason)
        with pytest.raises(KeyFormatError):
            cache.prefetch(["text"])
    with pytest.raises(PipelineClosedError):
        cache.prefetch(KEYS)


@pytest.mark.parametrize("error", [StoreUnavailableError("gone"), ValueError("a bug")])
def test_store_in_trouble_is_a_miss(error: Exception, tmp_path) -> None:
    """R-63: a slab that does not answer has nothing, and no agent is asked for it."""
    host = Host(FaultPlan(Fault("match", raising(error))))
    with served(host, tmp_path, all_found) as (agent, cache):
        fetched = cache.prefetch(KEYS, timeout=LIMIT_S)
        assert (0, Reason.UNAVAILABLE) == (fetched.found, fetched.reason)
        assert agent.heard.empty()


@both_loops
@pytest.mark.parametrize("say", [all_found, lambda _: SILENT], ids=["told", "silent"])
async def test_prefetch_cancelled_at_each_point_leaves_nothing(say, tmp_path) -> None:
    """R-42: whoever goes away while tiers are asked wants nothing any more."""
    host = Host()
    with beside_agent(host, tmp_path, say):
        async with host.cache() as cache:
            nth, points = 0, 1
            while nth < points:
                keys = keys_of(6, nth)
                points = await cancel_at(nth, cache.prefetch(keys, timeout=LIMIT_S))
                await cache.statistics()  # asked behind it
                assert 0 == len(host.core.fetches)
                nth += 1
            assert 1 <= points
        host.check_left()


def test_close_ends_who_waits_for_tiers(tmp_path) -> None:
    """R-42: a cache that is closed leaves nobody waiting for its agent."""
    host, ends = Host(), []
    with beside_agent(host, tmp_path, lambda _: SILENT) as agent, leaving_nothing(host):
        cache = blocking(host)

        def wait() -> None:
            ends.append(cache.prefetch(KEYS, timeout=LONGEST_S).reason)

        waiting = threading.Thread(target=wait)
        waiting.start()
        agent.hear()
        cache.close()
        waiting.join(LIMIT_S)
        assert [Reason.UNAVAILABLE] == ends


def test_many_threads_have_what_they_ask_for(tmp_path) -> None:
    """R-41: the other face is asked by many threads at once; each hears of its own keys."""
    host, ends = Host(), {}

    def some_found(ask: Ask) -> Done:
        return Done(ask.number, ask.keys[0][-1] % 5, Reason.ABSENT)

    with served(host, tmp_path, some_found) as (_, cache):

        def ask(seed: int) -> None:
            keys = keys_of(6, seed)
            found = cache.prefetch(keys, timeout=LIMIT_S).found
            ends[seed] = found == keys[0][-1] % 5

        asking = [threading.Thread(target=ask, args=(at,)) for at in range(16)]
        for each in asking:
            each.start()
        for each in asking:
            each.join(LIMIT_S)
        assert dict.fromkeys(range(16), True) == ends


def test_metrics_tell_of_the_agent(tmp_path) -> None:
    """R-52: a host that is scraped has the node's agent and its tiers among its metrics."""
    host = Host()
    with served(host, tmp_path, all_found):
        assert 1 == host.core.measure().gauges["ucm_agent_up"]
