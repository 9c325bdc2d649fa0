# SPDX-License-Identifier: Apache-2.0
"""Every kind of KV cache that runs on this engine comes back token-exact, in each mode."""

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.e2e import models
from tests.e2e.connector import (
    FAILURES,
    LOADED,
    SAVED,
    Call,
    blind,
    corrupt,
    halves,
    prompt,
    quiesced,
    traced,
    ucm_config,
)
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from ucm.integration.vllm.messages import plan_in

PROMPTS = [prompt(1, 700), prompt(2, 555), [*prompt(1, 400), *prompt(3, 200)]]
"""5, 4 and 4 whole blocks of 128 tokens; the last shares 3 with the first."""
TOKENS = 12
ASYNC, LAYERWISE = "async", "layerwise"


@attrs.frozen(kw_only=True)
class Case:
    """
    A model and what its KV cache groups have to load for ``PROMPTS``.

    Args:
        recipe: How the model is made.
        loads: By group, the blocks that all prompts together need.
        layerwise: Name of the mode that ``use_layerwise`` leads to.
        tokens: Prompt tokens that these stand for.
        options: Arguments of the engine that the model needs.
    """

    recipe: models.Recipe
    loads: tuple[int, ...]
    layerwise: str
    tokens: int = 13 * 128
    options: dict[str, Any] = attrs.Factory(dict)

    def engine(self, config: dict[str, Any] | None) -> Any:
        """Run the model, in the type that its weights have."""
        return in_process_engine(
            models.make_model(self.recipe),
            kv_transfer_config=config,
            dtype=self.recipe.dtype,
            **self.options,
        )


