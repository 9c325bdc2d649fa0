# SPDX-License-Identifier: Apache-2.0
"""Both halves when the engine's weights may have changed, over a slab."""

import contextlib
import fcntl
from types import SimpleNamespace

import pytest
import torch

from tests.integration.vllm.test_halves import Engine, make_setup, request
from tests.integration.vllm.weights_kit import TinyModel, parts_of
from tests.stores.slab_kit import index_path
from ucm.config import LogConfig
from ucm.integration.vllm.doubts import Doubts, OwnCache
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.metrics import Counters
from ucm.scheduler.messages import WeightsNews
from ucm.stores.slab._layout import Word
from ucm.tracing import open_log

NOTHING = (0, False)
HIT = (48, True)


class WeighedEngine(Engine):
    """An engine with a model, and a prefix cache of its own."""

    def __init__(self, setup):
        super().__init__(setup)
        self.model = TinyModel()
        self.pool = SimpleNamespace()
        self.empty()
        self.scheduler.watch_cache(self.pool)
        self.register(parts_of(self.model))
        self.work(self.plan())

    def empty(self):
        """Empty the engine's own cache, as ``BlockPool.reset_prefix_cache`` does."""
        self.pool.cached_block_hash_to_block = {}

    def ask(self):
        """Run the steps in which a doubt is asked and answered."""
        for _ in range(2):
            self.work(self.plan())
            self.worker._weights.wait(60.0)
        self.work(self.plan())

    def look_up(self):
        """Return what is found of the request that was saved."""
        return self.scheduler.match(request("q"), 0)


@pytest.fixture
def engine(tmp_path):
    """Return an engine that has saved a request."""
    engine = WeighedEngine(make_setup(tmp_path))
    with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
        engine.memory[:, 1:4] = torch.arange(6).reshape(2, 3, 1) + 7
        assert not engine.save()
        assert HIT == engine.look_up()
        yield engine


class TestChanged:
    def test_old_blocks_are_not_served_after_new_weights(self, engine):
        """R-07: weights that changed without anybody seeing it, and a reset of the
        engine's own cache alone: what was stored is not found, what is stored then is,
        and the former blocks again with the former weights."""
        engine.model.fill(2.0)
        engine.empty()
        assert (None, False) == engine.look_up()
        engine.ask()
        assert NOTHING == engine.look_up()
        engine.save("n")
        assert HIT == engine.look_up()
        engine.model.fill(1.0)
        engine.empty()
        engine.ask()
        assert HIT == engine.look_up()
        engine.memory[:, 5:8] = 0
        assert (set(), {"s"}, set()) == engine.load()
        assert torch.equal(engine.memory[:, 1:4], engine.memory[:, 5:8])

    def test_loaded_weights_without_a_reset_stop_all(self, engine):
        """R-07: as long as the engine's own cache has blocks of the former weights
        nothing is found or saved; with the same weights all goes on."""
        engine.model.load_weights(2.0)
        engine.work(engine.plan())
        engine.ask()
        assert NOTHING == engine.look_up()
        engine.scheduler.reset_cache()
        engine.ask()
        assert NOTHING == engine.look_up()
        offered = engine.worker._counters.total("ucm_offered_parts_total")
        engine.save("n")
        assert offered == engine.worker._counters.total("ucm_offered_parts_total")
        assert 0 == engine.scheduler.stats().data["gauges"]["ucm_weights_proven"]
        engine.empty()
        engine.model.load_weights(1.0)
        engine.ask()
        assert HIT == engine.look_up()
        assert 1 == engine.scheduler.stats().data["gauges"]["ucm_weights_proven"]

    def test_first_blocks_behind_a_reset_count_however_late_they_come(self, engine):
        """R-07: an engine that stood idle behind a reset has blocks of its own with its first
        request, and nothing is found once weights are loaded without another reset."""
        engine.empty()
        engine.ask()
        assert HIT == engine.look_up()
        engine.save("n")
        engine.model.load_weights(2.0)
        engine.work(engine.plan())
        engine.ask()
        assert NOTHING == engine.look_up()
        assert engine.scheduler._doubts.name is None

    def test_blocks_of_weights_between_a_reset_and_a_load_are_not_stored(self, engine):
        """R-07: weights that nobody had read yet compute a request after a reset, and
        the former ones come back: what the engine's own cache has of these is not
        stored under the former key, before the next reset."""
        engine.model.fill(2.0)
        engine.empty()
        one = request("between", 5)
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3, 4, 5]], 0)
        plan = engine.plan([one], [1, 2, 3, 4, 5])
        engine.worker.bind(plan)
        engine.model.load_weights(1.0)
        engine.worker.clear()
        engine.scheduler.finished("between")
        engine.ask()
        two = request("later", 5)
        engine.scheduler.match(two, 0)
        engine.scheduler.allocated(two, [[1, 2, 3, 4, 5]], 0)
        assert not plan_in(engine.plan([two], [1, 2, 3, 4, 5])).saves
        assert 0 == engine.scheduler.stats().data["gauges"]["ucm_weights_proven"]

    def test_engine_that_cannot_be_read_forgets_at_each_reset(self, tmp_path):
        """R-07: without a model nothing is proven: after a reset of the engine's own
        cache nothing of before is found, and what is saved then is."""
        engine = Engine(make_setup(tmp_path))
        pool = SimpleNamespace(cached_block_hash_to_block={})
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.scheduler.watch_cache(pool)
            engine.register()
            engine.save()
            pool.cached_block_hash_to_block = {}
            WeighedEngine.ask(engine)
            assert NOTHING == engine.scheduler.match(request("q"), 0)
            engine.save("n")
            assert HIT == engine.scheduler.match(request("q"), 0)


