# SPDX-License-Identifier: Apache-2.0
"""A store of ours below vLLM's own tiering: what is stored, found and promoted."""

from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    TierFilter,
    TierMatcher,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.integration.vllm.tier_kit import (
    CHUNK,
    Engine,
    content_of,
    engine,
    keys_of,
    slab,
)
from ucm.testing.slab_damage import Damage, damage, stored


def served(one: Engine, keys: list[bytes], name: str = "reader") -> int:
    """Ask for chunks as a new request; check the bytes of all that are found."""
    one.request(name, keys)
    found = one.found(name, keys)
    head = keys[:found]
    assert [content_of(key) for key in head] == one.content(name, head)
    one.finish(name)
    one.settle()
    return found


class TestRoundTrip:
    def test_what_is_stored_is_promoted_as_it_was(self, tmp_path: Path) -> None:
        """Chunks go down when they are in the CPU tier, and come back when it has
        lost them, in however many steps."""
        keys = keys_of(12)
        with engine(slab(tmp_path / "slab")) as one:
            assert 0 == served(one, keys)
            one.store(keys)
            assert 12 == served(one, keys)
            assert 12 == one.tier._cache.statistics().loaded_blocks
            assert 12 == served(one, keys, "again")  # the CPU tier has them
            assert 12 == one.tier._cache.statistics().loaded_blocks

    def test_first_answer_is_not_waited_for(self, tmp_path: Path) -> None:
        """A step asks, a later one hears that there is something, and promotes it."""
        keys = keys_of(2)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            one.request("r", keys)
            context = one.requests["r"]
            assert LookupResult.RETRY is one.manager.lookup(keys[0], context)
            seen = {LookupResult.RETRY}
            one.until(
                lambda: (
                    seen.add(found := one.manager.lookup(keys[0], context))
                    or found is LookupResult.HIT
                )
            )
            assert LookupResult.MISS not in seen
            assert LookupResult.HIT_PENDING in seen

    def test_holes_and_ends_are_misses(self, tmp_path: Path) -> None:
        """What comes behind a chunk that is missing is not promoted in its place."""
        keys = keys_of(6)
        with engine(slab(tmp_path / "slab")) as one:
            one.store([*keys[:2], *keys[3:5]])
            assert 2 == served(one, keys)
            assert 2 == served(one, keys[3:], "behind the hole")

    def test_stored_again_moves_nothing(self, tmp_path: Path) -> None:
        """A chunk that is there already is as good as stored."""
        keys = keys_of(4)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            one.store(keys, "twice")
            assert 4 == one.tier._cache.statistics().saved_blocks
            failures = one.manager.get_stats().data
            assert not [name for name in failures if "job_failures" in str(name)]

    def test_groups_are_kept_apart(self, tmp_path: Path) -> None:
        """The same hash in another group of layers is another chunk."""
        keys = [*keys_of(3, group=0), *keys_of(3, group=1)]
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys[:4])
            assert 4 == served(one, keys)

    def test_room_is_made_from_the_ends_of_prompts(self, tmp_path: Path) -> None:
        """Keys are handed down without order; a store that is full keeps the heads."""
        with engine(slab(tmp_path / "slab", str(16 * CHUNK))) as one:
            for prompt in "ab":
                one.store(keys_of(12, prompt), prompt)
            assert 12 == served(one, keys_of(12, "b"))
            assert 0 < served(one, keys_of(12, "a"), "older") < 12


class TestOthers:
    def test_next_engine_finds_what_the_last_one_stored(self, tmp_path: Path) -> None:
        """The CPU tier ends with its engine, the store does not."""
        keys = keys_of(5)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
        with engine(slab(tmp_path / "slab")) as other:
            assert 5 == served(other, keys)

    def test_engines_share_a_store_while_they_run(self, tmp_path: Path) -> None:
        """Each finds what the other stores."""
        with (
            engine(slab(tmp_path / "slab")) as one,
            engine(slab(tmp_path / "slab")) as other,
        ):
            one.store(keys_of(3))
            assert 3 == served(other, keys_of(3))
            other.store(keys_of(4, "b"))
            assert 4 == served(one, keys_of(4, "b"))

    @pytest.mark.parametrize(
        "other",
        [
            {"weights_revision": "r2"},
            {"model": "n"},
            {"changes": {"worker_kv_bytes_per_block": 4096}},
            {"changes": {"kv_cache_layout": "HND"}},
            {"changes": {"canonical_layout": True}},
        ],
        ids=lambda other: next(iter(other.get("changes", other))),
    )
    def test_engine_with_other_bytes_finds_nothing(
        self, tmp_path: Path, other: dict
    ) -> None:
        """The keys of vLLM are the same, ours are not."""
        keys = keys_of(3)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
        with engine(slab(tmp_path / "slab"), **other) as two:
            assert 0 == served(two, keys)
        with engine(slab(tmp_path / "slab")) as same:
            assert 3 == served(same, keys)


