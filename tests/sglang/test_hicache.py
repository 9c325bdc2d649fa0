# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, by our ``HiCacheStorage``."""

import random
from pathlib import Path

import pytest

from tests.sglang.door import SGLangDoor, shared_forks
from ucm.testing.door import Door, Prompts, Setting
from ucm.testing.door_contract import DoorContract
from ucm.testing.slab_damage import stored, unsound

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class TestLayerFirst(DoorContract):
    """R-81: cold, warm, restarted, killed, damaged and without room."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return SGLangDoor(shared_forks(), "layer_first")


def prompts_of(count: int) -> Prompts:
    """Return prompts that have no page in common."""
    rng = random.Random(count)
    return [[rng.randrange(5, 500) for _ in range(90)] for _ in range(count)]


def test_pages_in_another_order_are_the_same_pages(tmp_path: Path) -> None:
    """R-81: what one order of the host pool has saved a new process of another finds."""
    slab, prompts = tmp_path / "slab", prompts_of(4)
    door = SGLangDoor(shared_forks(), "layer_first")
    said = door.baseline(prompts, 8, Setting.PLAIN)
    for layout, found in (("layer_first", 0), ("page_first_direct", 20)):
        door = SGLangDoor(shared_forks(), layout)
        door.start(slab, Setting.PLAIN)
        assert said == door.generate(prompts, 8)
        assert found == door.loaded_blocks()
        door.settle()
        door.forget()
        assert said == door.generate(prompts, 8)
        assert found + 20 == door.loaded_blocks()
        door.stop()


def test_calls_that_fail_and_last_cost_time_only(tmp_path: Path) -> None:
    """R-81: SGLang's own failures and delays before each call of ours, and in between."""
    slab, prompts = tmp_path / "slab", prompts_of(8)
    door = SGLangDoor(
        shared_forks(),
        "layer_first",
        {
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.01",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        },
    )
    said = door.baseline(prompts, 8, Setting.PLAIN)
    door.start(slab, Setting.PLAIN)
    for _ in range(6):
        assert said == door.generate(prompts, 8)
        door.settle()
        door.forget()
    assert 0 < door.loaded_blocks() < 5 * 40
    assert {} == door.left()
    door.stop()
    assert [] == unsound(slab)
    assert 0 < len(stored(slab))
