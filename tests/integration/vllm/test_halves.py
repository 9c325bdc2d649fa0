# SPDX-License-Identifier: Apache-2.0
"""Both halves of the connector hand in hand, over a slab and without an engine."""

import contextlib
import fcntl
import shutil
from types import SimpleNamespace

import attrs
import pytest
import torch

from tests.integration.vllm.kit import NUM_BLOCKS, engine_config, plain_cache
from tests.kit.lockstep import check_trace, read_traces
from tests.stores.slab_kit import index_path
from tests.traces import logs_closed
from ucm.errors import ConfigError, DeviceError, LayoutError, MessageError
from ucm.integration.vllm.messages import RankHandshake, plan_in
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.reasons import Reason
from ucm.scheduler.messages import Failure, StepReport, encode
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import Word
from ucm.stores.slab._opened import _in_this_process
from ucm.tracing import STORE_CAVEAT

PAGE = 1024
HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def request(name, blocks=3):
    """Return a request of whole blocks; equal prefixes have equal hashes."""
    return SimpleNamespace(
        request_id=name,
        num_tokens=16 * blocks,
        num_prompt_tokens=16 * blocks,
        num_computed_tokens=16 * blocks,
        block_hashes=HASHES[:blocks],
    )


class Engine:
    """What an engine does with a connector, step by step, for one rank."""

    def __init__(self, setup):
        self.scheduler = SchedulerHalf(setup)
        self.worker = WorkerHalf(setup, 0, "cpu")
        self.memory = torch.zeros((2, NUM_BLOCKS, PAGE), dtype=torch.uint8)

    def register(self, parts=None):
        """Hand over the KV cache, and what there is of an engine."""
        self.worker.register(dict(zip("ab", self.memory, strict=True)), parts)
        self.scheduler.agree([self.worker.handshake()])

    def plan(self, new=(), blocks=(), preempted=()):
        """Return the plan of a step that schedules *new* requests whole."""
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: [list(blocks)], boundary_state_offloads={}
            ),
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.request_id,
                    num_computed_tokens=0,
                    block_ids=[list(blocks)],
                )
                for one in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[],
                resumed_req_ids=set(),
                num_computed_tokens=[],
                new_block_ids=[],
            ),
            num_scheduled_tokens={one.request_id: one.num_tokens for one in new},
        )
        return self.scheduler.plan(output)

    def work(self, plan, times=1):
        """Carry a plan out and wait for its end; return what is finished."""
        worker = self.worker
        worker.fence(plan)
        worker.bind(plan)
        for _ in range(times):
            worker.start_loads()
            worker.submit_saves()
        worker.clear()
        sent, received, failed = worker.finished()
        while worker.counts()["open"]:
            worker._runtime.wait_for_notice(5)
            for told, new in zip(
                (sent, received, failed), worker.finished(), strict=True
            ):
                told |= new
        self.scheduler.apply(
            SimpleNamespace(
                kv_connector_worker_meta=worker.report(),
                finished_recving=received,
                finished_sending=sent,
            )
        )
        return sent, received, failed

    def save(self, name="r", blocks=(1, 2, 3)):
        """Compute a request of three blocks and save it."""
        one = request(name)
        self.scheduler.match(one, 0)
        self.scheduler.allocated(one, [list(blocks)], 0)
        self.work(self.plan([one], blocks))
        return self.scheduler.finished(name)

    def load(self, name="s", blocks=(5, 6, 7)):
        """Load what is stored of a request; return what is finished."""
        one = request(name)
        tokens, parked = self.scheduler.match(one, 0)
        assert (48, True) == (tokens, parked)
        self.scheduler.allocated(one, [list(blocks)], tokens)
        return self.work(self.plan())

    def idle(self):
        """Tell whether no per-request container has anything left."""
        counts = (*self.scheduler.counts().values(), *self.worker.counts().values())
        return not any(counts)


def make_setup(tmp_path, **config):
    """Return a setup over a small slab."""
    extra = {"store": {"path": str(tmp_path / "slab"), "capacity": "1MiB"}, **config}
    model = engine_config(str(tmp_path), weights_revision="r", **extra)
    return Setup.of(model, plain_cache())


@contextlib.contextmanager
def traced_engine(tmp_path):
    """Run both halves, with the KV cache registered, and check their trace."""
    traces = tmp_path / "traces"
    log = {"level": "debug", "directory": str(traces)}
    with logs_closed():
        engine = Engine(make_setup(tmp_path, log=log))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.register()
            yield engine
    summary = check_trace(read_traces(traces))
    assert 1 == summary.events["scheduler.closed"] == summary.events["runtime.closed"]


@pytest.fixture
def engine(tmp_path):
    """Return both halves, with the KV cache registered; checks their trace."""
    with traced_engine(tmp_path) as engine:
        yield engine


