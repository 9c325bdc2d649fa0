# SPDX-License-Identifier: Apache-2.0
"""
The connector's real halves under the fake host, simulated from one seed.

One simulated thread is the engine: it schedules, and runs the hooks of every rank. The
runtimes of all ranks run beside it, over one store that fails, hangs, dies and rots.
"""

from collections import Counter

import attrs
import torch

from tests.integration.vllm.host_kit import SchedulerDoor, WorkerDoor, make_setup
from tests.integration.vllm.weights_kit import TinyModel, parts_of
from tests.kit.lockstep import TraceChecker
from tests.kit.simulation import Simulation
from tests.kit.unreliable import LateDevice, Odds, SeededFaults, UnreliableStore
from tests.simulation.stored_blocks import StoredBlocks
from tests.simulation.traced import traced
from tests.simulation.weight_acts import WeightActs
from tests.testing.host_kit import HYBRID, ONE_FULL, PAGE_BYTES, RECURRENT
from ucm.blocks import PackedKey
from ucm.config import SaveDecoded
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.integration.vllm.modes import Facts, Loads, choose_mode, shape_of
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.layout import KVLayout
from ucm.ranks import Topology
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultDevice, FaultPlan
from ucm.testing.host import FakeHost, HostSettings, SeededChoices
from ucm.testing.host import Odds as HostOdds
from ucm.tracing import Log

_PAUSES_S = (0.0, 0.0, 1e-5, 1e-4, 1e-2, 1.0)
_PREPARES_S = (0.0, 0.0, 1e-5, 1e-3)
_SHORT_HANGS_S = (0.001, 0.3, 15.0, 35.0)


class _SharedStore(UnreliableStore):
    """A store that outlives each of the halves that share it."""

    def close(self) -> None:
        """Leave it open."""


@attrs.frozen(kw_only=True)
class _SimulatedSetup(Setup):
    """A setup over one store and simulated devices."""

    world: "ConnectorWorld"

    def open_store(self, *, index_only: bool) -> Store:
        """Return the one store."""
        return self.world.store

    def make_device(self, device_type: str) -> Device:
        """Return a device that is late, or one that copies at once."""
        return self.world.make_device()

    def open_log(self, role: str) -> Log:
        """Return a log at whose lines others may run."""
        return self.world.open_log(role)


