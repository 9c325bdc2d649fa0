# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, with latent attention, by both doors."""

from pathlib import Path

import attrs
import pytest

from tests.e2e.models import DEEPSEEK
from tests.sglang.door import SGLangDoor, shared_forks
from tests.sglang.test_hicache import prompts_of
from ucm.testing.door import Prompts, Setting
from ucm.testing.slab_damage import Damage, damage, stored

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = DEEPSEEK.config["num_hidden_layers"]
LATENT = attrs.evolve(
    DEEPSEEK,
    name="deepseek-dense",
    config=DEEPSEEK.config
    | {
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
    },
)
"""Without experts, which SGLang computes on a GPU only."""
PAGES = 4 * 5


def loaded(door: SGLangDoor, prompts: Prompts, said: Prompts) -> int:
    """Have prompts answered as they must be; return how many pages the store had."""
    before = door.loaded_blocks()
    assert said == door.generate(prompts, 8)
    return door.loaded_blocks() - before


def test_latent_pages_are_exact_whoever_saved_them(tmp_path: Path) -> None:
    """R-81: cold, warm and in new processes of either door, each page counted; those that
    are not as they were saved are computed."""
    slab, prompts = tmp_path / "slab", prompts_of(4)
    changed = [[*each[:20], each[20] ^ 1, *each[21:]] for each in prompts]
    plain = SGLangDoor(shared_forks(), model=LATENT)
    said = plain.baseline([*prompts, *changed], 8, Setting.PLAIN)
    said, others = said[:4], said[4:]
    assert all(one != other for one, other in zip(said, others, strict=True))
    for layout, first, again in (
        ("", 0, PAGES),
        ("layer_first", PAGES, PAGES),
        ("page_first_direct", PAGES, 0),
    ):
        door = SGLangDoor(shared_forks(), layout, model=LATENT)
        door.start(slab, Setting.PLAIN)
        assert LAYERS == door.engine.ask("look")["rows"]  # of keys and values two each
        assert first == loaded(door, prompts, said)
        door.settle()
        door.forget()
        if not again:
            damage(slab, Damage.BITS, stored(slab))
        assert again == loaded(door, prompts, said)
        assert {} == door.left()
        door.stop()