def test_step_that_computes_nothing_gives_way(engine, monkeypatch):
    """In process it would come again at once, while threads wait for the interpreter
    lock; a step that computes something is not held up."""
    given = []
    threads = type(engine.scheduler._setup.threads)
    monkeypatch.setattr(threads, "give_way", lambda _: given.append(1))
    engine.save()
    before = len(given)
    engine.work(engine.plan())
    assert (0, 1) == (before, len(given))


class TestTogether:
    def test_saved_prefix_is_found_and_loaded(self, engine):
        """What one request computed is loaded for the next, byte for byte, and
        nothing is left of either."""
        engine.memory[:, 1:4] = torch.arange(6).reshape(2, 3, 1) + 7
        assert (0, False) == engine.scheduler.match(request("q"), 0)
        assert not engine.save()
        assert (set(), {"s"}, set()) == engine.load()
        assert torch.equal(engine.memory[:, 1:4], engine.memory[:, 5:8])
        engine.scheduler.finished("s")
        engine.scheduler.finished("q")
        assert engine.idle()
        engine.worker.close()  # behind it no thread counts any more
        told = engine.scheduler.stats().reduce()
        assert (3, 3) == (
            told["ucm_saved_blocks_total"],
            told["ucm_loaded_blocks_total"],
        )
        assert (48, 48) == (
            told["ucm_matched_tokens_total"],
            told["ucm_loaded_tokens_total"],
        )
        parts = engine.worker.stats().reduce()
        assert 6 == parts["ucm_settled_parts_total"]
        assert not any({"blocks", "tokens", "holds"} & {*n.split("_")} for n in parts)
        assert engine.worker.stats() is engine.scheduler.stats() is None

    def test_load_may_be_ordered_steps_after_it_was_matched(self, engine):
        """S1-15: vLLM 0.33 may tell the blocks of a match steps later; where it asked
        twice the last answer counts, and a request that ends before leaves nothing."""
        engine.memory.random_(1, 200)
        engine.save()
        late, gone = request("s"), request("t")
        for one in (gone, late, late):
            assert (48, True) == engine.scheduler.match(one, 0)
        for _ in range(2):
            assert (set(), set(), set()) == engine.work(engine.plan())
        assert not engine.scheduler.finished("t")
        assert (32, True) == engine.scheduler.match(late, 16)
        engine.memory[:, 4:7] = 0
        engine.scheduler.allocated(late, [[4, 5, 6]], 32)
        assert (set(), {"s"}, set()) == engine.work(engine.plan())
        assert 0 == engine.memory[:, 4].sum()
        assert torch.equal(engine.memory[:, 2:4], engine.memory[:, 5:7])
        engine.scheduler.finished("s")
        assert engine.idle()

    def test_request_that_loads_what_it_lost_counts_what_it_had_decoded(self, engine):
        """R-18: an engine that resets its cache takes blocks back, and has the same
        request load in the same step; the two that it had decoded are dropped."""
        engine.save()
        one = request("s")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        engine.work(engine.plan([one], [1, 2, 3]))
        one.block_hashes, one.num_tokens = HASHES[:5], 81
        assert (48, True) == engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], 48)
        engine.work(engine.plan(preempted=["s"]))
        assert 2 == engine.scheduler._adapter.totals.dropped_blocks

    def test_each_plan_is_carried_out_once(self, engine):
        """S2-08: hooks that are called again with the same plan do nothing more."""
        one = request("r")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        engine.work(engine.plan([one], [1, 2, 3]), times=3)
        assert 3 == engine.worker._counters.total("ucm_offered_parts_total")

    def test_failed_load_is_told_as_received_and_failed(self, engine):
        """S4-15: a load that fails is told once, in both, and blamed in the report."""
        engine.save()
        one = request("s")
        tokens, _ = engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], tokens)
        plan = engine.plan()
        engine.worker._store.clear(b"")
        assert (set(), {"s"}, {"s"}) == engine.work(plan)
        assert (set(), set(), set()) == engine.worker.finished()
        assert (0, False) == engine.scheduler.match(request("t"), 0)

    def test_failed_block_is_found_again(self, engine, monkeypatch):
        """R-15: on an engine that never saves, time ends a denial; the door tells it."""
        now = [100.0]
        engine.save()
        monkeypatch.setattr(engine.scheduler, "_clock", lambda: now[0])
        one = request("s")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[5, 6, 7]], 48)
        (load,) = plan_in(engine.plan()).loads
        failure = Failure(
            transfer_id=load.transfer_id,
            request_id="s",
            generation=load.generation,
            group_id=0,
            bad_hash=HASHES[0],
            reason=Reason.EVICTED,
        )
        report = StepReport(rank=0, loads_done=(load.transfer_id,), failures=(failure,))
        engine.scheduler._apply_report(encode(report))
        assert (0, False) == engine.scheduler.match(request("t"), 0)
        now[0] += 1
        assert (48, True) == engine.scheduler.match(request("t"), 0)

    def test_slab_that_is_removed_is_a_miss(self, engine, tmp_path):
        """R-23, R-32: what is left of a slab serves nobody, and the engine goes on:
        look-ups are misses, saves are failed and counted."""
        engine.save()
        shutil.rmtree(tmp_path / "slab")
        for slab in list(_in_this_process):  # a quarter of a second later
            slab._look_at = 0.0
        assert (0, False) == engine.scheduler.match(request("s"), 0)
        engine.save("t", (5, 6, 7))
        assert 3 == engine.worker._counters.total(
            "ucm_settled_parts_total", outcome="failed", reason="unavailable"
        )
        failed = engine.scheduler._counters.total("ucm_failed_lookups_total")
        assert 2 == failed

    def test_store_that_stands_still_holds_up_three_look_ups_at_most(
        self, engine, tmp_path
    ):
        """X-14: while a process stands still within a change of the index, look-ups are
        misses: three behind their deadline, all others at once, and counted."""
        engine.save()
        with index_path(tmp_path / "slab").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            engine.worker._store._slab.index.header[Word.VERSION] |= 1
            for _ in range(50):
                assert (0, False) == engine.scheduler.match(request("s"), 0)
        counted = engine.scheduler._counters.total
        assert 3 == counted("ucm_failed_lookups_total", reason="unavailable")
        assert 47 == counted("ucm_bypassed_lookups_total")

    def test_failed_runtime_is_told_once_and_plans_end(self, engine):
        """S2-13: a worker that serves nothing more says so, and is asked for nothing."""
        engine.worker._runtime._fail("test")
        one = request("r")
        engine.work(engine.plan())
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        assert plan_in(engine.plan([one], [1, 2, 3])).is_empty
        assert engine.worker.report() is None

    def test_hold_that_was_given_up_is_told_and_not_waited_for(self, engine, tmp_path):
        """R-16: a rank whose copy never ended is in the scheduler's log and numbers; its
        request's blocks go back to the engine at once."""
        one = request("r")
        engine.scheduler.match(one, 0)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        (save,) = plan_in(engine.plan([one], [1, 2, 3])).saves
        report = StepReport(rank=0, quarantined=(save.transfer_id,))
        engine.scheduler._apply_report(encode(report))
        assert not engine.scheduler.finished("r")
        told = engine.scheduler.stats()
        assert 1 == told.reduce()["ucm_quarantined_holds_total"]
        assert 0 == told.data["gauges"]["ucm_held_blocks"]
        for _ in range(2):
            engine.scheduler.close()
        events = list(read_traces(tmp_path / "traces"))
        (given_up,) = (each for each in events if each["event"] == "hold.quarantined")
        assert (save.transfer_id, 0) == (given_up["hold_id"], given_up["rank"])
        assert [0] == [each["holds"] for each in events if "holds" in each]


