# SPDX-License-Identifier: Apache-2.0
"""A subscriber of the real engine's events mirrors slab and disk, exactly, through evictions."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.kv_mirror import Place, Subscription
from tests.backends.disk_kit import keys_on
from tests.e2e.connector import halves, prompt, ucm_config
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache
from tests.e2e.test_store_trouble import labelled
from ucm.blocks import PackedKey, hash_of
from ucm.stores.slab import SlabStore
from ucm.stores.slab._chains import unpack_key
from ucm.stores.slab._layout import COMMITTED

SIZE = 32
PROMPTS = [prompt(9100 + n, 8 * SIZE) for n in range(14)]
SLAB, DISK = Place("CPU", "slab", 0), Place("STORAGE", "disk", 0)
LIMIT_S = 120.0


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
        agent = self.client._launch._process
        agent.kill()
        agent.wait()

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


@pytest.fixture
def node(llama: Path) -> Iterator[Node]:
    """Return an engine with events; a socket's path may not be long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place = Path(directory)
        tier = {"type": "disk", "path": str(place / "disk"), "capacity": "3MiB"}
        config = ucm_config(
            place / "slab", "1MiB", tiers=[tier], kv_events="node", save_decoded="never"
        )
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{place}/pub",
            replay_endpoint=f"ipc://{place}/replay",
        )
        with in_process_engine(
            llama, kv_transfer_config=config, block_size=SIZE, kv_events_config=events
        ) as llm:
            made = Node(llm, place)
            made.until(lambda: made.client.is_up)
            yield made
            made.subscription.close()


def test_mirror_is_exact_through_evictions_in_all_tiers(node: Node) -> None:
    """R-57: blocks that were stored and removed in slab and disk, as a subscriber of the
    engine's own publisher has them, are those that a look past everybody finds; with their
    tokens, and also after the engine's cache was emptied and the agent was killed. A hit of
    what is on the disk alone counts as one of the disk, with us and with the engine."""
    for each in PROMPTS:
        generate(node.llm, [each], 1)
    node.settle()
    node.until(lambda: node.mirrored(SLAB) < node.mirrored(DISK))
    total = 8 * len(PROMPTS)
    assert 0 < len(node.mirrored(SLAB)) < len(node.on_disk()) < total
    places = node.mirror.places
    assert all(block.tokens for block in places[SLAB].values())
    assert 8 * SIZE == node.mirror.reusable(PROMPTS[-1])[SLAB]
    assert 0 == node.mirror.reusable(PROMPTS[0])[SLAB]

    before = node.mirrored(DISK)
    reset_prefix_cache(node.llm)  # the subscriber forgets all, and is told all again
    node.until(lambda: node.mirror.num_cleared == 1)
    node.settle()
    assert before == node.mirrored(DISK)

    below = next(each for each in PROMPTS if node.is_on_disk_alone(each))
    hit = generate(node.llm, [below], 1).external_tokens
    assert hit > 0
    assert hit == labelled(node.llm, "vllm:ucm_hit_tokens", tier="disk")
    assert hit == labelled(
        node.llm, "vllm:prompt_tokens_cached_by_source", source="disk"
    )

    node.kill_agent()
    generate(node.llm, [PROMPTS[0]], 1)
    node.until(lambda: node.client.is_up)
    node.settle()
    generate(node.llm, [PROMPTS[1]], 1)
    node.settle()
    assert 0 == node.mirror.num_lost