NO_LOCAL_CACHE = {"enable_prefix_caching": False}
WHOLE_TABLES = {"disable_hybrid_kv_cache_manager": True}
CASES = [
    Case(recipe=models.LLAMA, loads=(13,), layerwise="layerwise-cached"),
    Case(
        recipe=models.LLAMA, loads=(13,), layerwise="layerwise", options=NO_LOCAL_CACHE
    ),
    Case(
        recipe=models.LLAMA4,
        loads=(13,),
        layerwise="layerwise-cached",
        options=WHOLE_TABLES,
    ),
    Case(recipe=models.MISTRAL, loads=(3,), layerwise="layerwise-groups"),
    Case(recipe=models.GEMMA2, loads=(3, 13), layerwise="layerwise-groups"),
    Case(recipe=models.GEMMA3, loads=(3, 3, 13), layerwise="layerwise-groups"),
    Case(recipe=models.GPT_OSS, loads=(3, 13), layerwise="layerwise-groups"),
    Case(recipe=models.DEEPSEEK, loads=(114,), layerwise="layerwise", tokens=114 * 16),
    Case(
        recipe=models.QWEN3_NEXT, loads=(3, 3, 3, 13), layerwise="layerwise-recurrent"
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe.name)
def case(request: pytest.FixtureRequest) -> Case:
    """Each kind of KV cache."""
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def expected(case: Case) -> list[list[int]]:
    """What the engine says without any connector."""
    with case.engine(None) as llm:
        return generate(llm, PROMPTS, TOKENS).token_ids


@pytest.fixture(params=[ASYNC, LAYERWISE])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Each mode, over a slab of the test's own."""
    return ucm_config(tmp_path / "slab", use_layerwise=request.param == LAYERWISE)


def is_layerwise(config: dict[str, Any]) -> bool:
    """Return whether a test asks for layer-wise transfers."""
    return bool(config["kv_connector_extra_config"]["use_layerwise"])


def loads_by_group(trace: list[Call]) -> Counter[int]:
    """Return how many blocks of each group the scheduler has ordered to be loaded."""
    ordered: Counter[int] = Counter()
    for call in trace:
        if call.hook == "build_connector_meta":
            for order in plan_in(call.result).loads:
                ordered[order.group_id] += len(order.block_ids)
    return ordered


def assert_failures_are_told_by_request(trace: list[Call]) -> None:
    """Check what an engine with several groups was told of loads that failed."""
    results = [call.result for call in trace if call.hook == "get_transfer_results"]
    failed = {name for result in results for name in result.failed_recving}
    assert failed
    assert failed <= {name for result in results for name in result.finished_recving}
    for call in trace:
        if call.hook == "get_block_ids_with_load_errors":
            assert not call.result


class TestExactness:
    def test_cold_warm_and_restarted_give_the_same_tokens(
        self, case: Case, config: dict[str, Any], expected: list[list[int]]
    ) -> None:
        """S2-05, S4-34: with the engine's cache emptied, and in a new engine, each
        group's blocks are loaded and not computed; the tokens are the plain engine's."""
        by_group = dict(enumerate(case.loads))
        with case.engine(config) as llm:
            mode = halves(llm)[1]._worker._setup.mode.name
            assert (case.layerwise if is_layerwise(config) else "direct") == mode
            cold = generate(llm, PROMPTS, TOKENS)
            assert {} == quiesced(llm)
            assert 0 == counter(llm, LOADED)
            reset_prefix_cache(llm)
            with traced(llm) as trace:
                warm = generate(llm, PROMPTS, TOKENS)
            assert {} == quiesced(llm)
            assert by_group == loads_by_group(trace)
            assert sum(by_group.values()) == counter(llm, LOADED)
            assert counter(llm, SAVED) > 0
        with case.engine(config) as llm:
            with traced(llm) as trace:
                restarted = generate(llm, PROMPTS, TOKENS)
            assert {} == quiesced(llm)
            assert by_group == loads_by_group(trace)
            assert sum(by_group.values()) == counter(llm, LOADED)
            assert 0 == counter(llm, FAILURES)
        assert expected == cold.token_ids == warm.token_ids == restarted.token_ids
        assert [0, case.tokens, case.tokens] == [
            output.external_tokens for output in (cold, warm, restarted)
        ]

    def test_corrupted_store_is_recomputed_with_the_right_tokens(
        self,
        case: Case,
        config: dict[str, Any],
        expected: list[list[int]],
        tmp_path: Path,
    ) -> None:
        """H-05, S4-15: blocks that do not verify fail their load, told by request where
        there are several groups; the engine recomputes, and what was wrong is a miss
        until it is stored anew."""
        with case.engine(config) as llm:
            generate(llm, PROMPTS, TOKENS)
            assert {} == quiesced(llm)
            corrupt(tmp_path / "slab")
            reset_prefix_cache(llm)
            with traced(llm) as trace:
                recomputed = generate(llm, PROMPTS, TOKENS)
            assert {} == quiesced(llm)
            failures = counter(llm, FAILURES)
            # What was computed before others came to ask may have been loaded already.
            before = counter(llm, LOADED)
            reset_prefix_cache(llm)
            again = generate(llm, PROMPTS, TOKENS)
            loaded = await_counter(llm, LOADED, before + 1)
        assert expected == recomputed.token_ids == again.token_ids
        assert failures >= 1
        assert loaded > before
        if len(case.loads) > 1:
            assert_failures_are_told_by_request(trace)


def test_blocks_that_are_not_copied_change_the_tokens(
    case: Case,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of all others: a restarted engine whose loads copy nothing says
    something else, so equal tokens mean that the right bytes came."""
    config = ucm_config(tmp_path / "slab")
    with case.engine(config) as llm:
        generate(llm, PROMPTS, TOKENS)
        assert {} == quiesced(llm)
    blind(monkeypatch)
    with case.engine(config) as llm:
        blinded = generate(llm, PROMPTS, TOKENS)
    assert case.tokens == blinded.external_tokens
    differ = [a != b for a, b in zip(expected, blinded.token_ids, strict=True)]
    # Coarse numbers have ties, which a state of zeros may win by chance.
    assert any(differ) if case.recipe.dtype == "bfloat16" else all(differ)
