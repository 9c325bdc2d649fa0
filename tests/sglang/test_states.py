# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, with recurrent states beside pages, by HiCache."""

from pathlib import Path

import pytest

from tests.e2e.models import Recipe
from tests.sglang.door import SGLangDoor, shared_forks
from tests.sglang.test_hicache import prompts_of
from tests.sglang.test_windows import by_kind
from ucm.testing.door import Prompts, Setting
from ucm.testing.slab_damage import Damage, damage

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LFM2 = Recipe(
    name="lfm2",
    config_class="Lfm2Config",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"] * 2,
        "max_position_embeddings": 8192,
    },
)
"""Short convolutions, whose state is recurrent, and attention over all tokens."""
PROMPTS, SAID = 3, 8
TURN = 90 + SAID - 1
"""Tokens behind which a turn leaves a state; a page is a token where SGLang keeps states so."""
WHOLE = PROMPTS * (TURN + LFM2.config["layer_types"].count("conv"))
"""Of a state each layer is a block."""


def make_door() -> SGLangDoor:
    """Return an engine whose states lose nothing when a prompt is computed in parts."""
    environment = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    args = {"page_size": 1}
    forks = shared_forks()
    return SGLangDoor(forks, "page_first_direct", environment, LFM2, args)


def test_states_are_exact_whatever_of_them_is_stored(tmp_path: Path) -> None:
    """R-81: a conversation goes on in a new process out of its pages and the state behind them,
    each counted; where those of one kind are not as they were saved, all is computed. Other
    states would be seen: they make other answers."""
    slab, first = tmp_path / "slab", prompts_of(PROMPTS)
    plain = make_door()
    said = plain.baseline(first, SAID, Setting.PLAIN)
    turns = zip(first, said, strict=True)
    second = [[*asked, *answer, 20] for asked, answer in turns]
    answers = plain.baseline(second, SAID, Setting.PLAIN)

    def ask(door: SGLangDoor, prompts: Prompts, expected: Prompts) -> int:
        before = door.loaded_blocks()
        assert expected == door.generate(prompts, SAID)
        found = door.loaded_blocks() - before
        door.settle()
        door.forget()
        return found

    door = make_door()
    door.start(slab, Setting.PLAIN)
    assert 0 == ask(door, first, said)
    door.stop()
    door = make_door()
    door.start(slab, Setting.PLAIN)
    assert WHOLE == ask(door, second, answers)
    door.engine.ask("spoil")
    spoilt = door.generate(second, SAID)
    assert all(one != other for one, other in zip(spoilt, answers, strict=True))
    door.engine.ask("spoil")
    door.settle()
    door.forget()
    assert WHOLE == ask(door, second, answers)
    states, pages = by_kind(slab)
    assert WHOLE - PROMPTS * TURN <= len(states) < len(pages)
    damage(slab, Damage.BITS, states)
    cached = door.engine.ask("cached")
    assert PROMPTS * TURN == ask(door, second, answers), "pages came without a state"
    assert cached == door.engine.ask("cached"), "so that all was computed"
    damage(slab, Damage.BITS, by_kind(slab)[-1])
    assert 0 == ask(door, second, answers), "states alone are of no use"
    assert {} == door.left()
    door.stop()
