# SPDX-License-Identifier: Apache-2.0
"""
An engine whose ranks are on two machines: two slabs, two agents, one tier between them.

The machines are directories of one host; the agents are processes, as engines start them.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from tests.integration.vllm.kit import engine_config, plain_cache
from tests.integration.vllm.test_halves import NUM_BLOCKS, PAGE, request
from tests.kit.agents import end_agent
from tests.kit.file_tier import registration
from ucm.agent.joining import check_machines
from ucm.blocks import BlockKey, ShardId
from ucm.config import UCMConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.ranks import Topology
from ucm.scheduler.matching import PrefixMatcher

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0
WHOLE = 48


def until(is_so) -> None:
    """Wait for a condition."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert end > time.monotonic()
        time.sleep(0.01)


def setup_of(tmp_path, shm, name, *, tiers=None, **more):
    """Return the setup of a machine by name; all share a tier, and nothing else."""
    share = tmp_path / "share"
    share.mkdir(exist_ok=True)
    if tiers is None:
        tiers = [{"type": "file-tier", "path": str(share)}]
    extra = {
        "store": {"path": str(shm / name), "capacity": "1MiB"},
        "tiers": tiers,
        "predict_loads": False,
        "timeout": {"fetch": LIMIT_S / 2},
        "log": {"level": "off"},
        **more,
    }
    model = engine_config(str(tmp_path), weights_revision="r", **extra)
    setup = Setup.of(model, plain_cache())
    return attrs.evolve(setup, topology=Topology(tensor=2), is_spread=True)


