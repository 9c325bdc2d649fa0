# SPDX-License-Identifier: Apache-2.0
"""What a batched model says with a store below its cache is what it says without one."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from tests.e2e.models import GEMMA3, LLAMA, MISTRAL
from tests.integration.transformers.batching import Engine, manager_of
from tests.integration.transformers.kit import (
    BF16,
    BLOCK,
    HERE,
    changed,
    config_of,
    generate,
    model_of,
    place_of,
    prompt,
    tenants_of,
)
from ucm.errors import ConfigError, KeyFormatError
from ucm.integration.transformers import BlockingPromptCache
from ucm.integration.transformers.continuous import ContinuousPrompts

BLOCKS = 12
IDS = prompt(1, BLOCKS * BLOCK + 5)
TOKENS = IDS[0].tolist()
TWIN = [TOKENS[0] + 1, *TOKENS[1:]]
LONGER = TWIN + prompt(2, 50)[0].tolist()


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., list[list[int]]]]:
    """What the model says that remembers nothing."""
    with Engine(model_of(LLAMA)) as engine:
        yield engine.ask


def filled(directory: Path, *prompts: list[int], **options: Any) -> None:
    """Have prompts answered and saved by an engine that ends then."""
    with Engine(model_of(LLAMA), directory, **options) as engine:
        for each in prompts:
            engine.ask(each)
        engine.prompts.cache.flush()


def make_blind(patched: pytest.MonkeyPatch, at: int) -> None:
    """Let a block have the same hash whatever its first token, and is before it."""
    part = TOKENS[at * BLOCK + 1 : (at + 1) * BLOCK]
    inner = cache_allocator.compute_block_hash

    def blind(before: int | None, tokens: list[int]) -> int:
        is_blind = tokens[1:] == part
        return int(inner(None, part) if is_blind else inner(before, tokens))

    patched.setattr(cache_allocator, "compute_block_hash", blind)


@pytest.mark.slow
class TestExact:
    @pytest.mark.parametrize("recipe", [LLAMA, BF16], ids=["fp32", "bf16"])
    def test_every_number_of_loaded_blocks_gives_the_same_tokens(
        self, tmp_path: Path, recipe: Any
    ) -> None:
        """R-81: of 0 to 12 blocks, each prompt loads those that it shares."""
        model = model_of(recipe)
        with Engine(model) as engine:
            prompts = [changed(IDS, at)[0].tolist() for at in range(BLOCKS + 1)]
            expected = [engine.ask(each) for each in prompts]
        with Engine(model, tmp_path) as engine:
            engine.ask(TOKENS)
            engine.forget()
            for blocks, each in enumerate(prompts):
                before = engine.loaded()
                assert expected[blocks] == engine.ask(each)
                assert blocks == engine.loaded() - before
                engine.forget()

    def test_generated_tokens_are_loaded_too(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """What a model has said is the beginning of what it is asked next."""
        with Engine(model_of(LLAMA), tmp_path) as engine:
            (said,) = engine.ask(TOKENS, num_tokens=40)
            engine.forget()
            longer = TOKENS + said + [7] * 9
            assert alone(longer) == engine.ask(longer)
            assert (len(TOKENS) + 39) // BLOCK == engine.loaded()

    def test_request_that_ends_with_its_prompt_is_saved(self, tmp_path: Path) -> None:
        """One new token: the engine itself remembers no block of such a request."""
        with Engine(model_of(LLAMA), tmp_path) as engine:
            engine.ask(TOKENS, num_tokens=1)
            engine.forget()
            engine.ask(TOKENS)
            assert BLOCKS == engine.loaded()

    def test_prompt_with_several_answers_has_two_tokens_to_compute(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """The engine ends where all but the last is found, in the store or in its cache."""
        short = TOKENS[: 2 * BLOCK + 1]
        filled(tmp_path, short)
        with Engine(model_of(LLAMA), tmp_path) as engine:
            engine.manager.num_return_sequences = 2
            assert alone(short) == engine.ask(short)
            assert alone(short) == engine.ask(short)
            assert 1 == engine.loaded()


@pytest.mark.slow
class TestSlots:
    def test_long_prompt_is_loaded_in_parts(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """Memory between cache and store is bounded, whatever a prompt's length."""
        filled(tmp_path, TOKENS)
        with Engine(model_of(LLAMA), tmp_path, slot_tokens=5 * BLOCK) as engine:
            assert alone(TOKENS) == engine.ask(TOKENS)
            assert BLOCKS == engine.loaded()

    def test_blocks_without_slots_are_counted_and_slots_come_back(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """R-11: a save that has no room is dropped; each next one has its turn."""
        with Engine(model_of(LLAMA), tmp_path, slot_tokens=5 * BLOCK) as engine:
            for at, saved in enumerate((5, 10, 12)):
                assert alone(TOKENS) == engine.ask(TOKENS)
                engine.forget()
                assert saved == engine.prompts.cache.statistics().saved_blocks, at
            assert 7 + 2 == engine.prompts.dropped_blocks

    def test_device_without_memory_for_a_copy_costs_hits_only(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """Neither an answer nor the engine, and no slot and no block of anybody's."""
        filled(tmp_path, TOKENS)

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("planned")

        with Engine(model_of(LLAMA), tmp_path) as engine:
            prompts, slots = engine.prompts, len(engine.prompts._free)
            real, prompts._copy = prompts._copy, fail
            assert alone(TOKENS) == engine.ask(TOKENS)
            assert (slots, 0) == (len(prompts._free), engine.lost_blocks())
            assert prompts.dropped_blocks > 0
            prompts._copy, before = real, engine.loaded()
            engine.forget()
            assert alone(TOKENS) == engine.ask(TOKENS)
            assert BLOCKS == engine.loaded() - before


@pytest.mark.slow
class TestPatience:
    def test_store_that_is_given_no_time_costs_none(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """R-81: nothing is waited for, and what is said is the same."""
        filled(tmp_path, TOKENS)
        with Engine(model_of(LLAMA), tmp_path, patience=0) as engine:
            assert alone(TOKENS) == engine.ask(TOKENS)
            assert 0 == engine.loaded()


@pytest.mark.slow
class TestKeys:
    def test_other_salt_and_other_ways_to_compute_find_nothing(
        self, tmp_path: Path
    ) -> None:
        """R-05: a tenant's blocks are its own, and those of ``generate`` lie otherwise."""
        filled(tmp_path, TOKENS, salt=b"tenant")
        assert {place_of(b"tenant")} == tenants_of(tmp_path).keys()
        with Engine(model_of(LLAMA), tmp_path) as engine:
            engine.ask(TOKENS)
            assert 0 == engine.loaded()
        with Engine(model_of(LLAMA), tmp_path, salt=b"tenant") as engine:
            engine.ask(TOKENS)
            assert BLOCKS == engine.loaded()
        with BlockingPromptCache(config_of(tmp_path), model_of(LLAMA)) as prompts:
            assert (None, 0) == prompts.restore(IDS)
            assert (None, 0) == prompts.restore(IDS, salt=b"tenant")

    def test_autocast_where_it_is_opened_counts_for_nothing(
        self, tmp_path: Path
    ) -> None:
        """R-05: a manager generates on a thread of its own, where there is none."""
        filled(tmp_path, TOKENS)
        with torch.autocast(HERE.type, torch.bfloat16):
            engine = Engine(model_of(LLAMA), tmp_path)
        with engine:
            engine.ask(TOKENS)
            assert BLOCKS == engine.loaded()

    @pytest.mark.parametrize(("blind_at", "stored"), [(0, 12), (1, 6)])
    def test_equal_hashes_of_other_tokens_load_and_store_nothing_wrong(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        alone: Callable[..., list[list[int]]],
        blind_at: int,
        stored: int,
    ) -> None:
        """R-05: the engine's 64 bits take a block for another's, from the first or the
        second on. What it computes behind that is stored as what it is, or not at all."""
        filled(tmp_path, TWIN)
        with monkeypatch.context() as patched:
            make_blind(patched, blind_at)
            with Engine(model_of(LLAMA), tmp_path) as engine:
                engine.ask(TOKENS[:100])
                engine.ask(TWIN[:100])
                engine.ask(LONGER)  # wrong, by the engine's own fault
                assert 0 == engine.loaded()
                engine.prompts.cache.flush()
        with Engine(model_of(LLAMA), tmp_path) as engine:
            assert alone(LONGER) == engine.ask(LONGER)
            assert BLOCKS == engine.loaded()
            assert alone(TOKENS) == engine.ask(TOKENS)
            assert BLOCKS + stored == engine.loaded()

    def test_name_of_a_block_ends_with_what_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-05: one that is given to tokens of which it is not known what they follow
        is not known as the tokens that it had before."""
        make_blind(monkeypatch, 1)
        with Engine(model_of(LLAMA), tmp_path) as engine:
            engine.ask(TOKENS[:100])
            engine.ask(TWIN[:100])
            names, ledger = engine.prompts._names, engine.allocator.ledger
            with engine.manager.pause():
                unused = {*range(engine.allocator.num_blocks)} - {*ledger.block_to_hash}
                names.update(dict.fromkeys(unused, (b"", b"former")))
            engine.ask(LONGER)
            named = {names.get(block) for block in ledger.block_to_hash}
            assert None in named
            assert (b"", b"former") not in named


@pytest.mark.slow
class TestEnds:
    def test_engine_goes_on_behind_a_close(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """Its cache is as it was, and what it says as well."""
        with Engine(model_of(LLAMA), tmp_path) as engine:
            engine.ask(TOKENS)
            engine.prompts.cache.close()  # between two steps, say
            assert alone(TOKENS[:90]) == engine.ask(TOKENS[:90])
            engine.prompts.close()
            engine.prompts.close()
            assert ContinuousPrompts not in {
                type(engine.paged.search_prefix_match.__self__),
                type(engine.paged.mark_complete_blocks.__self__),
            }
            assert alone(TOKENS) == engine.ask(TOKENS)


def refusal(tmp_path: Path, manager: Any) -> str:
    """Return why a manager is not served."""
    with pytest.raises(ConfigError) as raised:
        ContinuousPrompts(config_of(tmp_path), manager)
    assert [] == [*tmp_path.iterdir()]
    return str(raised.value)


@pytest.mark.slow
class TestRefusals:
    @pytest.mark.parametrize(
        "settings", [{"use_async_batching": True}, {"allow_block_sharing": False}]
    )
    def test_setting_of_the_manager_is_refused(
        self, tmp_path: Path, settings: dict[str, bool]
    ) -> None:
        """By its name."""
        (name,) = settings
        manager = manager_of(model_of(LLAMA), **settings)
        assert name in refusal(tmp_path, manager)

    def test_salt_that_is_text_is_refused(self, tmp_path: Path) -> None:
        """At once: amid a search nobody would see why nothing is found."""
        with pytest.raises(KeyFormatError, match="salt is str"):
            Engine(model_of(LLAMA), tmp_path, salt="tenant")
        assert [] == [*tmp_path.iterdir()]

    @pytest.mark.parametrize("release", ["5.18.0", "5.25.0.dev0", "6.19.0"])
    def test_other_release_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
    ) -> None:
        """Its methods may be others."""
        monkeypatch.setattr(transformers, "__version__", release)
        told = refusal(tmp_path, manager_of(model_of(LLAMA)))
        assert f"{release!r}" in told
        assert "transformers 5.19 to 5.24" in told

    @pytest.mark.parametrize("release", ["5.19.0", "5.22.2", "5.24.0"])
    def test_releases_that_it_was_run_with_are_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
    ) -> None:
        """Whoever installs the newest one is not told to go back."""
        monkeypatch.setattr(transformers, "__version__", release)
        with Engine(model_of(LLAMA), tmp_path) as engine:
            assert engine.prompts is not None

    def test_manager_that_runs_is_refused(self, tmp_path: Path) -> None:
        """Its thread is in what would be wrapped."""
        with Engine(model_of(LLAMA)) as engine:
            assert "running" in refusal(tmp_path, engine.manager)

    def test_attention_that_runs_in_batches_only_is_refused(
        self, tmp_path: Path
    ) -> None:
        """By its name: a manager makes it of eager attention."""
        model = copy.deepcopy(model_of(LLAMA))
        model.set_attn_implementation("eager")
        told = refusal(tmp_path, manager_of(model))
        assert "attn_implementation='paged|eager'" in told

    def test_several_ranks_are_refused(self, tmp_path: Path) -> None:
        """Each would load for itself."""
        manager = manager_of(model_of(LLAMA))
        manager.distributed_helper.tp_size = 2
        assert "tp_size" in refusal(tmp_path, manager)

    @pytest.mark.parametrize("recipe", [MISTRAL, GEMMA3], ids=lambda each: each.name)
    def test_model_with_windows_is_refused(self, tmp_path: Path, recipe: Any) -> None:
        """Its blocks do not have all tokens."""
        manager = manager_of(model_of(recipe))
        assert "DynamicSlidingWindowLayer" in refusal(tmp_path, manager)


def test_batched_model_says_what_a_model_says_alone(
    alone: Callable[..., list[list[int]]],
) -> None:
    """The control: what all is held against is no error that both have."""
    said = generate(model_of(LLAMA), torch.tensor([TOKENS])).sequences[0]
    assert [said[len(TOKENS) :].tolist()] == alone(TOKENS)