class TestStart:
    def test_slab_of_another_size_is_warned_of(self, tmp_path):
        """R-31: a worker's log says why its capacity is not the one that was set."""
        block_bytes = make_setup(tmp_path).layout.max_block_bytes
        path, nbytes = str(tmp_path / "slab"), 1 << 21
        other = SlabStore(path=path, capacity_bytes=nbytes, block_bytes=block_bytes)
        with other, traced_engine(tmp_path):
            pass
        events = read_traces(tmp_path / "traces")
        (told,) = (each for each in events if each["event"] == STORE_CAVEAT)
        assert f"{nbytes} bytes, not the {nbytes // 2}" in told["remedy"]

    def test_unknown_device_is_refused(self, tmp_path):
        """A device that nobody can copy from stops the start."""
        with pytest.raises(ConfigError, match="device"):
            WorkerHalf(make_setup(tmp_path), 0, "tpu")

    def test_ranks_must_agree_with_the_scheduler(self, engine):
        """A rank of another key space is refused with both values; telling the same
        twice passes."""
        engine.scheduler.agree([engine.worker.handshake()])
        facts = engine.worker.handshake().facts()
        other = attrs.evolve(
            facts, keyspace=attrs.evolve(facts.keyspace, weights="others")
        )
        with pytest.raises(
            LayoutError, match="weights='others', the scheduler has 'r'"
        ):
            engine.scheduler.agree([RankHandshake.of(other)])

    def test_foreign_plan_is_refused(self, engine):
        """S1-10: neither fence nor bind takes another connector's metadata."""
        for hook in (engine.worker.fence, engine.worker.bind):
            with pytest.raises(MessageError):
                hook(object())

    def test_orders_before_the_cache_are_an_error(self, tmp_path):
        """Orders that come before register_kv_caches name what is missing; without a
        runtime nothing is finished, and close lets go of the store."""
        engine = Engine(make_setup(tmp_path))
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.scheduler.agree(engine.worker.report().handshakes)
            one = request("r")
            engine.scheduler.match(one, 0)
            engine.scheduler.allocated(one, [[1, 2, 3]], 0)
            engine.worker.bind(engine.plan([one], [1, 2, 3]))
            with pytest.raises(DeviceError, match="register_kv_caches"):
                engine.worker.submit_saves()
            assert (set(), set(), set()) == engine.worker.finished()
            assert engine.worker.report() is None