class TestSame:
    @pytest.mark.parametrize("resets", ["own", "connector", "both"])
    def test_reset_with_the_same_weights_loses_nothing(self, engine, resets):
        """R-08: sleep, pause and reset with unchanged weights end under the very same
        keys, whichever caches the engine resets."""
        if resets != "connector":
            engine.empty()
        if resets != "own":
            assert engine.scheduler.reset_cache()
        assert (None, False) == engine.look_up()
        engine.ask()
        assert (set(), {"s"}, set()) == engine.load()

    def test_other_engine_of_the_node_does_not_notice(self, engine, tmp_path):
        """R-08: while one engine resets and loads other weights, another one over the
        same store finds what it found."""
        other = SchedulerHalf(make_setup(tmp_path))
        with contextlib.closing(other):
            other.agree([engine.worker.handshake()])
            assert HIT == other.match(request("q"), 0)
            for weights in (1.0, 2.0):
                engine.model.load_weights(weights)
                engine.empty()
                assert engine.scheduler.reset_cache()
                assert HIT == other.match(request("q"), 0)
                engine.ask()
                assert HIT == other.match(request("q"), 0)

    def test_reset_does_not_wait_for_the_lock_of_the_index(self, engine, tmp_path):
        """R-09: while another process stands still within a change of the index, every
        reset succeeds and counts no look-up; afterwards all is found."""
        with index_path(tmp_path / "slab").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            engine.worker._store._slab.index.header[Word.VERSION] |= 1
            for _ in range(3):
                engine.empty()
                assert engine.scheduler.reset_cache()
            engine.ask()
            engine.worker._store._slab.index.header[Word.VERSION] += 1
        counted = engine.scheduler._counters.total
        assert 0 == counted("ucm_failed_lookups_total", reason="unavailable")
        assert HIT == engine.look_up()

    def test_reset_before_the_ranks_have_agreed_is_asked_as_well(self, tmp_path):
        """R-08: a reset before the first step ends as any other one."""
        engine = Engine(make_setup(tmp_path))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            assert engine.scheduler.reset_cache()
            assert NOTHING == engine.scheduler.match(request("q"), 0)
            engine.register(parts_of(TinyModel()))
            WeighedEngine.ask(engine)
            engine.save()
            engine.load()


class TestInFlight:
    def test_save_over_a_reset_keeps_the_key_of_its_weights(self, engine):
        """R-10: a save that was ordered before the weights changed is found under the
        former weights only, however late it ends."""
        one = request("late", 5)
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3, 4, 5]], 0)
        plan = engine.plan([one], [1, 2, 3, 4, 5])
        engine.model.fill(2.0)
        engine.empty()
        assert engine.scheduler.reset_cache()
        engine.work(plan)
        engine.scheduler.finished("late")
        engine.ask()
        again = request("again", 5)
        assert NOTHING == engine.scheduler.match(again, 0)
        engine.model.fill(1.0)
        engine.empty()
        engine.ask()
        assert (80, True) == engine.scheduler.match(again, 0)

    def test_rank_that_saw_writing_saves_and_loads_nothing(self, engine):
        """R-10: bytes that were computed with new weights, before the scheduler knew,
        are not stored under the former key; nor are former blocks loaded. Blocks are
        released and the load is told as failed."""
        engine.model.load_weights(2.0)
        one, two = request("new", 5), request("s")
        tokens, _ = engine.scheduler.match(two, 0)
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3, 4, 5]], 0)
        engine.scheduler.allocated(two, [[6, 7, 8]], tokens)
        plan = engine.plan([one], [1, 2, 3, 4, 5])
        assert plan_in(plan).saves
        assert (set(), {"s"}, {"s"}) == engine.work(plan)
        assert not engine.scheduler.finished("new")
        engine.scheduler.finished("s")
        assert "" == engine.worker._runtime.failure
        engine.model.load_weights(1.0)
        engine.empty()
        engine.ask()
        assert (48, True) == engine.scheduler.match(request("again", 5), 0)

    def test_load_that_was_promised_before_a_reset_ends(self, engine):
        """R-08: a load that the engine has decided on before a doubt is ordered, misses
        and is told as failed, so that its request does not wait for ever."""
        two = request("s")
        tokens, _ = engine.scheduler.match(two, 0)
        engine.scheduler.reset_cache()
        engine.scheduler.allocated(two, [[5, 6, 7]], tokens)
        assert (set(), {"s"}, {"s"}) == engine.work(engine.plan())
        engine.scheduler.finished("s")
        engine.ask()
        assert engine.scheduler.stats().reduce()["ucm_load_failures_total"] > 0
        assert HIT == engine.look_up()


