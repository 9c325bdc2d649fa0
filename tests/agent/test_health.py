# SPDX-License-Identifier: Apache-2.0
"""How an agent and its tiers are, as the metrics of who is served by it say."""

import pytest

from tests.agent.test_client import World, want
from tests.agent.test_process import until
from tests.integration.vllm.agent_kit import FakeClient
from ucm.agent.health import AgentHealth
from ucm.agent.protocol import PROTOCOL_VERSION, GetStatus, Status, Welcome
from ucm.metrics import Counters
from ucm.reasons import Reason
from ucm.tracing import AGENT_JOINED, AGENT_LOST


def status(
    pid: int = 7,
    spilled: int = 0,
    silent: tuple[bool, ...] = (False, False),
    nonce: str = "",
    **dropped,
) -> dict[str, object]:
    """Return what an agent over a disk and a server says of itself, once for each size."""
    of_tiers = [{"spilled": spilled, "dropped": dropped}, {"spilled": 1, "dropped": {}}]
    tiers = [
        {"medium": medium, "silent": is_silent}
        for medium, is_silent in zip(("disk", "redis"), silent, strict=True)
    ]
    return {
        "pid": pid,
        "nonce": nonce,
        "tiers": tiers,
        "slots": {"4096": {"spilled": of_tiers}, "8192": {"spilled": of_tiers}},
    }


@pytest.fixture
def node():
    """Return a client, counters, and what brings one into the other."""
    client, counters = FakeClient(), Counters()
    return client, counters, AgentHealth(client, counters)


