# SPDX-License-Identifier: Apache-2.0
"""A subscriber of the real engine's events mirrors slab and disk, exactly, through evictions."""

import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.kv_mirror import Subscription
from tests.e2e.connector import halves, ucm_config
from tests.e2e.engine import generate, reset_prefix_cache
from tests.e2e.mirrored import DISK, LIMIT_S, PROMPTS, SIZE, SLAB, Node, published, soak
from tests.e2e.server import Server, serve
from tests.e2e.test_store_trouble import labelled


@pytest.fixture
def node(llama: Path) -> Iterator[Node]:
    """Return an engine with events."""
    with published(llama) as made:
        yield made


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


def test_mirror_is_exact_after_a_soak(node: Node) -> None:
    """R-57: behind what was asked, emptied and killed at random, with evictions from slab and
    disk all the time, the mirror is what a look past everybody finds."""
    done = soak(node, seed=5, rounds=2, acts=20)
    assert 40 == done["ask"] + done["reset"] + done["kill the agent"]
    assert min(done["ask"], done["reset"], done["kill the agent"]) > 0
    store = halves(node.llm)[1]._worker._store
    assert store.stats().evicted_blocks_total > 0


def test_idle_engine_tells_what_its_last_request_stored(llama: Path) -> None:
    """R-57: nobody sends another request, and the subscriber has all that was stored, in slab
    and disk; on a machine that is slow, behind a call that wakes the engine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place = Path(directory)
        tier = {"type": "disk", "path": str(place / "disk"), "capacity": "3MiB"}
        config = ucm_config(place / "slab", tiers=[tier], kv_events="node")
        pub, replay = f"ipc://{place}/pub", f"ipc://{place}/replay"
        events: dict[str, object] = {"enable_kv_cache_events": True}
        events |= {"endpoint": pub, "replay_endpoint": replay}
        options = "--block-size", str(SIZE), "--kv-events-config", json.dumps(events)
        with serve(
            *(llama, *options), log=place / "log", kv_transfer_config=config
        ) as server:
            subscription = Subscription(pub, replay)
            server.complete(PROMPTS[0], 1)
            try:
                _until_told(subscription, server)
            finally:
                subscription.close()


def _until_told(subscription: Subscription, server: Server) -> None:
    """Listen until both places have a prompt."""
    mirror, until = subscription.mirror, time.monotonic() + LIMIT_S
    subscription.catch_up()
    while [8, 8] != [len(mirror.places.get(place, ())) for place in (SLAB, DISK)]:
        assert until > time.monotonic(), mirror.count()
        subscription.follow(1.0)
        urllib.request.urlopen(f"{server.url}/is_sleeping", timeout=LIMIT_S).close()
