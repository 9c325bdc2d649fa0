# SPDX-License-Identifier: Apache-2.0
"""Who may touch which blocks when orders are slow, stuck, repeated or taken back."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from msgspec.structs import replace

from tests.integration.vllm.test_halves import Engine, make_setup, request
from tests.integration.vllm.test_worker import KEYSPACE, LocalSetup, an_order, step
from tests.rig import LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, PAGE_BYTES
from ucm.blocks import GroupId, KeyPacker, ShardId
from ucm.config import UCMConfig
from ucm.devices.abc import Device, EventRef, Fence
from ucm.errors import DeviceFailedError
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.worker import WorkerHalf
from ucm.ranks import Topology
from ucm.scheduler.messages import (
    Deferral,
    StepPlan,
    StepReport,
    TransferKind,
    decode_report,
    encode,
)
from ucm.testing.faults import Fault, FaultDevice, FaultPlan, Gate

NOTHING: tuple[set[str], set[str], set[str]] = (set(), set(), set())
SAVE = an_order(1, TransferKind.SAVE, range(1, 5))
LOAD = an_order(2, TransferKind.LOAD, range(10, 14))


class FailedDevice(FaultDevice):
    """A device that fails as soon as the engine's thread asks for a fence."""

    def lease(self, event: EventRef | None = None) -> Fence:
        """Fail."""
        raise DeviceFailedError("the device is gone")


class ForeignDevice(FaultDevice):
    """One of somebody else's, which raises what its own library does."""

    def lease(self, event: EventRef | None = None) -> Fence:
        """Fail."""
        raise RuntimeError("out of memory for an event")


@attrs.frozen(kw_only=True)
class FaultySetup(LocalSetup):
    """A set-up whose device meets the plan too."""

    kind: type[FaultDevice] = FaultDevice

    def make_device(self, device_type: str) -> Device:
        """Return a device in front of the real one."""
        return self.kind(super().make_device(device_type), self.plan)


@contextlib.contextmanager
def working(
    *faults: Fault,
    rank: int = 0,
    kind: type[FaultDevice] = FaultDevice,
    **timeout: float,
) -> Iterator[WorkerHalf]:
    """Run a worker's half over zeroed memory; it is closed within a moment."""
    setup = FaultySetup(
        config=UCMConfig.from_mapping({"timeout": {"shutdown": 0.2, **timeout}}),
        layout=LAYOUT,
        keyspace=KEYSPACE,
        topology=Topology(tensor=rank + 1),
        num_blocks=NUM_BLOCKS,
        recomputes=True,
        plan=FaultPlan(*faults),
        at_event={},
        kind=kind,
    )
    half = WorkerHalf(setup, rank, "cpu")
    memory = torch.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    half.register(dict(zip(LAYERS, memory, strict=True)))
    with contextlib.closing(half):
        yield half


def settled(half: WorkerHalf) -> StepReport:
    """Wait until all is settled and return the report of it."""
    assert half._runtime.flush(60.0)
    return decode_report(half.report().payloads[0])


class TestBlocks:
    def test_blocks_under_a_save_are_not_overwritten_in_silence(self) -> None:
        """S1-07: what a save reads when its blocks are needed, and for longer than
        the engine can wait, is never stored."""
        gate = Gate()
        with working(Fault("gather", gate), fence=0.01) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            step(half, StepPlan(step=2, fences=(1,)))
            gate.open()
            report = settled(half)
            assert ((), (1,)) == (report.settled_saves, report.unstored_saves)

    def test_hooks_called_again_do_nothing_more(self) -> None:
        """S2-08: a plan is saved and loaded once, however often its hooks are called."""
        plan = StepPlan(
            step=1, keyspace_digest=KEYSPACE.digest, saves=(SAVE,), loads=(LOAD,)
        )
        with working() as half:
            for _ in range(3):
                half.bind(PlanEnvelope(encode(plan)))
                half.start_loads()
                half.submit_saves()
            assert half._runtime.flush(60.0)
            for direction in ("save", "load"):
                assert 4 == half._counters.total(
                    "ucm_offered_parts_total", direction=direction
                )

    @pytest.mark.parametrize("kind", [FailedDevice, ForeignDevice])
    def test_failed_device_fails_orders_and_not_the_engine(
        self, kind: type[FaultDevice]
    ) -> None:
        """C6 rule 10, X-13: where no fence can be had any more, saves and loads fail,
        are told as such, and no hook raises."""
        plan = StepPlan(
            step=1, keyspace_digest=KEYSPACE.digest, saves=(SAVE,), loads=(LOAD,)
        )
        with working(kind=kind) as half:
            step(half, plan)
            report = settled(half)
            assert (1,) == report.unstored_saves
            assert (1,) == report.released
            assert ["device"] == [failure.reason for failure in report.failures]

    def test_stuck_save_is_told_as_quarantined(self) -> None:
        """S1-26: blocks under a copy that never ended are not told as released."""
        gate = Gate()
        with working(Fault("gather", gate), save=0.02, stuck=0.02) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            report = settled(half)
            assert ((), (1,)) == (report.released, report.quarantined)
            gate.open()

    def test_request_whose_save_is_stuck_is_told_as_sent(self) -> None:
        """R-16: the engine gets the blocks back, so that it neither spins nor waits for
        them; nothing that is read from them later is stored."""
        gate = Gate()
        with working(Fault("gather", gate), save=0.02, stuck=0.02) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            mine = Deferral(request_id="r", generation=1)
            step(half, StepPlan(step=2, deferred=(mine,)))
            assert half._runtime.flush(5.0)
            assert ({"r"}, set(), set()) == half.finished()
            assert not any(half.counts().values())
            gate.open()
            assert (1,) == decode_report(half.report().payloads[0]).unstored_saves

    def test_stuck_load_is_not_told_before_its_copy_ends(self) -> None:
        """H-05: a load that was given up is told as failed, and only when nothing
        writes its blocks any more."""
        gate = Gate()
        limits = {"load": 0.02, "stuck": 0.02, "shutdown": 1.0}
        with working(Fault("scatter", gate), **limits) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            settled(half)
            step(half, StepPlan(step=2, loads=(LOAD,)))
            gate.wait_reached()
            assert ["stuck"] == [each.reason for each in settled(half).failures]
            assert NOTHING == step(half, StepPlan(step=3))
            gate.open()
            half.close()
            assert (set(), {"r"}, {"r"}) == half.finished()

    def test_rank_saves_under_its_own_shard(self) -> None:
        """X-08: a rank's part of a block is stored under the rank's own key."""
        with working(rank=3) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            assert (1,) == settled(half).settled_saves
            stored = [
                half._store.match(
                    KeyPacker(KEYSPACE.digest, GroupId(0), ShardId(shard)).pack(
                        SAVE.split_hashes()
                    )
                )
                for shard in range(4)
            ]
            assert [0, 0, 0, 4] == stored


