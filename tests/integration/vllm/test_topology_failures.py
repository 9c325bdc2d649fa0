# SPDX-License-Identifier: Apache-2.0
"""One row of one rank that fails, for each row and rank, on real stores."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from tests.integration.vllm.test_halves import Engine
from tests.integration.vllm.test_worker import KEYSPACE
from tests.rig import BLOCK_BYTES, LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, PAGE_BYTES
from ucm.blocks import BlockId, GroupId, RowId
from ucm.config import UCMConfig
from ucm.devices.abc import Fence
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceError
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.plan import HostSlots
from ucm.ranks import Topology
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.stores.wrap import WrapperStore

NUM_RANKS = 3
ALL = range(NUM_RANKS)
BLOCKS = 3


class OpenStore(WrapperStore):
    """A store that outlives each of the halves that share it."""

    def close(self) -> None:
        """Leave it open."""


class RowDevice(CPUDevice):
    """A device that fails as often as it is told when a row is copied from it."""

    def __init__(self, num_blocks: int, fails: list[int]) -> None:
        super().__init__(num_blocks)
        self.fails = fails

    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
    ) -> Fence:
        """Fail if the row is among them."""
        for row in row_ids:
            if row in self.fails:
                self.fails.remove(row)
                raise DeviceError(f"row {row} cannot be copied")
        return super().gather(group_id, row_ids, block_ids, slots)


@attrs.frozen(kw_only=True)
class RowSetup(Setup):
    """A set-up over a given store, whose device fails at some rows."""

    opener: Callable[[bool], Store]
    fails: list[int]

    def open_store(self, *, index_only: bool) -> Store:
        """Open the given store."""
        return self.opener(index_only)

    def make_device(self, device_type: str) -> RowDevice:
        """Return a device that fails."""
        return RowDevice(self.num_blocks, self.fails)


class Ranks(Engine):
    """What an engine of several ranks does with a connector, step by step."""

    def __init__(self, setup: RowSetup, bad_rank: int) -> None:
        self.scheduler = SchedulerHalf(setup)
        good = attrs.evolve(setup, fails=[])
        self.workers = [
            WorkerHalf(setup if rank == bad_rank else good, rank, "cpu")
            for rank in range(setup.topology.num_ranks)
        ]
        self.memories = torch.randint(
            0,
            256,
            (len(self.workers), NUM_ROWS, NUM_BLOCKS, PAGE_BYTES),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(1),
        )
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.register(dict(zip(LAYERS, memory, strict=True)))
        self.scheduler.agree(worker.handshake() for worker in self.workers)

    def work(self, plan, times: int = 1):
        """Let all ranks carry a plan out; return what all of them have received."""
        told = []
        for worker in self.workers:
            worker.fence(plan)
            worker.bind(plan)
            worker.start_loads()
            worker.submit_saves()
            worker.clear()
            assert worker._runtime.flush(60.0)
            told.append(worker.finished()[1])
            self.scheduler.apply(
                SimpleNamespace(
                    kv_connector_worker_meta=worker.report(),
                    finished_recving=None,
                    finished_sending=None,
                )
            )
        received = set.intersection(*told)
        self.scheduler.apply(
            SimpleNamespace(
                kv_connector_worker_meta=None,
                finished_recving=received,
                finished_sending=None,
            )
        )
        return received

    def wait_for_slots(self) -> None:
        """Wait until what failed has given its slots back, which comes behind its end."""
        until = time.monotonic() + 60.0
        while self.scheduler.store.stats().reserved_blocks:
            assert time.monotonic() < until
            time.sleep(0.001)

    def settled(self, outcome: str) -> list[int]:
        """Return by rank how many blocks that were to be saved came to this end."""
        return [
            worker._counters.total(
                "ucm_settled_parts_total", direction="save", outcome=outcome
            )
            for worker in self.workers
        ]

    def close(self) -> None:
        """End both halves."""
        for half in (*self.workers, self.scheduler):
            half.close()


def request(name: str, first_hash: int):
    """Return a request of whole blocks whose hashes begin with a number."""
    hashes = [bytes([first_hash + at]) * 32 for at in range(BLOCKS)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=16 * BLOCKS,
        num_prompt_tokens=16 * BLOCKS,
        num_computed_tokens=16 * BLOCKS,
        block_hashes=hashes,
    )


def compute(ranks: Ranks, one, blocks: Sequence[int]) -> bool:
    """Compute and save a request; return whether its blocks have to wait."""
    ranks.scheduler.match(one, 0)
    ranks.scheduler.allocated(one, [list(blocks)], 0)
    ranks.work(ranks.plan([one], blocks))
    return ranks.scheduler.finished(one.request_id)


def load(ranks: Ranks, one, blocks: Sequence[int]) -> set[str]:
    """Load a request; return who was told to have received."""
    tokens, _ = ranks.scheduler.match(one, 0)
    assert 16 * BLOCKS == tokens
    ranks.scheduler.allocated(one, [list(blocks)], tokens)
    return ranks.work(ranks.plan())


@pytest.fixture(params=["memory", "slab"])
def opener(request, tmp_path: Path) -> Iterator[Callable[[bool], Store]]:
    """Return how each half opens its store."""
    capacity = 64 * 4096
    if request.param == "slab":
        yield lambda index_only: SlabStore(
            path=str(tmp_path / "slab"),
            capacity_bytes=capacity,
            block_bytes=BLOCK_BYTES,
            index_only=index_only,
        )
        return
    with MemoryStore(64, BLOCK_BYTES) as store:
        yield lambda index_only: OpenStore(store)


@contextlib.contextmanager
def ranks_with(
    opener: Callable[[bool], Store], topology: Topology, rank: int, *rows: int
) -> Iterator[Ranks]:
    """Run an engine of which one rank fails to copy some rows, once each."""
    setup = RowSetup(
        config=UCMConfig.from_mapping(
            {"log": {"level": "off"}, "timeout": {"company": 0}}
        ),
        layout=LAYOUT,
        keyspace=attrs.evolve(KEYSPACE, parallel=topology.parallel),
        topology=topology,
        num_blocks=NUM_BLOCKS,
        recomputes=True,
        opener=opener,
        fails=list(rows),
    )
    with contextlib.closing(Ranks(setup, rank)) as ranks:
        yield ranks


class TestRows:
    @pytest.mark.parametrize("row", range(NUM_ROWS))
    @pytest.mark.parametrize("rank", ALL)
    def test_row_that_fails_on_one_rank_hides_the_block(
        self, opener, rank: int, row: int
    ) -> None:
        """X-01, S4-09: whichever row of whichever rank fails, the blocks of that save
        are never found, the failure is counted where it was, other blocks are stored
        and exact, and a later save of the same blocks succeeds."""
        with ranks_with(opener, Topology(tensor=NUM_RANKS), rank, row) as ranks:
            assert not compute(ranks, request("bad", 10), (1, 2, 3))
            others = [BLOCKS * (each != rank) for each in ALL]
            assert [BLOCKS - each for each in others] == ranks.settled("failed")
            assert others == ranks.settled("committed")
            assert (0, False) == ranks.scheduler.match(request("again", 10), 0)

            assert not compute(ranks, request("good", 20), (4, 5, 6))
            saved = ranks.memories[:, :, 4:7].clone()
            assert {"copy"} == load(ranks, request("copy", 20), (11, 12, 13))
            assert torch.equal(saved, ranks.memories[:, :, 11:14])
            assert not ranks.scheduler.finished("copy")

            assert not compute(ranks, request("retry", 10), (1, 2, 3))
            saved = ranks.memories[:, :, 1:4].clone()
            assert {"late"} == load(ranks, request("late", 10), (7, 8, 9))
            assert torch.equal(saved, ranks.memories[:, :, 7:10])

    def test_replica_that_fails_is_followed_by_the_next(self, opener) -> None:
        """S4-17, X-01: of two replicas one saves; when it fails the block is stored by
        nobody, and the other one has the next turn. Both load what one has stored."""
        topology = Topology(tensor=2, replicas=2)
        with ranks_with(opener, topology, 1, 0) as ranks:
            ranks.memories[1] = ranks.memories[0]
            compute(ranks, request("bad", 10), (1, 2, 3))
            assert [0, BLOCKS] == ranks.settled("failed")
            ranks.wait_for_slots()  # or the next save finds them taken
            assert (0, False) == ranks.scheduler.match(request("again", 10), 0)
            compute(ranks, request("retry", 10), (1, 2, 3))
            assert [BLOCKS, 0] == ranks.settled("committed")
            assert {"late"} == load(ranks, request("late", 10), (7, 8, 9))
            for memory in ranks.memories:
                assert torch.equal(memory[:, 1:4], memory[:, 7:10])

    def test_skipped_save_is_told_like_any_other(self, opener) -> None:
        """H-03: a replica that has nothing to save still releases and settles every
        ticket, so that no request waits for it."""
        topology = Topology(tensor=2, replicas=2)
        with ranks_with(opener, topology, 0) as ranks:
            assert not compute(ranks, request("r", 10), (1, 2, 3))
            counts = ranks.scheduler.counts()
            assert (0, 0) == (counts["holds"], counts["open_saves"])
            assert [0, BLOCKS] == ranks.settled("committed")
            for worker in ranks.workers:
                assert not any(worker.counts().values())