class TestManager:
    def test_two_requests_share_one_promotion(self, tmp_path: Path) -> None:
        """Who comes second waits for the first one's, and neither loads twice."""
        keys = keys_of(4)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            for name in ("r", "s"):
                one.request(name, keys)
                assert one.find(name, keys) is None
            assert [4, 4] == [one.found(name, keys) for name in ("r", "s")]
            assert 4 == one.tier._cache.statistics().loaded_blocks

    def test_hits_are_told_by_where_they_came_from(self, tmp_path: Path) -> None:
        """A slab is the host's; metrics say so."""
        keys = keys_of(1)
        with engine(slab(tmp_path / "slab"), locality="REMOTE") as one:
            assert Medium.CPU is one.tier.medium
            assert Locality.REMOTE is one.tier.locality
            one.store(keys)
            one.request("r", keys)
            assert 1 == one.found("r", keys)
            source = one.manager.get_load_source(keys[0], one.requests["r"])
            assert CacheHitSource.HOST is source
        with engine(slab(tmp_path / "slab")) as one:
            assert CacheHitSource.HOST is one.tier.cache_hit_source
            assert Locality.LOCAL is one.tier.locality

    def test_tiers_side_by_side_serve_for_each_other(self, tmp_path: Path) -> None:
        """R-81: chunks go down to each of them; what does not verify in one is promoted
        from the next, and what neither has is computed."""
        keys, slabs = keys_of(6), [tmp_path / "a", tmp_path / "b"]
        with engine(slab(slabs[0]), beside=[{"store": slab(slabs[1])}]) as one:
            caches = [tier._cache for tier in one.manager.secondary_tiers]
            one.store(keys)
            assert [6, 6] == [each.statistics().saved_blocks for each in caches]
            damage(slabs[0], Damage.BITS, stored(slabs[0]))
            assert 6 == served(one, keys)
            assert [0, 6] == [each.statistics().loaded_blocks for each in caches]
            one.forget()
            damage(slabs[1], Damage.BITS, stored(slabs[1]))
            assert 0 == served(one, keys, "computed")

    def test_request_that_wants_no_tier_finds_nothing(self, tmp_path: Path) -> None:
        """The engine's own ``kv_load_tiers`` is obeyed."""
        keys = keys_of(2)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            remote = TierFilter((TierMatcher(locality=Locality.REMOTE),))
            one.request("r", keys, load_tier_filter=remote)
            assert 0 == one.found("r", keys)

    def test_prompt_larger_than_the_cpu_tier_is_exact(self, tmp_path: Path) -> None:
        """The manager then promotes chunks in each other's place; it comes to an end,
        and what fits is served as ever."""
        keys = keys_of(8)
        with engine(slab(tmp_path / "slab"), chunks=4) as one:
            one.store(keys[:4])
            one.store(keys[4:], "rest")
            assert 4 >= served(one, keys)
            one.forget()
            assert 4 == served(one, keys[:4], "shorter")

    def test_who_runs_keeps_no_answers(self, tmp_path: Path) -> None:
        """R-53: what a request that still runs did not find is found once it is stored; so is
        what one that had to give way has stored itself."""
        keys = keys_of(4)
        with engine(slab(tmp_path / "slab")) as one:
            one.request("runs", keys)
            assert one.found("runs", keys) == 0
            one.step(new=["runs"])
            assert one.compute("runs", keys)
            one.forget()
            one.request("next", keys)
            assert one.found("next", keys) == 4
            one.forget()
            one.request("waits", other := keys_of(2, "b"))
            assert one.found("waits", other) == 0
            one.store(other)
            one.step(preempted=["waits"])
            assert one.found("waits", other) == 2

    def test_ended_requests_leave_nothing(self, tmp_path: Path) -> None:
        """Also those that end while their question, or promotion, is under way."""
        keys = keys_of(4)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            for steps in range(4):
                one.forget()
                one.request("r", keys)
                for _ in range(steps):
                    one.find("r", keys)
                    one.step()
                one.finish("r")
            one.settle()
            assert 0 == len(one.tier._lookups)
            assert {} == one.tier._jobs
            assert 4 == served(one, keys)