class TestTold:
    def test_deferred_request_is_told_once(self) -> None:
        """H-01: an end that the engine was told is not told again."""
        deferral = Deferral(request_id="r", generation=1)
        with working() as half:
            told = step(half, StepPlan(step=1, deferred=(deferral,)))
            assert ({"r"}, set(), set()) == told
            assert NOTHING == step(half, StepPlan(step=2))

    def test_deferred_request_is_not_told_under_a_copy(self) -> None:
        """S1-03: the engine keeps the blocks of a request while a save reads them."""
        gate = Gate()
        deferral = Deferral(request_id="r", generation=1)
        with working(Fault("gather", gate)) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            assert NOTHING == step(half, StepPlan(step=2, deferred=(deferral,)))
            gate.open()
            settled(half)
            assert ({"r"}, set(), set()) == step(half, StepPlan(step=3))

    def test_request_is_told_when_all_its_spans_are_over(self) -> None:
        """H-01: a request that loads two spans waits for both, and is told once."""
        gate = Gate()
        second = an_order(3, TransferKind.LOAD, range(20, 24))
        with working(Fault("read", gate, nth=2)) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            settled(half)
            step(half, StepPlan(step=2, loads=(LOAD, second)))
            gate.wait_reached()
            while (envelope := half.report()) is None:
                half._runtime.wait_for_notice(1.0)
            assert (2,) == decode_report(envelope.payloads[0]).loads_done
            assert NOTHING == step(half, StepPlan(step=3))
            gate.open()
            assert (3,) == settled(half).loads_done
            assert (set(), {"r"}, set()) == step(half, StepPlan(step=4))


@contextlib.contextmanager
def an_engine(tmp_path: Path) -> Iterator[Engine]:
    """Return both halves, with the KV cache registered."""
    engine = Engine(make_setup(tmp_path))
    with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
        engine.register()
        yield engine


def is_idle(engine: Engine) -> bool:
    """Tell whether neither half remembers anything; both name containers alike."""
    halves = (engine.scheduler, engine.worker)
    return not any(any(half.counts().values()) for half in halves)


class TestHolds:
    def test_finished_request_with_holds_is_deferred_until_told(
        self, tmp_path: Path
    ) -> None:
        """S1-02, S1-15: the engine keeps the blocks until the worker has told it, and
        then nothing is remembered of the request."""
        with an_engine(tmp_path) as engine:
            one = request("r")
            engine.scheduler.match(one, 0)
            engine.scheduler.allocated(one, [[1, 2, 3]], 0)
            plan = engine.plan([one], [1, 2, 3])
            assert engine.scheduler.finished("r")
            assert NOTHING == engine.work(plan)
            assert ({"r"}, set(), set()) == engine.work(engine.plan())
            assert is_idle(engine)

    def test_preempted_request_defers_nothing(self, tmp_path: Path) -> None:
        """S1-16: who lost its blocks has none that the engine would have to keep."""
        with an_engine(tmp_path) as engine:
            one = request("r")
            engine.scheduler.match(one, 0)
            engine.scheduler.allocated(one, [[1, 2, 3]], 0)
            plan = engine.plan([one], [1, 2, 3])
            later = engine.plan(preempted=["r"])
            assert not engine.scheduler.finished("r")
            engine.work(plan)
            engine.work(later)
            assert is_idle(engine)


class TestUnfinished:
    def test_load_is_told_when_its_last_plan_has_come(self) -> None:
        """R-17: a request whose loads take several plans is told of once, with the last
        of them, and failed if one of them was."""
        more = an_order(3, TransferKind.LOAD, range(20, 24))
        for order, failed in (
            (more, set()),
            (replace(more, hashes=b"?" * 128), {"r"}),
        ):
            with working() as half:
                step(half, StepPlan(step=1, saves=(SAVE,)))
                settled(half)
                step(half, StepPlan(step=2, loads=(LOAD,), unfinished="r"))
                assert half._runtime.flush(5.0)
                assert NOTHING == half.finished()
                step(half, StepPlan(step=3, loads=(order,)))
                assert half._runtime.flush(5.0)
                assert (set(), {"r"}, failed) == half.finished()
