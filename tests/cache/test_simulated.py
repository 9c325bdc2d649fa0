# SPDX-License-Identifier: Apache-2.0
"""The library under several threads of a host, simulated from one seed."""

import contextlib
import random
from collections import Counter

import numpy as np
import pytest

from tests.cache.kit import HASHER, KEYSPACE, LAYERS, LAYOUT, NUM_BLOCKS, PAGE_SHAPE
from tests.kit.simulation import Simulation
from tests.kit.unreliable import LateDevice, Odds, SeededFaults, UnreliableStore
from tests.rig import null_log
from ucm.blocks import GroupId, KeyPacker, ShardId
from ucm.cache.core import Core
from ucm.cache.sync import Cache, Save
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceTimeoutError, StoreError
from ucm.pipeline.save import OwnStage, Sealed, sealed_blocks
from ucm.pipeline.stage import Chain
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultDevice

_THREADS, _OWN = 3, 16
_NUM_KEYS = 40
_KEYS = HASHER.keys(range(_NUM_KEYS * 16))
_PACKED = KeyPacker(KEYSPACE.digest, GroupId(0), ShardId(0)).pack(_KEYS)
_CONTENTS = np.random.default_rng(0).integers(
    0, 256, (_NUM_KEYS, len(LAYERS), *PAGE_SHAPE), np.uint8
)
_TROUBLES = (
    Odds(),
    Odds(fail=0.05),
    Odds(fail=0.02, hang=0.05, hangs=(0.001, 0.3, 15.0)),
    Odds(hang=0.02, hangs=(15.0, 35.0, 100.0)),
    Odds(die=0.004),
)


class HostWorld:
    """
    Some threads that save, load, cancel and ask, and check each byte.

    Args:
        seed: Decides everything.
        acts: Of each thread.
    """

    def __init__(self, seed: int, acts: int = 25) -> None:
        self.simulation = Simulation(seed)
        self.dice = random.Random(seed)
        self.acts = acts
        self.seen: Counter[str] = Counter()
        self.odds = self.dice.choice(_TROUBLES)
        self.faults = SeededFaults(self.simulation, Odds())
        shape = (NUM_BLOCKS, *PAGE_SHAPE)
        self.pool = {name: np.zeros(shape, np.uint8) for name in LAYERS}
        self.store = MemoryStore(self.dice.choice((12, 60)), LAYOUT.max_block_bytes)
        self.running = _THREADS
        self.is_audited = self.dice.random() < 0.5
        self.num_wrong = 0

    def run(self) -> None:
        """Run it and check what is left."""
        self.simulation.run(self._main)

    def _main(self) -> None:
        simulation = self.simulation
        make = LateDevice if self.dice.random() < 0.5 else None
        cpu = CPUDevice()
        device = (
            FaultDevice(cpu, self.faults)
            if make is None
            else make(cpu, self.faults, simulation)
        )
        device.register(LAYOUT, self.pool)
        config = {
            "queue": {
                "tickets": self.dice.choice((1, 3, 64)),
                "span_bytes": 2 * LAYOUT.max_block_bytes,
            }
        }
        core = Core(
            UCMConfig.from_mapping(config),
            LAYOUT,
            device,
            KEYSPACE,
            UnreliableStore(self.store, self.faults, lambda _: None, simulation),
            shard=ShardId(0),
            log=null_log(),
            threads=simulation.threads,
            before_commit=Chain.start(_Audit(self)) if self.is_audited else None,
        )
        core.open()
        self.faults.odds = self.odds
        for at in range(_THREADS):
            host = _HostThread(self, core, at)
            simulation.spawn(host.live, f"host-{at}")
        while self.running:
            simulation.sleep(1.0)
        self.faults.odds = Odds()
        if not core._runtime.failure:
            self._check_stored(core)
        core.close()
        assert 0 == self.num_wrong
        if not core._runtime.failure:
            assert 0 == len(core._users)
        assert {} == core._open
        assert {} == core._questions._asked
        assert (0, 0) == (core._room.num_waiting, core._room._items)

    def _check_stored(self, core: Core) -> None:
        """Check every stored block, once nothing is under way."""
        Cache(core, contextlib.ExitStack()).flush()
        for number, key in enumerate(_PACKED):
            if self.store.contains([key]) == [True]:
                with self.store.read([key]) as lease:
                    got = lease.slots.block(0).tobytes()
                assert _CONTENTS[number].tobytes() == got, f"block {number} is wrong"
                self.seen["stored"] += 1


