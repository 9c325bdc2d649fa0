# SPDX-License-Identifier: Apache-2.0
"""The real connector under the fake host, in one process, with its own threads."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.integration.vllm.weights_kit import TinyModel, parts_of
from tests.testing.host_kit import ONE_FULL
from ucm.blocks import KeySpace
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.integration.vllm.modes import DIRECT, Mode
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.integration.vllm.worker import WorkerHalf
from ucm.layout import KVLayout
from ucm.ranks import Topology
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultPlan, FaultStore
from ucm.testing.host import FakeHost, HostSettings, SeededChoices


class SharedStore(FaultStore):
    """A store that outlives each of the halves that share it."""

    def close(self) -> None:
        """Leave it open."""


@attrs.frozen(kw_only=True)
class OneStore(Setup):
    """A setup whose processes are one, with one store."""

    store: SharedStore

    def open_store(self, *, index_only: bool) -> SharedStore:
        """Return the one store."""
        return self.store

    def make_device(self, device_type: str) -> CPUDevice:
        """Return a device for one rank's memory."""
        return CPUDevice(self.num_blocks)


def make_setup(
    layout: KVLayout,
    num_ranks: int,
    num_blocks: int,
    plan: FaultPlan,
    capacity_blocks: int = 400,
    *,
    topology: Topology | None = None,
    slot_bytes: int = 0,
    company: float = 0.05,
) -> OneStore:
    """Return a setup with a store that follows *plan*; saves wait so long for others."""
    topology = topology or Topology(tensor=num_ranks)
    config = {
        "log": {"level": "off"},
        "queue": {"span_bytes": 3 * layout.max_block_bytes},
        "timeout": {"company": company},
    }
    store = MemoryStore(capacity_blocks, slot_bytes or layout.max_block_bytes)
    return OneStore(
        config=UCMConfig.from_mapping(config),
        layout=layout,
        keyspace=KeySpace(
            model="m",
            weights="w",
            kv_dtype="d",
            layout=layout.fingerprint(),
            block_tokens=layout.hash_block_tokens,
            parallel=topology.parallel,
            hash_algorithm="sha256",
            engine="test",
        ),
        topology=topology,
        num_blocks=num_blocks,
        recomputes=True,
        store=SharedStore(store, plan),
    )


class SchedulerDoor:
    """The scheduler's half under the names that the engine calls."""

    requires_kv_delivery = False

    def __init__(self, half: SchedulerHalf) -> None:
        self.half = half
        self.build_connector_meta = half.plan
        self.update_connector_output = half.apply
        self.get_num_new_matched_tokens = half.match
        self.reset_cache = half.reset_cache
        self.has_pending_push_work = half.awaits_step

    def on_new_request(self, request: object) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request, blocks, tokens) -> None:
        """Forward."""
        self.half.allocated(request, blocks.get_block_ids(), tokens, blocks)

    def request_finished_all_groups(self, request, block_ids):
        """Forward."""
        return self.half.finished(request.request_id, block_ids), None


