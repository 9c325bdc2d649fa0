# SPDX-License-Identifier: Apache-2.0
"""Hits by tier: in metrics, in the engine's words, in a request's line."""

import pytest

from tests.integration.vllm.test_tiers import HASHES, SIZE, World, request
from ucm.integration.vllm.hits import Hits
from ucm.metrics import Counters

TIERS = [{"type": "disk"}, {"type": "redis"}]


def of(told) -> dict[str, int]:
    """Return the engine's words as text."""
    return {word.value: count for word, count in told.items()}


class TestHit:
    def test_hit_is_cut_by_what_the_agent_says(self) -> None:
        """R-57: of four blocks the slab had one, a disk two, and a server the last."""
        world = World(tiers=TIERS)
        world.ask()
        world.client.say("a", 4, media=b"\0\1\1\2")
        assert {"slab": SIZE, "disk": 2 * SIZE, "redis": SIZE} == world.tiers.hit(
            "a", range(4 * SIZE)
        )
        assert {"disk": 2 * SIZE} == world.tiers.hit("a", range(SIZE, 3 * SIZE))

    def test_two_tiers_of_one_name_share_it(self) -> None:
        """R-57: of two disks both have brought their tokens; none of them are lost."""
        world = World(tiers=[{"type": "disk"}, {"type": "disk"}])
        world.client.media = ("disk", "disk")
        world.ask()
        world.client.say("a", 4, media=b"\1\1\2\0")
        hit = {"disk": 3 * SIZE, "slab": SIZE}
        assert hit == world.tiers.hit("a", range(4 * SIZE))

    def test_request_that_asked_nobody_hit_the_slab(self) -> None:
        """R-57: without a question, an answer, or any tier it was there."""
        world = World(tiers=TIERS)
        assert {"slab": SIZE} == world.tiers.hit("a", range(SIZE))
        world.ask(request("a"))
        assert {"slab": SIZE} == world.tiers.hit("a", range(SIZE))
        world.client.say("a", len(HASHES), media=b"\1" * 4)
        world.tiers.drop("a")
        assert {"slab": SIZE} == world.tiers.hit("a", range(SIZE))
        assert 0 == len(world.tiers)


class TestSources:
    @pytest.mark.parametrize(
        ("slab", "expected"),
        [
            ("memory", {"host": 1, "disk": 2, "external_unspecified": 12}),
            ("disk", {"disk": 3, "external_unspecified": 12}),
        ],
    )
    def test_engine_hears_its_own_words(self, slab, expected) -> None:
        """R-57: a disk is no host; what is remote has no word of the engine's."""
        counters = Counters()
        hits = Hits(counters, slab)
        hits.found("a", {"slab": 1, "disk": 2, "redis": 4, "my-own": 8})
        assert expected == of(hits.sources("a", 15))
        assert [1, 2, 4, 8] == [
            counters.total("ucm_hit_tokens_total", tier=tier)
            for tier in ("slab", "disk", "redis", "other")
        ]

    def test_other_hit_has_no_source(self) -> None:
        """R-57: the engine is told of the hit that it asks about, or nothing."""
        hits = Hits(Counters(), "memory")
        hits.found("a", {"slab": 16})
        assert {} == hits.sources("b", 16) == hits.sources("a", 32)

    def test_release_without_words_hears_nothing(self, monkeypatch) -> None:
        """R-57: older engines do not tell hits apart."""
        monkeypatch.setattr("ucm.integration.vllm.hits.hit_source", lambda name: None)
        hits = Hits(Counters(), "memory")
        hits.found("a", {"slab": 16})
        assert {} == hits.sources("a", 16)
