# SPDX-License-Identifier: Apache-2.0
"""A tier of ours in trouble: misses, never a wrong byte, and nobody waits for ever."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clocks import AdvancingThreads
from tests.e2e.connector import corrupt
from tests.integration.vllm.test_tier import served
from tests.integration.vllm.tier_kit import (
    CHUNK,
    LIMIT_S,
    Engine,
    engine,
    keys_of,
    plant,
    slab,
)
from ucm.cache import opening
from ucm.devices.cpu import CPUDevice
from ucm.errors import BlockInUseError, DeviceTimeoutError, StoreUnavailableError
from ucm.integration.vllm import tier as tier_module
from ucm.testing.faults import Fault, FaultDevice, FaultPlan, Gate, raising
from ucm.threads import SYSTEM

GONE = raising(StoreUnavailableError("gone"))
PROMOTIONS = "vllm:kv_offload_tiering_promotion_job_failures"
CASCADES = "vllm:kv_offload_tiering_cascade_job_failures"


def counted(one: Engine, name: str) -> int:
    """Return what vLLM has counted of our tier since the last call."""
    stats = one.manager.get_stats()
    return (
        0 if stats is None else stats.data["data"].get(name, {}).get(("1:UCMTier",), 0)
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AdvancingThreads:
    """A clock that the test puts forward."""
    clock = AdvancingThreads()
    monkeypatch.setattr(SYSTEM, "monotonic", clock.monotonic)
    return clock


class TestDamage:
    def test_damaged_chunks_are_not_promoted(self, tmp_path: Path) -> None:
        """Their checksums are wrong: the request computes them, and so does the next."""
        keys = keys_of(4)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            corrupt(tmp_path / "slab")
            assert 0 == served(one, keys)
            assert 0 == one.tier._cache.statistics().loaded_blocks
            assert 1 == counted(one, PROMOTIONS)
            assert 0 == served(one, keys, "next")
            assert 0 == counted(one, PROMOTIONS)  # they are forgotten
            one.store(keys)
            assert 4 == served(one, keys, "last")

    def test_those_before_the_first_damaged_one_are_kept(self, tmp_path: Path) -> None:
        """A promotion that fails in the middle has loaded its beginning."""
        keys = keys_of(6)
        with engine(slab(tmp_path / "slab"), queue={"span_bytes": CHUNK}) as one:
            one.store(keys[3:])
            corrupt(tmp_path / "slab")
            one.store(keys[:3], "beginning")
            assert 3 == served(one, keys)
            assert 1 == counted(one, PROMOTIONS)

    def test_chunk_that_goes_before_it_is_loaded_is_tried_once(
        self, tmp_path: Path
    ) -> None:
        """It was there when it was asked for: no request goes on asking for it."""
        keys = keys_of(3)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            for name in ("r", "s"):
                one.request(name, keys)
            one.find("r", keys)
            one.find("s", keys)
            one.step()
            one.tier._cache.flush()
            one.tier._cache.statistics()  # asked behind the question
            assert 3 == one.tier._cache.forget(keys).in_store
            assert [0, 0] == [one.found(name, keys) for name in ("r", "s")]
            assert 1 == counted(one, PROMOTIONS)

    def test_chunk_that_cannot_be_begun_to_load_is_tried_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A load that is refused on the spot is a miss as well, or the engine would promote
        the chunk again in each step, and its request would never run."""
        keys = keys_of(3)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            refused = []

            def begin_load(*_: object, **__: object) -> None:
                assert not refused
                refused.append(1)
                raise BlockInUseError(0)

            monkeypatch.setattr(one.tier._cache, "begin_load", begin_load)
            assert 0 == served(one, keys)
            assert 1 == counted(one, PROMOTIONS)

    def test_store_that_is_removed_has_nothing(self, tmp_path: Path) -> None:
        """Its files are taken away under a running engine."""
        keys = keys_of(3)
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            shutil.rmtree(tmp_path / "slab")

            def is_gone() -> bool:
                one.forget()
                return served(one, keys) == 0

            one.until(is_gone)  # a moment later
            one.store(keys_of(3, "b"), "saver")
            assert 0 == served(one, keys_of(3, "b"))