class WorkerDoor:
    """A worker's half under the names that the engine calls."""

    def __init__(self, half: WorkerHalf) -> None:
        self.half = half
        self.handle_preemptions = half.fence
        self.bind_connector_metadata = half.bind
        self.clear_connector_metadata = half.clear
        self.wait_for_save = half.submit_saves
        self.build_connector_worker_meta = half.report

    def start_load_kv(self, context) -> None:
        """Forward; never waits for what the engine waits for."""
        self.half.start_loads()

    def wait_for_layer_load(self, name) -> None:
        """Forward; waits where layers load their own rows."""
        self.half.wait_for_layer(name)

    def save_kv_layer(self, name, layer, metadata) -> None:
        """Forward."""
        self.half.layer_saved(name, metadata)

    def get_transfer_results(self, finished):
        """Forward."""
        sent, received, failed = self.half.finished()
        return SimpleNamespace(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Forward; there are none where requests wait for their loads."""
        return self.half.bad_blocks()


class WholeConnector(UCMConnector):
    """The class that the engine is given, with our setup instead of a derived one."""

    def __init__(self, role: KVConnectorRole, setup: OneStore, rank: int = 0) -> None:
        self._given = setup
        ranks = setup.topology.num_ranks
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, world_size=ranks),
            device_config=SimpleNamespace(device_type="cpu"),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
        )
        super().__init__(config, role, object())

    def _make_setup(self, vllm_config, kv_cache_config) -> OneStore:
        return self._given


@attrs.frozen
class World:
    """The host, and the connector around it."""

    host: FakeHost
    scheduler: SchedulerHalf
    workers: list[WorkerHalf]
    store: MemoryStore
    doors: Sequence[object]
    """What the host has for workers."""

    def run(self, acts: int) -> None:
        """Let the host act, with time for the connector's threads, and come to rest."""
        for number in range(acts):
            self.host.act()
            if number % 4 == 0:
                self.idle()
        self.host.drain(self.idle)
        assert not any(self.host.audit().values())

    def idle(self) -> None:
        """Let the connector's threads go on until one of them has news."""
        for worker in self.workers:
            worker._runtime.wait_for_notice(0.01)


def _page_bytes(layout: KVLayout) -> int:
    return max(row.page_bytes for group in layout.groups for row in group.rows)


@contextlib.contextmanager
def world(
    seed: int,
    layout: KVLayout = ONE_FULL,
    *,
    num_ranks: int = 2,
    num_blocks: int = 48,
    settings: HostSettings | None = None,
    plan: FaultPlan | None = None,
    is_whole: bool = False,
    topology: Topology | None = None,
    layouts: Sequence[KVLayout] = (),
    tells_early: bool = True,
    mode: Mode = DIRECT,
    capacity_blocks: int = 400,
    wrap: Callable[[UCMConnector], object] = lambda connector: connector,
) -> Iterator[World]:
    """
    Run the real halves under a fake host, with a store that follows *plan*.

    Args:
        seed: Of the host's choices.
        layout: The engine's groups, as the scheduler knows them.
        num_ranks: Tensor ranks.
        num_blocks: In the pool of each rank.
        settings: Of the host.
        plan: Faults of the store.
        is_whole: Behind the class that the engine is given; else behind doors that
            never wait for anything.
        topology: Of the ranks, if they are not tensor ranks only.
        layouts: By rank, where they have rows of their own.
        tells_early: Ranks tell what they store before the first request; else by
            their first report.
        mode: How blocks are saved and loaded.
        capacity_blocks: Of the store.
        wrap: Puts a class around the one that the engine is given.
    """
    plan = plan or FaultPlan()
    topology = topology or Topology(tensor=num_ranks)
    layouts = layouts or [layout] * topology.num_ranks
    setup = make_setup(
        layout,
        num_ranks,
        num_blocks,
        plan,
        capacity_blocks,
        topology=topology,
        slot_bytes=max(one.max_block_bytes for one in layouts),
    )
    second = settings is not None and settings.overwrites_first
    setup = attrs.evolve(
        setup,
        mode=mode,
        overwrites_first=second,
        confirms=second and settings.clears,
    )
    setups = [
        attrs.evolve(
            setup,
            layout=one,
            keyspace=attrs.evolve(setup.keyspace, layout=one.fingerprint()),
        )
        for one in layouts
    ]
    memories = [
        torch.zeros((one.num_rows, num_blocks, _page_bytes(one)), dtype=torch.uint8)
        for one in layouts
    ]
    if is_whole:
        doors = [
            WholeConnector(KVConnectorRole.WORKER, one, rank)
            for rank, one in enumerate(setups)
        ]
        workers = [door._worker for door in doors]
        front = WholeConnector(KVConnectorRole.SCHEDULER, setup)
        scheduler = front._scheduler
        closing = [one.shutdown for one in (front, *doors)]
        doors, front = [wrap(door) for door in doors], wrap(front)
    else:
        scheduler = SchedulerHalf(setup)
        front = SchedulerDoor(scheduler)
        workers = [WorkerHalf(one, rank, "cpu") for rank, one in enumerate(setups)]
        doors = [WorkerDoor(worker) for worker in workers]
        closing = [half.close for half in (scheduler, *workers)]
    for worker, memory, one in zip(workers, memories, layouts, strict=True):
        worker.register(
            {
                name: memory[row.row_id][:, : row.page_bytes]
                for group in one.groups
                for row in group.rows
                for name in row.layer_names
            },
            parts_of(TinyModel()),
        )

    if tells_early:
        scheduler.agree(worker.handshake() for worker in workers)

    def containers() -> dict[str, int]:
        counts = scheduler.counts()
        del counts["denied_keys"]
        for worker in workers:
            for name, count in worker.counts().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    with contextlib.ExitStack() as stack:
        for close in closing:
            stack.callback(close)
        host = FakeHost(
            scheduler=front,
            workers=doors,
            memories=[memory.numpy() for memory in memories],
            layout=layout,
            choices=SeededChoices(seed),
            settings=settings,
            shards=[topology.shard_of(rank) for rank in range(len(workers))],
            layouts=layouts,
            containers=containers,
        )
        yield World(host, scheduler, workers, setup.store.inner, doors)