class TestRefresh:
    def test_tier_that_does_not_answer_is_named(self, node) -> None:
        """R-52: it is a gauge of its own, and so is an agent that is gone."""
        client, counters, health = node
        client.status = status(silent=(False, True))
        health.refresh()
        expected = {"ucm_agent_up": 1, "ucm_tier_up|disk": 1, "ucm_tier_up|redis": 0}
        assert expected == counters.snapshot().gauges
        client.is_up, client.status = False, status()
        health.refresh()
        expected = {"ucm_agent_up": 0, "ucm_tier_up|disk": 0, "ucm_tier_up|redis": 0}
        assert expected == counters.snapshot().gauges
        assert 2 == client.looks

    def test_tiers_of_one_medium_are_up_together(self, node) -> None:
        """R-52: where one of two does not answer, that is seen."""
        client, counters, health = node
        client.status = status()
        client.status["tiers"] = [
            {"medium": "redis", "silent": is_silent} for is_silent in (True, False)
        ]
        health.refresh()
        assert 0 == counters.snapshot().gauges["ucm_tier_up|redis"]

    def test_server_of_a_tier_that_is_away_or_takes_nothing_is_named(
        self, node
    ) -> None:
        """R-52: which of a cluster's, for reading and for saving, and that it is over; others are not told of."""
        client, counters, health = node

        def told(away: list[str], refusing: list[str]) -> dict[str, float]:
            client.status = status()
            client.status["tiers"][1] |= {"away": away, "refusing": refusing}
            health.refresh()
            gauges = counters.snapshot().gauges
            assert 1 == gauges["ucm_tier_up|redis"]
            name = "ucm_tier_server_up|redis|"
            return {
                key.removeprefix(name): value
                for key, value in gauges.items()
                if "server" in key
            }

        assert {} == told([], [])
        first = {"load|a:1": 0, "save|a:1": 0, "load|[::1]:2": 1, "save|[::1]:2": 0}
        assert first == told(["a:1"], ["[::1]:2"])
        second = {"load|a:1": 1, "save|a:1": 0, "load|[::1]:2": 1, "save|[::1]:2": 1}
        assert second == told([], ["a:1"])
        assert dict.fromkeys(first, 1) == told([], [])

    def test_names_of_servers_are_bounded_over_all_time(self, node) -> None:
        """R-52: a metric forgets no label; a cluster whose servers change addresses has 32, and one for all others,
        also for those that the agent does not name. None is longer than its gauge may be, or cut by it."""
        client, counters, health = node

        def gauges(*names: str, count: int) -> dict[str, float]:
            client.status = status()
            client.status["tiers"][1] |= {"away": list(names), "num_away": count}
            health.refresh()
            found = counters.snapshot().gauges
            return {key: found[key] for key in found if "server" in key}

        others = "ucm_tier_server_up|redis|load|others"
        assert 2 * 31 == len(gauges(*map(str, range(31)), count=31))
        long = gauges("|" + 300 * "x" + ":6379", count=1)
        assert 0 == long[f"ucm_tier_server_up|redis|load|{59 * 'x'}:6379"]
        assert others not in long
        more = gauges(*map(str, range(100, 200)), count=100)
        assert (2 * 33, 0) == (len(more), more[others])
        assert 1 == gauges("5", count=1)[others]
        assert 0 == gauges("5", count=2)[others]

    def test_what_a_tier_does_not_take_is_told_with_the_reason(self, node) -> None:
        """R-52, R-55: a full tier is seen by name, over slots of all sizes, and told once."""
        client, counters, health = node
        for _ in range(2):
            client.status = status(spilled=3, store_full=5, **{"a new word": 1})
            health.refresh()
        expected = {
            "ucm_spilled_parts_total|disk": 6,
            "ucm_spilled_parts_total|redis": 2,
            "ucm_unspilled_parts_total|disk|store_full": 10,
            "ucm_unspilled_parts_total|disk|error": 2,
        }
        assert expected == counters.snapshot().counters

    def test_what_a_tier_parts_with_and_what_it_may_keep_is_told(self, node) -> None:
        """R-52: of blocks that were to be forgotten, by the tier's name."""
        client, counters, health = node
        client.status = status()
        client.status["slots"]["8192"] = {
            "spilled": [
                {"spilled": 0, "dropped": {}, "forgotten": 3, "unforgotten": 2},
                {"spilled": 0, "dropped": {}, "forgotten": 5},
            ]
        }
        health.refresh()
        total = counters.total
        assert 3 == total("ucm_forgotten_parts_total", tier="disk")
        assert 5 == total("ucm_forgotten_parts_total", tier="redis")
        assert 2 == total("ucm_unforgotten_parts_total")

    def test_what_no_agent_was_there_for_is_counted_by_the_names_of_tiers(self) -> None:
        """R-52, R-63: by those of the agent that was there last, or else by their types."""
        client, counters = FakeClient(), Counters()
        health = AgentHealth(client, counters, [{"type": "object"}])
        health.unasked(3)
        client.media = ()
        health.unasked(2)
        totals = counters.snapshot().counters
        name = "ucm_unforgotten_parts_total"
        assert {f"{name}|disk": 3, f"{name}|redis": 3, f"{name}|object": 2} == totals

    def test_what_an_agent_was_told_and_has_no_answer_for_is_counted(self) -> None:
        """R-52, R-63: one that dies amid it, or has no room, may have asked no tier; it went uncounted
        where nobody waited. What it answers for it counts itself."""
        client, counters = FakeClient(), Counters()
        health = AgentHealth(client, counters)
        for count in range(1, 5):
            health.forget([b"k"] * count)
        names, tells = zip(*client.told, strict=True)
        for name, reason in zip(names, ["", "kept", "queue_tickets"], strict=False):
            client.say(name, 0, Reason(reason))
        for tell in tells:
            tell()
        assert 3 + 4 == counters.total("ucm_unforgotten_parts_total", tier="disk")
        assert list(names) == client.dropped
        assert 4 == len(set(names))

    def test_totals_go_on_over_the_next_agent(self, node) -> None:
        """R-55, R-63: one that was started anew counts from nothing, and nothing is
        counted twice or taken back."""
        client, counters, health = node
        for pid, spilled in ((7, 3), (7, 5), (8, 1), (9, 4)):
            client.status = status(pid, spilled)
            health.refresh()
        total = counters.total
        assert 2 * (5 + 1 + 4) == total("ucm_spilled_parts_total", tier="disk")
        assert 2 * 3 == total("ucm_spilled_parts_total", tier="redis")

    def test_what_an_agent_counts_no_more_is_not_taken_back(self, node) -> None:
        """R-63: it has lost the slab of one size of blocks, and ends: a counter that went down
        would have ended vLLM's front end, and is a restart to Prometheus."""
        client, counters, health = node
        client.status = status(spilled=3)
        health.refresh()
        del client.status["slots"]["8192"]
        health.refresh()
        assert 2 * 3 == counters.total("ucm_spilled_parts_total", tier="disk")
        client.status = status(spilled=4)
        health.refresh()
        assert 2 * 4 == counters.total("ucm_spilled_parts_total", tier="disk")

    @pytest.mark.parametrize("said", [{}, {"pid": 7, "tiers": [{"medium": 5}]}])
    def test_what_another_release_says_is_passed_over(self, node, said) -> None:
        """R-63: an agent whose words are others is up, and nothing more is known."""
        client, counters, health = node
        client.status = said
        health.refresh()
        assert {"ucm_agent_up": 1} == counters.snapshot().gauges
        assert {} == counters.snapshot().counters

    def test_every_agent_is_counted_that_was_there(self, node) -> None:
        """R-52: also those that came and died between two looks, of which nobody has asked how
        they are: of an agent that dies as it starts, again and again, one in seven was seen. One
        that is met again is the same, and nobody is none."""
        client, counters, health = node
        health.refresh()
        assert 0 == counters.total("ucm_agents_total")
        for nonces, total in ("a", 1), ("a", 1), ("bcd", 4), ("", 4), ("d", 4):
            for nonce in nonces:
                client.agents.met(Welcome(PROTOCOL_VERSION, [], nonce))
            health.refresh()
            assert total == counters.total("ucm_agents_total")

    def test_successor_of_the_same_process_id_is_another_agent(self, node) -> None:
        """R-52, R-55: in a container each agent is process 1; what it counts from nothing
        takes nothing back of what the one before did."""
        client, counters, health = node
        for nonce, spilled in (("a", 5), ("b", 2), ("b", 3)):
            client.status = status(1, spilled, nonce=nonce)
            health.refresh()
        assert 2 * (5 + 3) == counters.total("ucm_spilled_parts_total", tier="disk")


