# SPDX-License-Identifier: Apache-2.0
"""What a request asks of the store, and what becomes of it."""

import math
from types import SimpleNamespace

import pytest
import structlog

from tests.integration.vllm.agent_kit import FakeClient
from tests.integration.vllm.test_halves import HASHES, Engine, make_setup, request
from ucm.agent.health import AgentHealth
from ucm.blocks import GroupId, KeyPacker, ShardId
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.wishes import WishReader
from ucm.metrics import Counters
from ucm.prefixes import tenant_of
from ucm.scheduler.requests import NO_WISHES, Wishes


class Reading:
    """A reader, and what it has counted and told."""

    def __init__(self, most: float = 100.0, **how: object) -> None:
        self.counters = Counters()
        self.log = structlog.testing.CapturingLogger()
        self.reader = WishReader(most, counters=self.counters, log=self.log, **how)

    def of(
        self, params: object = None, salt: str | None = None, **more: object
    ) -> Wishes:
        """Return what a request asks for."""
        return self.reader.of(
            SimpleNamespace(kv_transfer_params=params, cache_salt=salt, **more)
        )

    def ignored(self) -> dict[str, float]:
        """Return what was not understood, by key."""
        keys = "ucm", "retain_seconds", "store", "forget", "kv_hints"
        keys += "max_load_tokens", "max_offload_tokens", "kv_load_tiers"
        name = "ucm_ignored_wishes_total"
        totals = {key: self.counters.total(name, key=key) for key in keys}
        return {key: total for key, total in totals.items() if total}


