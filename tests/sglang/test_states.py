# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, with recurrent states beside pages, by HiCache."""

import random
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from tests.e2e.models import QWEN3_NEXT, Recipe
from tests.sglang.door import SGLangDoor, shared_forks
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
QWEN = attrs.evolve(QWEN3_NEXT, constants={"A_log": -5.0})
"""Gated delta nets, whose states fade so slowly that hundreds of tokens matter."""
FALCON = Recipe(
    name="falcon-h1",
    config_class="FalconH1Config",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
        "max_position_embeddings": 8192,
    },
    constants={"A_log": -5.0},
)
"""Mamba 2 and attention side by side in each layer."""
PROMPTS, SAID = 3, 8


@attrs.frozen(kw_only=True)
class Case:
    """
    A model, and where SGLang keeps its states.

    Args:
        model: What is served.
        layers: How many of it have a state; each is a block.
        tokens: Of a first turn's prompt.
        found: Of the second turn's prompt; the first turn has left a state behind them.
        args: More of SGLang's own.
    """

    model: Recipe
    layers: int
    tokens: int = 90
    found: int = 90 + SAID - 1
    args: Mapping[str, object] = {"page_size": 1}

    @property
    def pages(self) -> int:
        """Return how many pages of all prompts are found."""
        return PROMPTS * self.found // int(str(self.args["page_size"]))

    @property
    def blocks(self) -> int:
        """Return them with the parts of a state each."""
        return self.pages + PROMPTS * self.layers

    def door(self) -> SGLangDoor:
        """Return an engine whose states lose nothing when a prompt is computed in parts."""
        environment = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
        forks, layout = shared_forks(), "page_first_direct"
        return SGLangDoor(forks, layout, environment, self.model, self.args)

    def prompts(self) -> Prompts:
        """Return prompts that have nothing in common."""
        rng = random.Random(self.tokens)
        return [
            [rng.randrange(5, 500) for _ in range(self.tokens)] for _ in range(PROMPTS)
        ]


INTERVAL = {"json_model_override_args": '{"full_attention_interval": 4}'}
"""Written by who makes such models; SGLang reads nothing else of where attention is."""
EXTRA = {
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
    "page_size": 16,
}
CASES = {
    "lfm2": Case(model=LFM2, layers=2),
    "gated delta net": Case(model=QWEN, layers=3, args={"page_size": 1} | INTERVAL),
    "gated delta net, extra buffer": Case(
        model=QWEN, layers=3, tokens=122, found=128, args=EXTRA | INTERVAL
    ),
    "mamba 2, extra buffer": Case(
        model=FALCON, layers=2, tokens=122, found=128, args=EXTRA
    ),
}
"""A page is a token where SGLang keeps a state behind each turn. With extra buffers there is one
within the prompt, and one in the midst of the answer, behind 128 tokens."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_states_are_exact_whatever_of_them_is_stored(
    case: Case, tmp_path: Path
) -> None:
    """R-81: a conversation goes on in a new process out of its pages and the state behind them,
    each counted; where those of one kind are not as they were saved, all is computed. Other
    states would be seen: they make other answers."""
    slab, first = tmp_path / "slab", case.prompts()
    door = case.door()
    with door.alone():
        said = door.generate(first, SAID)
        turns = zip(first, said, strict=True)
        second = [[*asked, *answer, 20] for asked, answer in turns]
        answers = door.generate(second, SAID)

    def ask(door: SGLangDoor, prompts: Prompts, expected: Prompts) -> int:
        before = door.loaded_blocks()
        assert expected == door.generate(prompts, SAID)
        found = door.loaded_blocks() - before
        door.settle()
        door.forget()
        return found

    door.start(slab, Setting.PLAIN)
    assert 0 == ask(door, first, said)
    door.stop()
    door = case.door()
    door.start(slab, Setting.PLAIN)
    assert case.blocks == ask(door, second, answers)
    door.engine.ask("spoil")
    spoilt = door.generate(second, SAID)
    assert all(one != other for one, other in zip(spoilt, answers, strict=True))
    door.engine.ask("spoil")
    door.settle()
    door.forget()
    assert case.blocks == ask(door, second, answers)
    states, pages = by_kind(slab)
    assert PROMPTS * case.layers <= len(states) < len(pages)
    damage(slab, Damage.BITS, states)
    cached = door.engine.ask("cached")
    assert case.pages == ask(door, second, answers), "pages came without a state"
    assert cached == door.engine.ask("cached"), "so that all was computed"
    damage(slab, Damage.BITS, by_kind(slab)[-1])
    assert 0 == ask(door, second, answers), "states alone are of no use"
    assert {} == door.left()
    door.stop()