class TestLook:
    def test_agent_that_does_not_answer_is_told_of_once(self, tmp_path) -> None:
        """R-52, R-63: who looks on logs an agent that is stopped, by name and once, and that
        it is there again as soon as it says something."""
        world = World(tmp_path)
        client = world.join()
        client.look()
        assert GetStatus() == world.agent.hear()
        want(client)
        world.agent.hear()
        world.agent.say(Status({"pid": 6}))  # on its way as it was stopped
        until(lambda: client.status)
        world.threads.advance(1.0)
        assert not client.is_up
        client.look()
        client.look()
        assert AGENT_LOST == world.told.wait()
        world.agent.say(Status({"pid": 7}))
        assert AGENT_JOINED == world.told.wait()
        client.look()
        assert GetStatus() == world.agent.hear()
        assert ({"pid": 7}, True) == (client.status, world.told.is_read)
        world.agent.close()
        client.close()

    def test_want_of_no_time_does_not_silence_the_agent(self, tmp_path) -> None:
        """R-63: who has hardly any time left is not answered in it: that says nothing of the
        agent, and others ask it meanwhile."""
        world = World(tmp_path)
        client = world.join()
        assert want(client, seconds=0.0)
        world.threads.advance(0.05)
        assert (True, False) == (client.is_up, client.is_pending("a"))
        assert want(client, "b")
        world.threads.advance(0.1)
        assert not client.is_up
        world.agent.close()
        client.close()