class ConnectorWorld:
    """
    One simulated run.

    Args:
        seed: Decides everything, also what kind of engine it is.
        steps: Acts of the engine and its users.
        renews: How often weights are loaded, caches reset or the engine put to sleep,
            per act; drawn if not given.
    """

    def __init__(self, seed: int, steps: int, renews: float | None = None) -> None:
        self.simulation = Simulation(seed)
        self.dice = self.simulation.dice
        self.steps = steps
        self.renews = renews
        self.seen: Counter[str] = Counter()
        self.checker = TraceChecker()
        self.damaged: set[PackedKey] = set()

    def run(self) -> None:
        """Run to the end; whatever does not hold is an error."""
        self.simulation.run(self._main)

    def make_device(self) -> Device:
        """Return a device for one rank."""
        inner = CPUDevice(self.num_blocks)
        if self.is_late:
            return LateDevice(inner, self.faults, self.simulation)
        return FaultDevice(inner, self.faults)

    def open_log(self, role: str) -> Log:
        """Return a log that is checked, and lets others run."""
        return traced(self.simulation, self.checker, role)

    def _build(self) -> None:
        dice, simulation = self.dice, self.simulation
        self.layout: KVLayout = dice.choice([ONE_FULL, ONE_FULL, HYBRID, RECURRENT])
        self.num_ranks = dice.choice([1, 2, 3])
        topology = Topology(
            tensor=self.num_ranks, replicas=dice.choice([1, self.num_ranks])
        )
        self.num_blocks = dice.choice([32, 64])
        self.is_late = dice.random() < 0.5
        self.faults = SeededFaults(
            simulation,
            Odds(
                fail=dice.choice([0, 0.01, 0.1]),
                hang=dice.choice([0, 0, 0.01, 0.05]),
                die=dice.choice([0, 0, 0, 0.0005]),
                damage=dice.choice([0, 0.1]),
                hangs_at=dice.choice(["", "gather", "scatter", "commit", "read"]),
                hangs=_SHORT_HANGS_S,
            ),
        )
        self.inner = MemoryStore(
            dice.choice([20, 100, 400]) * self.num_ranks, self.layout.max_block_bytes
        )
        self.store = _SharedStore(self.inner, self.faults, self._flip, simulation)
        plain = make_setup(
            self.layout,
            self.num_ranks,
            self.num_blocks,
            FaultPlan(),
            topology=topology,
            company=dice.choice([0.0, 0.05, 60.0]),
        )
        config = attrs.evolve(
            plain.config,
            queue=attrs.evolve(
                plain.config.queue,
                tickets=dice.choice([2, 100]),
                window=dice.choice([1, 4]),
            ),
            # Copies that hang one behind the other end in the end: one that is given
            # up keeps its blocks, which this engine does not put up with.
            timeout=attrs.evolve(plain.config.timeout, stuck=600.0),
        )
        in_flight = dice.choice([1, 2])
        drafts = dice.choice([0, 0, 1, 2])
        parts = dice.choice([1, 1, 2])
        # Models with states are cleared; others may be, for another reason.
        clears = self.layout is RECURRENT or dice.random() < 0.3
        second = dice.random() < 0.5
        self.mode = choose_mode(
            Facts(
                use_layerwise=dice.random() < 0.6,
                shape=shape_of(self.layout),
                overlapping_batches=in_flight > 1,
                micro_batches=parts > 1,
                speculation=drafts > 0,
            )
        )
        setup = _SimulatedSetup(
            config=attrs.evolve(
                config,
                load_ahead_rows=dice.choice([0, 1, 3]),
                save_decoded=dice.choice(list(SaveDecoded)),
            ),
            mode=self.mode,
            overwrites_first=second,
            confirms=second and clears,
            layout=self.layout,
            keyspace=plain.keyspace,
            topology=topology,
            num_blocks=self.num_blocks,
            recomputes=True,
            threads=simulation.threads,
            world=self,
        )
        memories = [
            torch.zeros(
                (self.layout.num_rows, self.num_blocks, PAGE_BYTES), dtype=torch.uint8
            )
            for _ in range(self.num_ranks)
        ]
        self.decoded = setup.config.save_decoded
        self.scheduler = SchedulerHalf(setup)
        self.workers = [
            WorkerHalf(setup, rank, "simulated") for rank in range(self.num_ranks)
        ]
        models = [TinyModel() for _ in self.workers]
        for worker, memory, model in zip(self.workers, memories, models, strict=True):
            worker.register(
                {
                    name: memory[row.row_id]
                    for group in self.layout.groups
                    for row in group.rows
                    for name in row.layer_names
                },
                parts_of(model),
            )
        if dice.random() < 0.8:  # else the first reports tell
            self.scheduler.agree(worker.handshake() for worker in self.workers)
        self.host = FakeHost(
            scheduler=SchedulerDoor(self.scheduler),
            workers=[WorkerDoor(worker) for worker in self.workers],
            memories=[memory.numpy() for memory in memories],
            layout=self.layout,
            choices=SeededChoices(dice),
            settings=HostSettings(
                # vLLM leaves blocks that were not loaded in its own cache, for others
                # to hit should their request end before it has computed them again.
                local_cache=dice.random() < 0.5
                and self.mode.loads is not Loads.LAYERWISE,
                partial_hits=dice.random() < 0.3,
                in_flight=in_flight,
                clears=clears,
                overwrites_first=second,
                # The second runner did not, before vLLM 0.33.
                defers_saves=drafts > 0 and (not second or dice.random() < 0.5),
                draft_layers=drafts,
                parts=parts,
                silent_ranks=frozenset(
                    range(dice.randrange(self.num_ranks))
                    if drafts and not second
                    else ()
                ),
                odds=HostOdds(
                    abort=dice.choice([0.01, 0.1]),
                    preempt=dice.choice([0.01, 0.1]),
                    reset=dice.choice([0, 0, 0.005]),
                    halt=dice.choice([0, 0.05]),
                ),
            ),
            between=lambda: simulation.sleep(dice.choice(_PREPARES_S)),
            shards=[topology.shard_of(rank) for rank in range(self.num_ranks)],
            containers=self._containers,
        )
        self.scheduler.watch_cache(self.host.scheduler.pool)
        if self.renews is None:
            self.renews = dice.choice([0, 0, 0.03])
        self.weights = WeightActs(
            self.host,
            self.scheduler,
            self.workers,
            models,
            [memory.numpy() for memory in memories],
            dice=dice,
            idle=lambda: simulation.sleep(0.3),
            seen=self.seen,
        )

    def _check_asleep(self) -> None:
        """Make sure that nothing waits for a step: none may come for hours."""
        counts = self.scheduler.counts()
        waiting = ("waiting", "endings", "new_deferrals")
        assert [] == [name for name in waiting if counts[name]], "asleep on them"
        self.seen["asleep in the middle"] += bool(self.host.scheduler.running)

    def _flip(self, key: PackedKey) -> None:
        self.damaged.add(key)
        entry = self.inner._entries[key]
        self.inner._pool[entry.slot, self.dice.randrange(entry.nbytes)] ^= 1

    def _containers(self) -> dict[str, int]:
        counts = Counter(self.scheduler.counts())
        del counts["denied_keys"]
        for worker in self.workers:
            counts.update(worker.counts())
        return dict(counts)

    def _main(self) -> None:
        self._build()
        stored = StoredBlocks(self.layout, self.host.streams)
        for at in range(self.steps):
            self.host.act()
            if self.host.is_asleep:
                self._check_asleep()
            if self.renews and self.dice.random() < self.renews:
                self.weights.act()
            if not (self.renews or at % 20):
                stored.check(self.inner, self.damaged)
            self.simulation.sleep(self.dice.choice(_PAUSES_S))
        self.host.drain(lambda: self.simulation.sleep(0.3))
        assert {} == {name: n for name, n in self.host.audit().items() if n}
        assert not self.scheduler.awaits_step()
        for half in (*self.workers, self.scheduler):
            half.close()
        self.simulation.sleep(200.0)  # what hung at the end goes on
        left = [name for name in self.simulation.names() if name.startswith("ucm")]
        assert not left, "threads are left"
        assert not self.inner._writing, "leases are left"
        self._check_sums()
        if not self.renews:  # else what belongs under a key is of its own weights
            self.seen["stored blocks"] += stored.check(self.inner, self.damaged)
        self.inner.close()
        self.checker.finish()
        self.seen[f"mode {self.mode.name}"] += 1
        self.seen["saved decoded " + self.decoded.value] += 1
        self.seen["torn by an overwrite"] += self._torn()
        self.seen.update(self.host.seen)
        self.seen.update(self.faults.done)

    def _torn(self) -> float:
        name, reason = "ucm_settled_parts_total", "overwritten"
        totals = [worker._counters.total for worker in self.workers]
        return sum(total(name, direction="save", reason=reason) for total in totals)

    def _check_sums(self) -> None:
        for worker in self.workers:
            for direction in ("save", "load"):
                total = worker._counters.total
                offered = total("ucm_offered_parts_total", direction=direction)
                settled = total("ucm_settled_parts_total", direction=direction)
                assert offered == settled
            self.seen["runtime failed"] += bool(worker._runtime.failure)