class TestFailing:
    @pytest.mark.parametrize("verb", ["reserve", "seal", "commit"])
    def test_chunks_that_cannot_be_stored_are_let_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        """The CPU tier gets them back, and the engine goes on as if nothing was."""
        plant(monkeypatch, FaultPlan(Fault(verb, GONE, nth=1)))
        with engine(slab(tmp_path / "slab"), chunks=4) as one:
            one.store(keys_of(4))
            assert 1 == counted(one, CASCADES)
            assert 0 == served(one, keys_of(4))
            one.store(keys_of(4, "b"), "saver")
            assert 4 == served(one, keys_of(4, "b"))

    @pytest.mark.parametrize("verb", ["contains", "read", "verify", "recheck"])
    @pytest.mark.parametrize("act", [GONE, raising(LookupError("a mistake"))])
    def test_chunks_that_cannot_be_had_are_misses(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
        act: Callable[[], None],
    ) -> None:
        """Whichever call fails, and also of a store that is wrong itself; afterwards
        they are found."""
        plant(monkeypatch, FaultPlan(Fault(verb, act, nth=1)))
        keys = keys_of(4)
        with engine(
            slab(tmp_path / "slab"), timeout={"load": 0.05, "fetch": 60.0}
        ) as one:
            one.store(keys)
            assert 0 == served(one, keys)
            one.until(lambda: served(one, keys, "later") == 4)

    def test_full_queue_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What comes too fast for the store is not kept waiting in the CPU tier."""
        gate = Gate()
        plant(monkeypatch, FaultPlan(Fault("reserve", gate)))
        with engine(slab(tmp_path / "slab"), queue={"tickets": 1}) as one:
            for name in "abc":
                one.request(name, keys_of(4, name))
                assert one.compute(name, keys_of(4, name))
            gate.wait_reached()
            one.until(lambda: len(one.tier._jobs) <= 2)
            gate.open()
            one.settle()
            assert 0 < counted(one, CASCADES) < 3

    def test_job_that_cannot_be_begun_has_failed(self, tmp_path: Path) -> None:
        """A cache that is closed raises, and vLLM's scheduler must not see it."""
        keys = keys_of(3)
        with engine(slab(tmp_path / "slab")) as one:
            one.tier.shutdown()
            one.request("r", keys)
            assert one.compute("r", keys)
            one.settle()
            assert 1 == counted(one, CASCADES)
            assert 0 == one.found(one.request("s"), keys_of(3, "b"))


class TestHanging:
    def test_look_up_that_hangs_is_a_miss(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        clock: AdvancingThreads,
    ) -> None:
        """R-81: requests wait for ``timeout.fetch``, and not for the store."""
        gate, keys = Gate(), keys_of(2)
        plant(monkeypatch, FaultPlan(Fault("contains", gate)))
        with engine(slab(tmp_path / "slab"), timeout={"fetch": 60.0}) as one:
            one.store(keys)
            one.request("r", keys)
            assert one.find("r", keys) is None
            one.step()
            gate.wait_reached()
            assert one.find("r", keys) is None
            clock.advance(61.0)
            one.step()
            assert 0 == one.find("r", keys)
            gate.open()
            one.finish("r")
            assert 2 == served(one, keys)

    def test_load_that_hangs_is_given_up_and_the_store_left_alone(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        clock: AdvancingThreads,
    ) -> None:
        """One request waits for its deadline; those after it do not, for a while."""
        gate, keys, others = Gate(), keys_of(2), keys_of(2, "b")
        plant(monkeypatch, FaultPlan(Fault("read", gate)))
        limits = {"load": 50.0, "fetch": 50.0}
        with engine(slab(tmp_path / "slab"), timeout=limits) as one:
            one.store(keys)
            one.store(others, "other")
            one.request("r", keys)
            one.until(lambda: one.find("r", keys) is not None or gate.reached.is_set())
            clock.advance(51.0)
            assert 0 == one.found("r", keys)
            gate.open()
            asked = one.tier._cache._core._questions._asked
            assert 0 == served(one, others)
            assert {} == asked
            clock.advance(51.0)
            assert 2 == served(one, others, "later")

    def test_copy_that_never_ends_keeps_its_chunks(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        clock: AdvancingThreads,
    ) -> None:
        """It may still write to them, so that vLLM is not told to use them again."""
        gate, keys = Gate(), keys_of(2)
        device = FaultDevice(CPUDevice(), FaultPlan(Fault("scatter", gate)))
        monkeypatch.setattr(opening, "load_class", lambda *_: lambda: device)
        with engine(
            slab(tmp_path / "slab"), timeout={"shutdown": 0.05, "fetch": 60.0}
        ) as one:
            one.store(keys)
            one.request("r", keys)
            one.until(lambda: one.find("r", keys) is not None or gate.reached.is_set())
            while not one.tier._over:
                clock.advance(100.0)  # the load's deadline, then its copy's
                one.wait_a_moment()
            one.step()
            assert 1 == len(one.tier._jobs)
            assert one.find("r", keys) is None
            with pytest.raises(DeviceTimeoutError):
                one.manager.reset_cache()
            core = one.tier._cache._core
        gate.open()
        core._serving.join(LIMIT_S)
        assert core._runtime._pipeline.join_threads(LIMIT_S)