class _Audit(OwnStage):
    """A stage of the host's own that fails, hangs and dies as stores do."""

    name = "audit"

    def __init__(self, world: HostWorld) -> None:
        self.world = world

    def run(self, given: Sealed) -> Sealed:
        """Check what is about to be visible."""
        for key, block in sealed_blocks(given):
            wanted = _CONTENTS[_PACKED.index(key)].tobytes()
            self.world.seen["audited"] += 1
            self.world.num_wrong += wanted != block.tobytes()  # an error costs the save
        self.world.faults.at("audit")
        return given


class _HostThread:
    """One thread with blocks of its own; keys are everybody's."""

    def __init__(self, world: HostWorld, core: Core, at: int) -> None:
        self.world = world
        self.dice = random.Random(world.simulation.seed * 10 + at)
        self.cache = Cache(core, contextlib.ExitStack())
        self.free = list(range(at * _OWN, (at + 1) * _OWN))

    def live(self) -> None:
        """Do some things, and wait for all of them."""
        saves: list[tuple[Save, list[int]]] = []
        try:
            for _ in range(self.world.acts):
                act = self.dice.random()
                if act < 0.45:
                    self._save(saves)
                elif act < 0.75:
                    self._load()
                elif act < 0.9:
                    self._ask()
                while saves and (len(saves) > 2 or self.dice.random() < 0.4):
                    self._end(*saves.pop(self.dice.randrange(len(saves))))
            for save, blocks in saves:
                self._end(save, blocks)
        finally:
            self.world.running -= 1

    def _some(self) -> tuple[list[int], range]:
        self.dice.shuffle(self.free)
        count = min(len(self.free), self.dice.randint(1, 5))
        blocks = [self.free.pop() for _ in range(count)]
        first = self.dice.randrange(_NUM_KEYS - count)
        return blocks, range(first, first + count)

    def _save(self, saves: list[tuple[Save, list[int]]]) -> None:
        blocks, numbers = self._some()
        if not blocks:
            return
        for block, number in zip(blocks, numbers, strict=True):
            for layer, pages in enumerate(self.world.pool.values()):
                pages[block] = _CONTENTS[number][layer]
        keys = [_KEYS[number] for number in numbers]
        waits = self.dice.random() < 0.5
        save = self.cache.save(keys, blocks, wait_for_room=waits)
        if self.dice.random() < 0.25:
            self.world.simulation.pause()
            save.cancel()
        saves.append((save, blocks))

    def _end(self, save: Save, blocks: list[int]) -> None:
        save.wait_released()
        for pages in self.world.pool.values():
            pages[blocks] = 0xEE  # the host computes something else
        end = save.wait_committed()
        self.world.seen[f"save {end.kind.value}"] += 1
        self.free += blocks

    def _load(self) -> None:
        blocks, numbers = self._some()
        if not blocks:
            return
        keys = [_KEYS[number] for number in numbers]
        try:
            end = self.cache.load(keys, blocks)
        except DeviceTimeoutError:  # these blocks are lost to the host
            self.world.seen["load stuck"] += 1
            return
        self.world.seen[f"load {end.kind.value}"] += 1
        for block, number in list(zip(blocks, numbers, strict=True))[: end.leading]:
            for layer, pages in enumerate(self.world.pool.values()):
                assert (pages[block] == _CONTENTS[number][layer]).all()
        for pages in self.world.pool.values():
            pages[blocks] = 0xEE
        self.free += blocks

    def _ask(self) -> None:
        first = self.dice.randrange(_NUM_KEYS - 4)
        keys = _KEYS[first : first + 4]
        try:
            verb = self.dice.choice(("match", "touch", "forget", "statistics", "flush"))
            if verb in ("match", "touch", "forget"):
                getattr(self.cache, verb)(keys)
            else:
                getattr(self.cache, verb)()
        except StoreError:
            self.world.seen["no answer"] += 1
        except DeviceTimeoutError:
            self.world.seen["no end"] += 1


class TestHostWorld:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(25))
    def test_nothing_that_must_hold_is_broken(self, seed: int) -> None:
        """Whatever fails, hangs or dies, no byte is wrong, every call comes back, and
        nothing is left."""
        HostWorld(seed).run()

    @pytest.mark.slow
    def test_runs_meet_what_can_happen(self) -> None:
        """Blocks are stored and found, refused, cancelled and missed."""
        seen: Counter[str] = Counter()
        for seed in range(6):
            world = HostWorld(100 + seed)
            world.run()
            seen += world.seen
        wanted = {"save committed", "save cancelled", "load committed", "load failed"}
        assert set() == wanted - set(seen)
        assert seen["stored"] > 0
        assert seen["audited"] > 0

    @pytest.mark.slow
    def test_seed_repeats_a_run(self) -> None:
        """A number is enough to see a run again."""
        one, two = HostWorld(3), HostWorld(3)
        one.run()
        two.run()
        assert one.seen == two.seen
        assert one.simulation.switches == two.simulation.switches
