# SPDX-License-Identifier: Apache-2.0
"""An engine that publishes what slab and disk have, a subscriber, and a look past both."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from examples.kv_mirror import Place, Subscription
from tests.backends.disk_kit import keys_on
from tests.e2e.connector import halves, prompt, ucm_config
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache
from tests.kit.agents import end_agent
from ucm.blocks import PackedKey, hash_of
from ucm.stores.slab import SlabStore
from ucm.stores.slab._chains import unpack_key
from ucm.stores.slab._layout import COMMITTED

__all__ = [
    "DISK",
    "LIMIT_S",
    "PROMPTS",
    "SIZE",
    "SLAB",
    "Node",
    "published",
    "soak",
    "soaked",
]

SIZE = 32
PROMPTS = [prompt(9100 + n, 8 * SIZE) for n in range(14)]
SLAB, DISK = Place("CPU", "slab", 0), Place("STORAGE", "disk", 0)
LIMIT_S = 120.0
_ACTS = {"ask": 40, "reset": 4, "kill the agent": 1}


class Node:
    """An engine that publishes, over a slab and a disk that are too small for its prompts."""

    def __init__(self, llm: Any, place: Path) -> None:
        self.llm = llm
        self.place = place
        self.subscription = Subscription(f"ipc://{place}/pub", f"ipc://{place}/replay")
        self.subscription.catch_up()
        self.slot_bytes = halves(llm)[0]._scheduler._setup.facts(0).slot_bytes

    @property
    def mirror(self) -> Any:
        """What the subscriber has."""
        return self.subscription.mirror

    @property
    def client(self) -> Any:
        """What talks to the agent."""
        return halves(self.llm)[0]._scheduler._tiers._client

    def kill_agent(self) -> None:
        """Kill it, and wait until it is gone."""
        end_agent(self.client._launch)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Let the engine run small steps and the subscriber listen until something is so."""
        until = time.monotonic() + LIMIT_S
        while not is_so():
            assert until > time.monotonic()
            generate(self.llm, [[3]], 1)
            self.subscription.follow(0.02)

    def in_slab(self) -> set[int]:
        """Return the hashes of what the slab's slots have, past everybody."""
        path, nbytes = self.place / "slab", self.slot_bytes
        with SlabStore.join(path, block_bytes=nbytes, index_only=True) as slab:
            index = slab._slab.index
            slots = np.flatnonzero(index.state == COMMITTED)
            return _hashes(map(unpack_key, index.records["key"][slots]))

    def on_disk(self) -> set[int]:
        """Return the hashes of what the disk's file has."""
        return _hashes(map(PackedKey, keys_on(self.place / "disk")))

    def mirrored(self, place: Place) -> set[int]:
        """Return the hashes of what the subscriber takes to be there."""
        return set(self.mirror.places.get(place, ()))

    def is_on_disk_alone(self, tokens: list[int]) -> bool:
        """Return whether the subscriber would have a prompt loaded from the disk."""
        found = self.mirror.reusable(tokens)
        return found[DISK] == len(tokens) and not found[SLAB]

    def settle(self) -> None:
        """Wait until nothing moves any more: what is saved is told, and spilled."""
        assert halves(self.llm)[1]._worker._runtime.flush(LIMIT_S)
        self.until(lambda: self.in_slab() == self.mirrored(SLAB))
        self.until(lambda: self.on_disk() == self.mirrored(DISK))


def _hashes(keys: Iterable[PackedKey]) -> set[int]:
    """Return the engine's hashes as its events have them: the last eight bytes."""
    return {int.from_bytes(hash_of(key)[-8:], "big") for key in keys}


@contextmanager
def published(model: Path) -> Iterator[Node]:
    """Return an engine with events; a socket's path may not be long."""
    from vllm.config import KVEventsConfig

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place = Path(directory)
        tier = {"type": "disk", "path": str(place / "disk"), "capacity": "3MiB"}
        config = ucm_config(
            place / "slab", "1MiB", tiers=[tier], kv_events="node", save_decoded="never"
        )
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{place}/pub",
            replay_endpoint=f"ipc://{place}/replay",
        )
        with in_process_engine(
            model, kv_transfer_config=config, block_size=SIZE, kv_events_config=events
        ) as llm:
            made = Node(llm, place)
            try:
                made.until(lambda: made.client.is_up)
                yield made
            finally:
                made.subscription.close()


def soak(node: Node, seed: int, rounds: int, acts: int) -> Counter[str]:
    """
    Ask at random more than slab and disk hold, and compare behind each round.

    Args:
        node: Of an engine.
        seed: Of what is done.
        rounds: How often slab, disk and mirror are compared.
        acts: In each.

    Returns:
        How often what was done.

    Raises:
        AssertionError: The mirror does not become what slab and disk have.
    """
    chance, done = random.Random(seed), Counter[str]()
    for _ in range(rounds):
        for what in chance.choices(list(_ACTS), list(_ACTS.values()), k=acts):
            done[what] += 1
            if what == "ask":
                asked = chance.sample(PROMPTS, chance.randint(1, 3))
                cut = [each[: SIZE * chance.randint(1, 8)] for each in asked]
                generate(node.llm, cut, 1)
            elif what == "reset":
                reset_prefix_cache(node.llm)
            else:
                node.kill_agent()
                node.until(lambda: node.client.is_up)
        node.settle()
        done["blocks compared"] += len(node.in_slab()) + len(node.on_disk())
        assert 0 == node.mirror.num_lost
    return done


def soaked(model: str, seed: int, rounds: int, acts: int) -> dict[str, int]:
    """Soak an engine of its own."""
    with published(Path(model)) as node:
        return dict(soak(node, seed, rounds, acts))