class TestReset:
    def test_waits_for_jobs_and_parts_with_what_was_stored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine's weights may have changed: its keys mean others from then on."""
        gate, keys, later = Gate(), keys_of(3), keys_of(3, "b")
        plant(monkeypatch, FaultPlan(Fault("commit", gate)))
        with engine(slab(tmp_path / "slab")) as one:
            one.request("r", keys)
            assert one.compute("r", keys)
            gate.wait_reached()
            opener = threading.Timer(0.02, gate.open)
            opener.start()
            one.manager.reset_cache()
            opener.join()
            assert {} == one.tier._jobs
            assert 3 == one.tier._cache.statistics().saved_blocks
            one.finish("r")
            assert 0 == served(one, keys)
            one.store(later)
            assert 3 == served(one, later, "own")
            with engine(slab(tmp_path / "slab")) as other:
                assert 0 == served(other, later)
                assert 3 == served(other, keys, "of the start")

    def test_that_fails_parts_with_what_was_stored_as_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who goes on and writes other weights has none of the former ones' chunks."""
        keys, gate = keys_of(3), Gate()
        plant(monkeypatch, FaultPlan(Fault("commit", gate, nth=2)))
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            one.request("r", keys_of(1, "b"))
            assert one.compute("r", keys_of(1, "b"))
            gate.wait_reached()
            with monkeypatch.context() as stuck:
                error = raising(DeviceTimeoutError("no end"))
                stuck.setattr(tier_module._Job, "wait", lambda _: error())
                with pytest.raises(DeviceTimeoutError):
                    one.manager.reset_cache()
            gate.open()
            assert 0 == served(one, keys)

    def test_questions_from_before_are_no_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was found under the old keys says nothing of the new ones."""
        gate, keys = Gate(), keys_of(3)
        plant(monkeypatch, FaultPlan(Fault("contains", gate)))
        with engine(slab(tmp_path / "slab")) as one:
            one.store(keys)
            one.request("r", keys)
            one.find("r", keys)
            one.step()
            gate.wait_reached()
            one.manager.reset_cache()
            gate.open()
            assert 0 == one.found("r", keys)
            assert 0 == counted(one, PROMOTIONS)


class TestEnd:
    def test_engine_that_stops_with_work_pending_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was begun is stored, and the CPU tier's memory is given back."""
        plan = FaultPlan()
        plant(monkeypatch, plan)
        keys = keys_of(8)
        with engine(slab(tmp_path / "slab")) as one:
            region = Path(one.manager.primary_tier._mmap_region.mmap_path)
            assert region.exists()
            one.request("r", keys)
            assert one.compute("r", keys)
        assert not region.exists()
        with engine(slab(tmp_path / "slab")) as other:
            assert 8 == served(other, keys)


class TestBackpressure:
    def test_engine_stops_handing_down_to_a_slow_store(self, tmp_path: Path) -> None:
        """The engine's own detector sees how long our saves take."""
        slow = {
            "backpressure_cls": "EMABackpressureDetector",
            "policy_cls": "DropStorePolicy",
            "high_water_s": 1e-12,
            "low_water_s": 1e-13,
            "warmup_completions": 0,
        }
        with engine(slab(tmp_path / "slab"), backpressure=slow) as one:
            one.store(keys_of(2))
            one.store(keys_of(2, "b"), "too much")
            assert 2 == one.tier._cache.statistics().saved_blocks
            dropped = "vllm:kv_offload_tiering_backpressure_blocks_dropped"
            assert 2 == counted(one, dropped)
