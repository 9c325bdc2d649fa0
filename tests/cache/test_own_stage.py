# SPDX-License-Identifier: Apache-2.0
"""R-44: a host's own stage in the chain of a save breaks neither release nor commit."""

import asyncio
from collections.abc import Callable
from concurrent import futures

import pytest

from tests.cache.kit import Host, keys_of, leaving_nothing
from tests.clocks import AdvancingThreads
from ucm.blocks import PackedKey
from ucm.cache.sync import Cache
from ucm.devices.cpu import CPUDevice
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.pipeline.outcomes import OutcomeKind
from ucm.pipeline.save import OwnStage, Sealed, save_chain, sealed_blocks
from ucm.pipeline.stage import STORE_WORKER, Chain, CopyStage, LoopStage
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Gate, raising


class Audit(OwnStage):
    """Notes what passes, and does what the test says."""

    def __init__(
        self, name: str = "audit", act: Callable[[], object] = lambda: None
    ) -> None:
        self.name = name
        self.act = act
        self.seen: dict[PackedKey, bytes] = {}

    def run(self, given: Sealed) -> Sealed:
        """Note keys and bytes."""
        self.seen |= {key: block.tobytes() for key, block in sealed_blocks(given)}
        self.act()
        return given


class Scribble(OwnStage):
    """Writes into what is sealed."""

    name = "audit"

    def run(self, given: Sealed) -> Sealed:
        """Try to."""
        for _, block in sealed_blocks(given):
            block[0] ^= 1
        return given


class Forgetful(OwnStage):
    """Returns nothing."""

    name = "audit"

    def run(self, given: Sealed) -> Sealed:
        """Forget what it was given."""
        del given
        return None


class OnTheLoop(LoopStage[Sealed, Sealed]):
    """Would look at slots that nobody keeps for it."""

    name = "on_the_loop"

    async def run(self, given: Sealed) -> Sealed:
        """Do nothing."""
        return given


class BesideTheCopy(CopyStage[Sealed, Sealed]):
    """Would hold up the copies of others, and so their blocks."""

    name = "beside"

    def run(self, given: Sealed) -> Sealed:
        """Do nothing."""
        return given


class Elsewhere(Audit):
    """Says that it belongs to another thread."""

    worker = "copy"


class TestOwnStage:
    def test_stages_see_each_block_in_order_before_it_is_found(self) -> None:
        """Keys and bytes of what is new, and of nothing else."""
        found: list[bool] = []
        first, second = Audit(act=lambda: None), Audit("second")
        host = Host(own=Chain.start(first).then(second))
        first.act = lambda: found.extend(host.store.contains(list(first.seen)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            keys = keys_of(3)
            assert 2 == cache.save(keys[:2], [4, 5]).wait_committed().committed
            assert [False] * 2 == found
            assert [host.content(range(4, 5)), host.content(range(5, 6))] == [
                *first.seen.values()
            ]
            cache.save(keys, [4, 5, 6]).wait_committed()
            assert 3 == len(first.seen)
            assert first.seen == second.seen
            assert 3 == cache.match(keys)

    @pytest.mark.parametrize(
        "stage",
        [
            Audit(act=lambda: {}[0]),
            Audit(act=raising(SystemExit(3))),
            Audit(act=raising(KeyboardInterrupt())),
            Audit(act=raising(asyncio.CancelledError())),
            Scribble(),
            Forgetful(),
        ],
        ids=["raises", "exits", "interrupts", "cancels", "writes", "returns nothing"],
    )
    def test_stage_that_fails_costs_its_save_only(self, stage: OwnStage) -> None:
        """The blocks are released, nothing of it is found, its slots are free."""
        host = Host(own=Chain.start(stage))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), [0, 1])
            save.wait_released()
            end = save.wait_committed()
            assert (OutcomeKind.FAILED, Reason.ERROR) == (end.kind, end.reason)
            assert stage.name in end.error
            assert 0 == cache.match(keys_of(2))
            assert end.kind is cache.save(keys_of(1), [0]).wait_committed().kind
            assert "" == cache.statistics().failure
        with pytest.raises(StoreUnavailableError):
            host.store.stats()

    def test_stage_that_hangs_holds_no_blocks_and_publishes_nothing(self) -> None:
        """The host has its blocks at once, the save ends at its deadline, and what the
        stage lets pass afterwards is not committed."""
        gate, threads = Gate(), AdvancingThreads()
        host = Host(own=Chain.start(Audit(act=gate)), threads=threads)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), [0, 1])
            gate.wait_reached()
            save.wait_released()
            assert not save.is_over
            with futures.ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(save.wait_committed)
                threads.advance(cache._core.timeout.save + 1.0)
                end = waiting.result()
            assert (OutcomeKind.CANCELLED, Reason.DEADLINE) == (end.kind, end.reason)
            gate.open()
            cache.flush()
            while host.store.stats().reserved_blocks:  # its thread gives them back
                cache.statistics()
            assert 0 == cache.match(keys_of(2))

    def test_stages_cost_no_hop(self) -> None:
        """They run in the call that seals and commits."""
        store, device = MemoryStore(1, 64), CPUDevice()
        own = Chain.start(Audit()).then(Audit("second"))
        plain, longer = (
            save_chain(store, device, before_commit=each).segments()
            for each in (None, own)
        )
        assert len(plain) == len(longer)
        assert len(plain[-1].stages) + 2 == len(longer[-1].stages)
        assert STORE_WORKER == longer[-1].worker

    @pytest.mark.parametrize(
        ("own", "problem"),
        [
            (Chain.start(OnTheLoop()), "is no OwnStage"),
            (Chain.start(BesideTheCopy()), "is no OwnStage"),
            (Chain.start(Elsewhere()), "is no OwnStage"),
            (Chain.start(Audit("gather")), "name of another"),
            (Chain.start(Audit()).then(Audit()), "name of another"),
        ],
    )
    def test_what_could_hold_blocks_is_refused(
        self, own: Chain[Sealed, Sealed], problem: str
    ) -> None:
        """By name, and before anything is opened."""
        with pytest.raises(ConfigError, match=problem):
            Host(own=own).open_core()