class TestReader:
    @pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, [1]])
    def test_request_that_says_nothing_to_us_wishes_nothing(self, params):
        """What others are told is nothing of ours, and neither counted nor warned of."""
        reading = Reading()
        assert NO_WISHES is reading.of(params)
        assert ([], {}) == (reading.log.calls, reading.ignored())

    def test_request_of_an_older_engine_wishes_nothing(self):
        """An engine may know neither salts nor parameters."""
        assert NO_WISHES is Reading().reader.of(SimpleNamespace())

    @pytest.mark.parametrize(
        ("ours", "wishes"),
        [
            ({"retain_seconds": 2}, Wishes(retain_seconds=2.0)),
            ({"retain_seconds": 1e9}, Wishes(retain_seconds=100.0)),
            ({"retain_seconds": 10**400}, Wishes(retain_seconds=100.0)),
            ({"retain_seconds": -5}, Wishes(retain_seconds=-5.0)),
            ({"retain_seconds": -(10**400)}, Wishes(retain_seconds=-100.0)),
            ({"store": False}, Wishes(most_saved=0)),
            ({"forget": True}, Wishes(most_saved=0, forgets=True)),
            ({"store": True, "forget": False}, Wishes()),
        ],
    )
    def test_wish_is_read(self, ours, wishes):
        """Each key says what it is documented to; retention up to the operator's
        maximum."""
        reading = Reading()
        assert wishes == reading.of({"ucm": ours, "other": 1})
        assert [] == reading.log.calls

    def test_medium_that_no_tier_has_is_counted(self):
        """A typo is told once with the media that there are; none is meant by it."""
        reading = Reading(client=FakeClient(media=("disk", "Redis")))
        for medium in ("diks", "DISK", "redis", "CPU", "STORAGE", ""):
            filters = [{"medium": medium, "locality": "LOCAL"}]
            wishes = reading.of({"kv_load_tiers": filters})
            assert ((medium.lower(), "local"),) == wishes.tiers
        reading.of({"kv_load_tiers": [{"medium": "disk"}, {"medium": "s3"}]})
        assert {"kv_load_tiers": 2} == reading.ignored()
        (told,) = reading.log.calls
        assert "['diks']" == told.kwargs["value"]
        assert "disk, Redis, or give cpu or storage" in told.kwargs["remedy"]

    @pytest.mark.parametrize("client", [None, FakeClient(media=())])
    def test_medium_is_no_typo_while_media_are_not_known(self, client):
        """Without tiers, or before their agent was there, nobody can say what they have."""
        reading = Reading(client=client)
        wishes = reading.of({"kv_load_tiers": [{"medium": "diks"}]})
        assert ((("diks", ""),), {}) == (wishes.tiers, reading.ignored())

    def test_retention_fits_into_a_stamp(self):
        """However much an operator allows: stamps are nanoseconds in 64 bits."""
        wishes = Reading(most=1e300).of({"ucm": {"retain_seconds": 1e200}})
        assert wishes.retain_seconds * 1e9 < 2**62

    @pytest.mark.parametrize(
        ("ours", "key"),
        [
            (7, "ucm"),
            ({"retain": 1}, "ucm"),
            ({"retain_seconds": -math.inf}, "retain_seconds"),
            ({"retain_seconds": True}, "retain_seconds"),
            ({"retain_seconds": float("inf")}, "retain_seconds"),
            ({"retain_seconds": float("nan")}, "retain_seconds"),
            ({"retain_seconds": "1"}, "retain_seconds"),
            ({"store": 0}, "store"),
            ({"store": -(10**5000)}, "store"),
            ({"forget": "yes"}, "forget"),
        ],
    )
    def test_wish_that_makes_no_sense_is_as_if_not_given(self, ours, key):
        """It is counted each time and warned of once, with what to give; the request
        goes on."""
        reading = Reading()
        assert [Wishes()] * 2 == [reading.of({"ucm": ours}) for _ in range(2)]
        (call,) = reading.log.calls
        assert ("warning", ("wish.ignored",)) == (call.method_name, call.args)
        assert (key, True) == (call.kwargs["key"], "Give" in call.kwargs["remedy"])
        assert {key: 2} == reading.ignored()

    def test_any_number_of_unknown_keys_is_one_wish(self):
        """Nobody's request has the engine's thread go through a million of them; the
        first is told."""
        reading = Reading()
        ours = {"store": False, **{f"key {at}": at for at in range(1000)}}
        assert Wishes(most_saved=0) == reading.of({"ucm": ours})
        assert {"ucm": 1} == reading.ignored()
        (call,) = reading.log.calls
        assert "'key 0'" == call.kwargs["value"]

    @pytest.mark.parametrize(
        ("given", "wishes"),
        [
            ({"max_load_tokens": 0}, Wishes(most_loaded=0)),
            ({"max_load_tokens": 10**30}, Wishes()),
            ({"max_offload_tokens": 512}, Wishes(most_saved=512)),
            ({"max_offload_tokens": 9, "ucm": {"store": False}}, Wishes(most_saved=0)),
            ({"kv_load_tiers": []}, Wishes(tiers=())),
            (
                {"kv_load_tiers": [{"medium": "STORAGE"}, {"locality": "LOCAL"}]},
                Wishes(tiers=(("storage", ""), ("", "local"))),
            ),
        ],
    )
    def test_words_of_the_engine_are_read(self, given, wishes):
        """R-58: what the engine's own connector understands is understood here."""
        reading = Reading()
        assert wishes == reading.of(given)
        assert [] == reading.log.calls

    @pytest.mark.parametrize(
        ("given", "key", "wishes"),
        [
            ({"max_load_tokens": True}, "max_load_tokens", Wishes()),
            ({"max_load_tokens": -1}, "max_load_tokens", Wishes()),
            ({"max_offload_tokens": "9"}, "max_offload_tokens", Wishes()),
            ({"kv_load_tiers": "disk"}, "kv_load_tiers", Wishes()),
            ({"kv_load_tiers": [7]}, "kv_load_tiers", Wishes()),
            ({"kv_load_tiers": [{"medium": "x" * 99}]}, "kv_load_tiers", Wishes()),
            ({"kv_load_tiers": [{"medium": "\ud800"}]}, "kv_load_tiers", Wishes()),
            (
                {"kv_load_tiers": [{"locality": "moon"}, {"medium": "disk"}]},
                "kv_load_tiers",
                Wishes(tiers=(("disk", ""),)),
            ),
        ],
    )
    def test_words_of_the_engine_that_make_no_sense_are_counted(
        self, given, key, wishes
    ):
        """R-58: they are as if they were not given, as in the engine, and counted by name."""
        reading = Reading()
        assert wishes == reading.of(given)
        assert {key: 1} == reading.ignored()

    def test_hints_are_counted_and_ignored(self):
        """R-58: an orchestrator hears that nobody acts on what it says."""
        reading = Reading()
        assert [NO_WISHES] * 2 == [reading.of(kv_hints={"actions": []})] * 2
        assert {"kv_hints": 1} == reading.ignored()

    def test_priority_is_the_engines(self):
        """R-58: what the engine runs first is fetched first; one that serves in order of
        arrival lets nobody in front who says that he is in a hurry."""
        reading = Reading(is_ranked=True)
        assert Wishes(priority=-3) == reading.of(priority=-3)
        assert 1 << 31 == reading.of(priority=10**30).priority
        assert NO_WISHES is Reading().of(priority=-3)

    def test_tenant_is_the_salt(self):
        """Requests of one salt share a tenant, and one without a salt is nobody's."""
        of = Reading().of
        assert Wishes(tenant=tenant_of(b"a")) == of(salt="a")
        assert of(salt="a") == of({"x": 1}, salt="a") != of(salt="b")
        assert of(salt="\ud800").tenant