class Cluster:
    """One engine: a scheduler and a rank on machine 1, a rank on machine 2."""

    def __init__(self, tmp_path, shm, first="one", second="two") -> None:
        setups = [setup_of(tmp_path, shm, name) for name in (first, second)]
        self.scheduler = SchedulerHalf(setups[0])
        self.workers = [
            WorkerHalf(setup, rank, "cpu") for rank, setup in enumerate(setups)
        ]
        self.memory = [
            torch.zeros((2, NUM_BLOCKS, PAGE), dtype=torch.uint8) for _ in range(2)
        ]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register(dict(zip("ab", memory, strict=True)))
        self.scheduler.agree([worker.handshake() for worker in self.workers])
        self.clients = self.scheduler._tiers._client, self.workers[1]._wants._client
        until(lambda: all(client.is_up for client in self.clients))
        self.agents = [client._launch for client in self.clients]

    def close(self) -> None:
        """End the engine; its agents stay."""
        for half in (self.scheduler, *self.workers):
            half.close()

    def step(self, new=(), blocks=()) -> set[str]:
        """Run one step on both machines; return whose loads have failed."""
        output = SimpleNamespace(
            preempted_req_ids=set(),
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
        plan = self.scheduler.plan(output)
        failed: set[str] = set()
        for worker in self.workers:
            worker.bind(plan)
            worker.start_loads()
            worker.submit_saves()
            worker.clear()
            received: set[str] = set()
            while True:
                _, done, lost = worker.finished()
                received |= done
                failed |= lost
                if not worker.counts()["open"]:
                    break
                worker._runtime.wait_for_notice(5)
            self.scheduler.apply(
                SimpleNamespace(
                    kv_connector_worker_meta=worker.report(),
                    finished_recving=received,
                    finished_sending=set(),
                )
            )
        return failed

    def ask(self, name="s", one=None) -> int:
        """Let a request wait until it is known how much of it is found."""
        one, found = one or request(name), None

        def is_known() -> bool:
            nonlocal found
            found, _ = self.scheduler.match(one, 0)
            if found is None:
                self.step()
            return found is not None

        until(is_known)
        return found

    def save(self) -> None:
        """Compute a request of three blocks, and have it spilled on both machines."""
        for rank, memory in enumerate(self.memory):
            memory[:, 1:4] = torch.arange(1, 7).reshape(2, 3, 1) + 10 * rank
        one = request("r")
        self.ask("r")
        self.scheduler.allocated(one, [[1, 2, 3]], 0)
        self.step([one], [1, 2, 3])
        self.scheduler.finished("r")

    def why(self, name, **wishes):
        """Ask a prompt, give it blocks, and return why it found less, and of which block."""
        one = request(name)
        one.kv_transfer_params = wishes
        found = self.ask(name, one)
        self.scheduler.allocated(one, [[5, 6, 7]], found)
        miss = self.scheduler.running.known(one).miss
        self.step()
        self.scheduler.finished(name)
        self.step()
        at = miss.block.at if miss.block else None
        return found, miss.reason, miss.detail.get("text", ""), at

    def load(self, name="s") -> set[str]:
        """Load what was found of a request into other blocks; return whose loads failed."""
        self.scheduler.allocated(request(name), [[5, 6, 7]], WHOLE)
        return self.step()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return what starts an engine on two machines; ends it and their agents."""
    path = registration(tmp_path / "registration")
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(ROOT)]))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        contextlib.ExitStack() as stack,
    ):

        def start(*names: str) -> Cluster:
            made = Cluster(tmp_path, Path(shm), *names)
            for agent in made.agents:
                stack.callback(end_agent, agent)
            stack.callback(made.close)
            return made

        yield start


def keys_of(worker, digest, rank):
    """Return the keys of a rank's parts of the prompt."""
    layout = worker._setup.layout
    matcher = PrefixMatcher(
        layout, worker.store, digest, [ShardId(rank)], full_hits=False
    )
    return matcher.keys_of(layout.groups[0], request("r").block_hashes)


def parts(tmp_path) -> int:
    """Return how many parts of blocks are on the share."""
    return sum(not path.suffix for path in (tmp_path / "share").iterdir())


class TestMachines:
    def test_prompt_is_found_where_each_machine_has_its_part(
        self, start, tmp_path
    ) -> None:
        """R-60: what an engine on two machines has saved is found by the next one, on two
        other machines, whose agents fetch each rank's own part; the bytes are right."""
        one = start()
        one.save()
        until(lambda: parts(tmp_path) == 6)
        two = start("three", "four")
        assert WHOLE == two.ask()
        assert set() == two.load()
        for rank, worker in enumerate(two.workers):
            there = [each.key for each in worker.store.changes(None).told]
            assert [rank] * 3 == [BlockKey.unpack(key).shard_id for key in there]
        for was, now in zip(one.memory, two.memory, strict=True):
            assert torch.equal(was[:, 1:4], now[:, 5:8])
        two.scheduler.finished("s")
        two.step()
        for half in (two.scheduler, *two.workers):
            assert not any(half.counts().values())

    def test_part_that_one_machine_lacks_is_a_miss(self, start, tmp_path) -> None:
        """R-60: a block whose part of one rank is lost is not found, though the other part
        is here; those before it are."""
        one = start()
        one.save()
        until(lambda: parts(tmp_path) == 6)
        digest = one.scheduler._adapter.matcher.keyspace_digest
        keys = keys_of(one.workers[1], digest, 1)
        one.workers[1].store.forget(keys[2:])
        (tmp_path / "share" / keys[2].hex()).unlink()
        assert (
            *(2 * WHOLE // 3, "unknown"),
            *("a rank on another machine lacks its part", 2),
        ) == one.why("s")

    def test_block_that_this_machine_lacks_as_well_is_told_as_on_one_machine(
        self, start, tmp_path
    ) -> None:
        """R-71: of a prompt that nobody has asked before, of one that was forgotten, and of one that
        wants nothing, it was told that a rank elsewhere lacks its part."""
        one = start()
        assert (0, "never_offered", "", 0) == one.why("c")
        one.save()
        until(lambda: parts(tmp_path) == 6)
        limited = "the request limits what is loaded"
        assert (0, "admission", limited, None) == one.why("l", max_load_tokens=0)
        digest = one.scheduler._adapter.matcher.keyspace_digest
        for rank, worker in enumerate(one.workers):
            keys = keys_of(worker, digest, rank)[1:]
            worker.store.forget(keys)
            for key in keys:
                (tmp_path / "share" / key.hex()).unlink()
        assert (WHOLE // 3, "evicted", "forgotten", 1) == one.why("s")

    def test_machine_whose_agent_died_has_nothing(self, start, tmp_path) -> None:
        """R-60, R-63: with one agent dead a prompt is a miss, and nobody waits for long."""
        one = start()
        one.save()
        until(lambda: parts(tmp_path) == 6)
        client = one.clients[1]
        client._launch = lambda: ""
        end_agent(one.agents[1])
        until(lambda: not client.is_up)
        assert 0 == one.ask()

    def test_part_that_goes_behind_the_answer_fails_the_load(
        self, start, tmp_path
    ) -> None:
        """R-60: a slab of another machine that loses a block behind the answer fails the
        load, which the engine computes again; nothing is taken for it."""
        one = start()
        one.save()
        assert WHOLE == one.ask()
        rank = one.workers[1]
        found = rank.store.changes(None)
        rank.store.forget([change.key for change in found.told])
        assert {"s"} == one.load()

    def test_forgotten_prompt_is_deleted_on_each_machine(self, start, tmp_path) -> None:
        """R-60: a request that wants its prompt forgotten has each machine's part deleted, there
        and in the tier that they share; no step waits for it."""
        one = start()
        one.save()
        until(lambda: parts(tmp_path) == 6)
        assert WHOLE == one.ask()
        asked = request("s")
        asked.kv_transfer_params = {"ucm": {"forget": True}}
        one.scheduler.allocated(asked, [[5, 6, 7]], 0)
        one.step([asked], [5, 6, 7])
        one.scheduler.finished("s", [[5, 6, 7]])
        one.step()
        assert one.workers[1]._wants._forgetter is not None  # it was told to
        digest = one.scheduler._adapter.matcher.keyspace_digest
        for rank, worker in enumerate(one.workers):
            keys = keys_of(worker, digest, rank)
            until(lambda keys=keys, of=worker: not any(of.store.contains(keys)))
        until(lambda: parts(tmp_path) == 0)


class TestRefused:
    @pytest.mark.parametrize(
        ("more", "key"),
        [
            ({"tiers": []}, "tiers"),
            (
                {"tiers": [{"type": "disk", "path": "/x", "capacity": "1MiB"}]},
                "tiers",
            ),
            ({"kv_events": "engine"}, "kv_events"),
        ],
    )
    def test_ranks_elsewhere_need_a_tier_that_all_see(
        self, tmp_path, more, key
    ) -> None:
        """R-60: without one no part would ever come, and the engine says so by name."""
        setting = {
            "tiers": [{"type": "files", "path": "/x", "capacity": "1MiB"}]
        } | more
        with pytest.raises(ConfigError) as caught:
            check_machines(UCMConfig.from_mapping(setting))
        assert key == caught.value.key