class TestSleep:
    def test_sleep_lets_go_of_the_memory_and_takes_it_again(self, engine):
        """R-08: while an engine sleeps its KV cache is not touched, what comes then
        fails, and all that was stored is there when it has woken; each twice."""
        before = engine.memory[:, 1:4].clone()
        for _ in range(2):
            engine.scheduler.reset_cache()
            engine.empty()
            for _ in range(2):
                engine.worker.unregister()
            engine.memory[:] = 99
            for _ in range(2):
                engine.worker.restore()
            engine.ask()
            assert (set(), {"s"}, set()) == engine.load()
            engine.scheduler.finished("s")
            assert torch.equal(before, engine.memory[:, 5:8])
        engine.worker.unregister()
        assert (set(), {"s"}, {"s"}) == engine.load()
        assert "" == engine.worker._runtime.failure
        assert (engine.memory[:, 1:4] == 99).all()

    def test_engine_without_hooks_is_seen_falling_asleep(self, engine):
        """R-08: engines that have no hook for it are watched where they fall asleep."""
        device = engine.worker._device
        watched = engine.worker._weights._watched
        (owner,) = [each.owner for each in watched if each.name == "sleep"]
        owner.sleep(level=1)
        assert device._tensors is None
        owner.wake_up()
        assert device._tensors is not None
        engine.ask()
        assert HIT == engine.look_up()


class TestDoubts:
    @pytest.fixture
    def clock(self):
        """Return a clock that stands still."""
        return SimpleNamespace(now=100.0)

    @pytest.fixture
    def doubts(self, clock):
        """Return the doubts of one rank."""
        return Doubts(
            1,
            clock=lambda: clock.now,
            counters=Counters(),
            log=open_log(LogConfig(level="off"), "scheduler"),
            on_doubt=lambda _: None,
            on_proof=lambda _: None,
        )

    def test_requests_ask_again_for_a_moment_only(self, doubts, clock):
        """R-08: a request waits for the weights to be read, but not for long; an engine
        that was idle meanwhile has not asked yet."""
        assert not doubts.may_end_soon
        doubts.reset()
        clock.now += 60
        assert doubts.may_end_soon
        for _ in range(2):
            doubts.sent(in_use=False)
            clock.now += 0.05
        clock.now += 0.09
        assert doubts.may_end_soon
        clock.now += 0.02
        assert not doubts.may_end_soon
        assert doubts.name is None

    def test_nobody_waits_for_weights_that_are_mixed(self, doubts):
        """R-07: where only a reset helps, requests are computed at once."""
        doubts.told(0, WeightsNews(epoch=0, is_written=True))
        doubts.sent(in_use=True)
        doubts.told(0, WeightsNews(epoch=1, digest=b"new", base=b"old"))
        assert not doubts.may_end_soon
        assert doubts.name is None


class TestOwnCache:
    def test_map_that_was_replaced_is_noticed_once(self):
        """R-07: only a reset puts another map in its place; blocks come and go in it."""
        pool = SimpleNamespace(cached_block_hash_to_block={})
        cache = OwnCache(pool)
        pool.cached_block_hash_to_block["hash"] = 1
        assert not cache.was_emptied()
        pool.cached_block_hash_to_block = {}
        assert [True, False] == [cache.was_emptied() for _ in range(2)]

    def test_engines_pool_shows_it(self):
        """R-07: the pool of the engine that is installed does so."""
        from vllm.v1.core.block_pool import BlockPool

        pool = BlockPool(4, enable_caching=True, hash_block_size=16)
        cache = OwnCache(pool)
        pool.free_blocks(pool.get_new_blocks(2))
        assert not cache.was_emptied()
        assert pool.reset_prefix_cache()
        assert cache.was_emptied()

    def test_engine_without_a_pool_is_never_seen(self):
        """R-07: without a pool nothing is noticed, and nothing raises."""
        assert not OwnCache(None).was_emptied()
        assert not OwnCache(object()).was_emptied()