@pytest.fixture
def engine(tmp_path):
    """Return both halves over a small slab."""
    engine = Engine(make_setup(tmp_path, log={"level": "off"}))
    engine.register()
    yield engine
    engine.scheduler.close()
    engine.worker.close()


def asking(name: str, salt: str | None = None, **ours: object) -> SimpleNamespace:
    """Return a request of three blocks that asks for something."""
    one = request(name)
    one.kv_transfer_params, one.cache_salt = {"ucm": ours}, salt
    return one


def compute(engine: Engine, one: SimpleNamespace):
    """Compute a request that hits nothing; return its plan, carried out."""
    assert (0, False) == engine.scheduler.match(one, 0)
    engine.scheduler.allocated(one, [[1, 2, 3]], 0)
    envelope = engine.plan([one], (1, 2, 3))
    engine.work(envelope)
    return plan_in(envelope)


class TestHalves:
    def test_moment_and_tenant_go_with_what_is_saved(self, engine):
        """A retained request's blocks count as used so much later, and are its salt's."""
        now = engine.scheduler._setup.threads.monotonic()
        one = asking("r", salt="a", retain_seconds=3600)
        (order,) = compute(engine, one).saves
        (owner,) = order.owners
        assert tenant_of(b"a") == owner.tenant
        assert 0 <= owner.used_ns / 1e9 - (now + 3600) < 600
        assert not engine.scheduler.finished("r")
        assert engine.idle()

    def test_request_that_is_not_to_be_stored_leaves_nothing(self, engine):
        """``store`` decides about what it computes, also what it leaves at its end."""
        assert () == compute(engine, asking("r", store=False)).saves
        assert not engine.scheduler.finished("r", [[1, 2, 3]])
        assert (0, False) == engine.scheduler.match(request("q"), 0)
        assert not engine.scheduler.finished("q")
        assert engine.idle()

    def test_request_is_saved_as_far_as_it_says(self, engine):
        """R-58: of three blocks two are within ``max_offload_tokens``; the third is computed
        by the next one, which hears that it was not to be saved."""
        one = request("r")
        one.kv_transfer_params = {"max_offload_tokens": 40}
        (order,) = compute(engine, one).saves
        assert 2 == len(order.block_ids)
        assert not engine.scheduler.finished("r", [[1, 2, 3]])
        other = request("q")
        assert (32, True) == engine.scheduler.match(other, 0)
        engine.scheduler.allocated(other, [[5, 6, 7]], 0)
        counted = engine.scheduler.counters.total
        assert 1 == counted("ucm_missed_lookups_total", reason="admission")
        engine.scheduler.finished("q")
        assert engine.idle()

    @pytest.mark.parametrize(("limit", "found"), [(0, 0), (15, 0), (33, 32), (48, 48)])
    def test_request_is_loaded_as_far_as_it_says(self, engine, limit, found):
        """R-58: whole blocks within ``max_load_tokens`` are loaded, and a limit that is the
        reason is told as one."""
        engine.save("r")
        one = request("s")
        one.kv_transfer_params = {"max_load_tokens": limit}
        assert (found, found > 0) == engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], 0)
        counted = engine.scheduler.counters.total
        is_short = counted("ucm_missed_lookups_total", reason="admission")
        assert (found < 48) == is_short
        engine.scheduler.finished("s")
        assert engine.idle()

    @pytest.mark.parametrize("params", [None, {"max_load_tokens": 48}])
    def test_request_that_skips_the_prefix_cache_loads_nothing_and_is_saved(
        self, engine, params
    ):
        """One that asks for the log-probabilities of its prompt has them computed for all its
        tokens, where the engine leaves that to its connectors; the miss is told as its wish."""
        engine.save("r")
        one = request("s", blocks=5)
        one.skip_reading_prefix_cache, one.kv_transfer_params = True, params
        assert (0, False) == engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[4, 5, 6, 7, 8]], 0)
        counted = engine.scheduler.counters.total
        assert 1 == counted("ucm_missed_lookups_total", reason="admission")
        engine.work(engine.plan([one], (4, 5, 6, 7, 8)))
        engine.scheduler.finished("s")
        assert (80, True) == engine.scheduler.match(request("q", blocks=5), 0)
        engine.scheduler.finished("q")
        assert engine.idle()

    def test_wish_is_read_once_in_a_life(self, engine):
        """R-58: what is ignored is counted once, however often the engine asks."""
        one = asking("r", retain=1)
        for _ in range(3):
            engine.scheduler.match(one, 0)
        counted = engine.scheduler.counters.total
        assert 1 == counted("ucm_ignored_wishes_total", key="ucm")
        engine.scheduler.finished("r")
        assert engine.idle()

    @pytest.mark.parametrize("in_doubt", [False, True])
    def test_forgotten_prompt_is_deleted_when_its_request_ends(self, engine, in_doubt):
        """Its own blocks are gone, whoever stored them, and not those of others; while
        it runs it hits them. The agent is told of them behind that. It is so, too, where
        nobody knows at its end whether the weights are still those of these blocks."""
        engine.memory.random_(1, 200)
        engine.save("r")
        one = asking("s", forget=True)
        one.num_prompt_tokens, one.block_hashes = 32, HASHES[:3]
        assert (48, True) == engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], 48)
        assert (set(), {"s"}, set()) == engine.work(engine.plan())
        assert (48, True) == engine.scheduler.match(request("q"), 0)
        client, counters = FakeClient(), engine.scheduler.counters
        engine.scheduler._tiers._health = AgentHealth(client, counters)
        digest = engine.scheduler._adapter._matcher.keyspace_digest
        if in_doubt:
            engine.scheduler.reset_cache()
        engine.scheduler.finished("s", [[5, 6, 7]])
        assert engine.scheduler._forgetter.close()
        packer = KeyPacker(digest, GroupId(0), ShardId(0))
        store = engine.scheduler._store
        assert [False, False, True] == store.contains(packer.pack(HASHES[:3]))
        assert packer.pack(HASHES[:2]) == client.forgotten
        engine.scheduler.finished("q")
        assert engine.idle()

    def test_request_that_never_had_blocks_forgets_nothing(self, engine):
        """Nothing is known of it."""
        engine.save("r")
        engine.scheduler.match(asking("s", forget=True), 0)
        assert not engine.scheduler.finished("s")
        assert (48, True) == engine.scheduler.match(request("q"), 0)
