# SPDX-License-Identifier: Apache-2.0
"""What a model says over a restored cache is what it says without one."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from tests.e2e.models import LLAMA
from tests.integration.transformers.kit import (
    BF16,
    BLOCK,
    HERE,
    KEEPS_TYPES_APART,
    OTHER,
    RELEASE,
    changed,
    config_of,
    generate,
    loaded_blocks,
    model_of,
    padded,
    place_of,
    prompt,
    tenants_of,
)
from ucm.errors import KeyFormatError, LayoutError, PipelineClosedError
from ucm.integration.transformers import BlockingPromptCache
from ucm.testing.slab_damage import Damage, damage

BLOCKS = 12
IDS = prompt(1, BLOCKS * BLOCK + 5)


def open_prompts(tmp_path: Path, model: Any = None, **options: Any) -> Any:
    """Return a cache over the test's store."""
    model = model or model_of(LLAMA)
    return BlockingPromptCache(config_of(tmp_path), model, **options)


def fill(prompts: Any, model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> Any:
    """Have a prompt computed and saved; return what was said."""
    done = generate(model, ids, mask=kwargs.get("attention_mask"))
    prompts.save(done.sequences, done.past_key_values, **kwargs)
    return done.sequences


@pytest.fixture
def prompts(tmp_path: Path) -> Iterator[Any]:
    """A cache of the small model with a store of its own."""
    with open_prompts(tmp_path) as opened:
        yield opened


def rounding() -> torch.autocast:
    """Have all be computed in fewer bits meanwhile."""
    return torch.autocast(HERE.type, torch.bfloat16)


@pytest.mark.slow
class TestAutocast:
    @KEEPS_TYPES_APART
    def test_states_of_other_precision_are_not_found(self, tmp_path: Path) -> None:
        """R-05: what was computed in whole numbers is not what is computed under autocast."""
        model = model_of(LLAMA)
        with open_prompts(tmp_path) as prompts:
            fill(prompts, model)
        with rounding(), open_prompts(tmp_path) as prompts:
            assert (None, 0) == prompts.restore(IDS)
            expected = fill(prompts, model)
            past, num_tokens = prompts.restore(IDS)
            assert 192 == num_tokens
            assert torch.equal(expected, generate(model, IDS, past).sequences)

    def test_verb_under_another_autocast_is_refused(self, prompts: Any) -> None:
        """Else states of one precision would be stored as those of another."""
        done = generate(model_of(LLAMA), IDS)
        with rounding():
            with pytest.raises(LayoutError, match="autocast"):
                prompts.restore(IDS)
            with pytest.raises(LayoutError, match="autocast"):
                prompts.save(done.sequences, done.past_key_values)
        assert 0 == prompts.cache.statistics().saved_blocks


@pytest.mark.slow
class TestCausal:
    def test_states_of_a_model_that_looks_ahead_by_now_are_refused(
        self, prompts: Any
    ) -> None:
        """A forward pass that is told so tells it to all threads by the configuration, where
        it stays if two overlap: what is computed then would be found as if it were causal."""
        model = model_of(LLAMA)
        expected = generate(model, IDS).sequences
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(model.config, "is_causal", False, raising=False)
            done = generate(model, IDS)
            assert not torch.equal(expected, done.sequences)
            with pytest.raises(LayoutError, match="is_causal"):
                prompts.save(done.sequences, done.past_key_values)
        assert 0 == prompts.cache.statistics().saved_blocks


@pytest.mark.slow
class TestExact:
    @pytest.mark.parametrize("recipe", [LLAMA, BF16], ids=["fp32", "bf16"])
    def test_every_number_of_restored_blocks_gives_the_same_tokens(
        self, tmp_path: Path, recipe: Any
    ) -> None:
        """R-81: of 0 to 12 blocks, each prompt restores those that it shares, all of
        them from the store, and the model says what it says without it."""
        model = model_of(recipe)
        with open_prompts(tmp_path, model) as first:
            fill(first, model)
        with open_prompts(tmp_path, model) as prompts:
            for blocks in range(BLOCKS + 1):
                ids, before = changed(IDS, blocks), loaded_blocks(prompts)
                expected = generate(model, ids).sequences
                past, num_tokens = prompts.restore(ids)
                assert blocks * BLOCK == num_tokens
                assert blocks == loaded_blocks(prompts) - before
                assert torch.equal(expected, generate(model, ids, past).sequences)

    def test_damaged_blocks_are_computed(self, tmp_path: Path) -> None:
        """R-81: of a store whose bytes have changed nothing is restored, and a restored
        cache of other bytes makes the model say something else."""
        model = model_of(LLAMA)
        with open_prompts(tmp_path, model) as prompts:
            said = fill(prompts, model)
            past, _ = prompts.restore(IDS)
            for layer in past.layers:
                layer.values[:, :, 3 * BLOCK : 4 * BLOCK] = 0
            assert not torch.equal(said, generate(model, IDS, past).sequences)
            before = loaded_blocks(prompts)
            assert BLOCKS == damage(tmp_path / "slab", Damage.BITS)
            assert (None, 0) == prompts.restore(IDS)
            assert before == loaded_blocks(prompts)

    def test_cache_that_is_opened_in_inference_mode_is_written_outside_of_it(
        self, tmp_path: Path
    ) -> None:
        """Where a server wraps all of its start in that mode, nothing could be saved."""
        model = model_of(LLAMA)
        with torch.inference_mode():
            opened = open_prompts(tmp_path, model)
        with opened as prompts:
            fill(prompts, model)
            with torch.inference_mode():
                assert BLOCKS * BLOCK == prompts.restore(IDS).num_tokens
            assert BLOCKS * BLOCK == prompts.restore(IDS).num_tokens

    def test_several_answers_to_a_prompt_start_from_one_restored_cache(
        self, prompts: Any
    ) -> None:
        """As the page says it is done: drawn from the same seed they are the same."""
        model = model_of(LLAMA)
        fill(prompts, model)
        past, num_tokens = prompts.restore(IDS)
        assert BLOCKS * BLOCK == num_tokens
        past.batch_repeat_interleave(2)
        options = {"num_return_sequences": 2, "do_sample": True, "use_cache": True}
        torch.manual_seed(0)
        expected = generate(model, IDS, **options).sequences
        torch.manual_seed(0)
        assert torch.equal(expected, generate(model, IDS, past, **options).sequences)

    @pytest.mark.parametrize(
        "options",
        [
            {"use_cache": False},
            *([{"prefill_chunk_size": 32}] if RELEASE < (5, 21) else []),
            {"assistant_model": OTHER},
            {"prompt_lookup_num_tokens": 3},
            {"assistant_early_exit": 2},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_generation_that_computes_its_prompt_anew_is_not_saved(
        self, prompts: Any, options: dict[str, Any]
    ) -> None:
        """Transformers puts the whole prompt behind a cache of its own as well: what is
        in it then is of other tokens, and nobody may find it."""
        model = model_of(LLAMA)
        if "assistant_model" in options:
            options = {"assistant_model": model_of(options["assistant_model"])}
        fill(prompts, model)
        own = generate(model, IDS[:, : BLOCKS * BLOCK]).past_key_values
        own.crop(BLOCKS * BLOCK - own.get_seq_length())
        restored, _ = prompts.restore(IDS)
        expected = generate(model, IDS, own, **options).sequences
        done = generate(model, IDS, restored, **options)
        assert torch.equal(expected, done.sequences)
        with pytest.raises(LayoutError, match=r"past_key_values: .* tokens"):
            prompts.save(done.sequences, restored)

    def test_one_token_alone_is_not_restored(self, tmp_path: Path) -> None:
        """Behind it a prompt that is computed anew would not be seen, and be saved as another."""
        model, ids = model_of(LLAMA), IDS[:, :8]
        with open_prompts(tmp_path, model, block_tokens=1) as prompts:
            assert 1 == prompts.save(
                ids, generate(model, ids[:, :1], num_tokens=1).past_key_values
            )
            assert (None, 0) == prompts.restore(ids)
            assert 1 == prompts.save(
                ids, generate(model, ids[:, :2], num_tokens=1).past_key_values
            )
            past, num_tokens = prompts.restore(ids)
            assert 2 == num_tokens
            done = generate(model, ids, past, prompt_lookup_num_tokens=2)
            with pytest.raises(LayoutError, match=r"past_key_values: .* tokens"):
                prompts.save(done.sequences, past)

    def test_generated_tokens_are_restored_too(self, prompts: Any) -> None:
        """What a model has said is the beginning of what it is asked next."""
        model = model_of(LLAMA)
        said = fill(prompts, model)
        ids = torch.cat([said, prompt(2, 9)], dim=1)
        past, num_tokens = prompts.restore(ids)
        assert BLOCKS * BLOCK == num_tokens
        done = generate(model, ids, past, num_tokens=20)
        assert torch.equal(
            generate(model, ids, num_tokens=20).sequences, done.sequences
        )
        assert BLOCK * 2 == prompts.save(done.sequences, done.past_key_values)

    def test_batch_with_shared_beginnings_is_exact(self, tmp_path: Path) -> None:
        """R-81: rows of several lengths, saved as a batch and one by one, restore the
        columns that all of them have, padding included."""
        model = model_of(LLAMA)
        rows = [
            prompt(1, 90),
            prompt(1, 70),
            torch.cat([prompt(1, 48), prompt(3, 9)], 1),
        ]
        ids, mask = padded(*rows)
        expected = generate(model, ids, mask=mask).sequences
        with open_prompts(tmp_path) as prompts:
            fill(prompts, model, ids, attention_mask=mask)
        with open_prompts(tmp_path) as prompts:
            past, num_tokens = prompts.restore(ids, mask)
            # Rows have 5, 4 and 4 blocks and 0, 20 and 33 columns of padding.
            assert (80, 5 + 4 + 3) == (num_tokens, loaded_blocks(prompts))
            done = generate(model, ids, past, mask)
            assert torch.equal(expected, done.sequences)
            for row in rows:  # each alone, without padding
                past, _ = prompts.restore(row)
                alone = generate(model, row, past).sequences
                assert torch.equal(generate(model, row).sequences, alone)

    def test_row_without_stored_blocks_keeps_the_batch_from_it(
        self, prompts: Any
    ) -> None:
        """A column that one row has to compute is computed for all."""
        model = model_of(LLAMA)
        fill(prompts, model)
        assert (None, 0) == prompts.restore(*padded(IDS, prompt(5, IDS.shape[1])))
        ids, mask = padded(IDS, prompt(5, IDS.shape[1] - 50))
        past, num_tokens = prompts.restore(ids, mask)
        assert 50 == num_tokens  # of the other row that is all padding
        expected = generate(model, ids, mask=mask).sequences
        assert torch.equal(expected, generate(model, ids, past, mask).sequences)


@pytest.mark.slow
class TestFound:
    def test_last_token_is_never_restored(self, prompts: Any) -> None:
        """A prompt that is stored as a whole leaves one token to be computed."""
        model, ids = model_of(LLAMA), IDS[:, : 2 * BLOCK]
        said = fill(prompts, model, IDS[:, : 3 * BLOCK])
        past, num_tokens = prompts.restore(ids)
        assert 2 * BLOCK - 1 == num_tokens == past.get_seq_length()
        expected = generate(model, ids).sequences
        assert torch.equal(expected, generate(model, ids, past).sequences)
        assert (None, 0) == prompts.restore(said[:, :1])

    def test_stored_blocks_are_not_saved_again(self, prompts: Any) -> None:
        """Only what is new is copied and stored."""
        model = model_of(LLAMA)
        done = generate(model, IDS)
        assert BLOCKS * BLOCK == prompts.save(done.sequences, done.past_key_values)
        assert 0 == prompts.save(done.sequences, done.past_key_values)
        assert BLOCKS == prompts.cache.statistics().saved_blocks

    def test_long_prompt_passes_in_parts(self, tmp_path: Path) -> None:
        """Memory between cache and store is bounded, whatever a prompt's length."""
        model = model_of(LLAMA)
        with open_prompts(tmp_path, lanes=1, lane_tokens=5 * BLOCK) as prompts:
            said = fill(prompts, model)
            past, num_tokens = prompts.restore(IDS)
            assert BLOCKS * BLOCK == num_tokens
            assert torch.equal(said, generate(model, IDS, past).sequences)

    def test_blocks_count_for_the_tenant_of_their_salt(self, tmp_path: Path) -> None:
        """A tenant with a flood of prompts makes room among its own; without one nobody does."""
        model = model_of(LLAMA)
        with open_prompts(tmp_path) as prompts:
            fill(prompts, model, salt=b"tenant")
            there = tenants_of(tmp_path)
            assert {place_of(b"tenant")} == there.keys()
            fill(prompts, model)
            assert there == tenants_of(tmp_path)

    def test_other_salt_weights_and_settings_find_nothing(self, tmp_path: Path) -> None:
        """R-05: what decides the states, or whose they are, is part of every key."""
        model = model_of(LLAMA)
        with open_prompts(tmp_path) as prompts:
            fill(prompts, model, salt=b"tenant")
            assert (None, 0) == prompts.restore(IDS)
            assert prompts.restore(IDS, salt=b"tenant").past_key_values is not None
        trained, settled = copy.deepcopy(model), copy.deepcopy(model)
        with torch.no_grad():
            trained.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
        settled.config.rope_parameters["rope_theta"] = 10001.0
        for other in (model_of(OTHER), trained, settled):
            with open_prompts(tmp_path, other) as prompts:
                assert (None, 0) == prompts.restore(IDS, salt=b"tenant")
        with open_prompts(tmp_path, copy.deepcopy(model)) as prompts:
            assert prompts.restore(IDS, salt=b"tenant").past_key_values is not None


@pytest.mark.slow
class TestMistakes:
    @pytest.mark.parametrize(
        ("ids", "mask"),
        [
            (torch.zeros(8, dtype=torch.long), None),
            (torch.zeros((1, 8)), None),
            (torch.zeros((1, 8), dtype=torch.long), torch.ones((2, 8))),
            (torch.zeros((1, 8), dtype=torch.long), torch.ones((1, 9))),
            (torch.zeros((1, 4), dtype=torch.long), torch.tensor([[1, 1, 1, 0]])),
            (torch.zeros((1, 4), dtype=torch.long), torch.tensor([[0, 1, 0, 1]])),
            (torch.full((1, 40), -1), None),
        ],
        ids=["flat", "floats", "rows", "longer", "right", "holes", "negative"],
    )
    def test_prompt_that_is_no_batch_is_refused(
        self, prompts: Any, ids: Any, mask: Any
    ) -> None:
        """Before anything is asked."""
        with pytest.raises(KeyFormatError):
            prompts.restore(ids, mask)

    @pytest.mark.parametrize(
        ("ids", "mask"),
        [
            (IDS.tolist(), None),
            (IDS.numpy(), None),
            (transformers.BatchEncoding({"input_ids": IDS}), None),
            (IDS, torch.ones_like(IDS).tolist()),
        ],
        ids=["list", "array", "all", "mask"],
    )
    def test_what_is_no_tensor_is_refused(
        self, prompts: Any, ids: Any, mask: Any
    ) -> None:
        """Both verbs say what it is, before anything else of it is looked at."""
        with pytest.raises(KeyFormatError, match="not a tensor"):
            prompts.restore(ids, mask)
        with pytest.raises(KeyFormatError, match="not a tensor"):
            prompts.save(ids, generate(model_of(LLAMA), IDS).past_key_values, mask)

    @pytest.mark.parametrize(
        "case", ["static", "short", "batch", "type", "layers", "empty", "cut"]
    )
    def test_cache_of_something_else_is_refused(self, prompts: Any, case: str) -> None:
        """Bytes that are not what their keys say are not stored."""
        model = model_of(LLAMA)
        done = generate(model, IDS)
        ids, past = done.sequences, done.past_key_values
        if case == "static":
            past = StaticCache(config=model.config, max_cache_len=32)
        elif case == "short":
            ids = ids[:, :-2]
        elif case == "batch":
            ids = ids.repeat(2, 1)
        elif case == "type":
            past = DynamicCache([(k.bfloat16(), v.bfloat16()) for k, v, _ in past])
        elif case == "layers":
            past = DynamicCache([(k, v) for k, v, _ in list(past)[1:]])
        elif case == "cut":  # amid its first pass
            past.layers[-1] = type(past.layers[-1])()
        else:
            past = DynamicCache(config=model.config)
        with pytest.raises(LayoutError, match="past_key_values"):
            prompts.save(ids, past)
        assert 0 == prompts.cache.statistics().saved_blocks

    def test_verbs_after_close_are_refused(self, tmp_path: Path) -> None:
        """By name."""
        prompts = open_prompts(tmp_path)
        prompts.close()
        prompts.close()
        with pytest.raises(PipelineClosedError):
            prompts.restore(IDS)
