# SPDX-License-Identifier: Apache-2.0
"""A conversation's second turn finds the first one's answer, or not, as is asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.connector import SAVED, prompt, ucm_config
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)

BLOCK = 32
PROMPTS = [prompt(seed, 3 * BLOCK + 8 * seed) for seed in range(1, 5)]
ANSWER = 3 * BLOCK
QUESTION = prompt(9, 20)
Tokens = list[list[int]]


def second_turns(answers: Tokens) -> Tokens:
    """Return what the users of a conversation send next."""
    turns = zip(PROMPTS, answers, strict=True)
    return [[*asked, *answer, *QUESTION] for asked, answer in turns]


def whole(tokens: int) -> int:
    """Return how many blocks so many tokens fill."""
    return tokens // BLOCK


@pytest.fixture(scope="module")
def expected(llama: Path) -> Iterator[tuple[Tokens, Tokens]]:
    """What the engine answers in both turns without any connector."""
    with in_process_engine(llama, block_size=BLOCK) as llm:
        first = generate(llm, PROMPTS, ANSWER).token_ids
        yield first, generate(llm, second_turns(first), 8).token_ids


@pytest.mark.parametrize("decoded", ["at_end", "each_block", "never"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_second_turn_hits_as_far_as_blocks_are_saved(
    llama: Path,
    expected: tuple[Tokens, Tokens],
    tmp_path: Path,
    decoded: str,
    *,
    is_async: bool,
) -> None:
    """With ``at_end`` and ``each_block`` the second turn hits up to the last whole block
    of prompt and answer, with ``never`` up to the last one of the prompt; the tokens of
    both turns are those of an engine without a connector."""
    config = ucm_config(tmp_path / "slab", save_decoded=decoded)
    # The last token is sampled and not computed.
    lengths = [len(one) + (ANSWER - 1) * (decoded != "never") for one in PROMPTS]
    blocks = sum(map(whole, lengths))
    with in_process_engine(
        llama, kv_transfer_config=config, block_size=BLOCK, async_scheduling=is_async
    ) as llm:
        first = generate(llm, PROMPTS, ANSWER)
        assert blocks == await_counter(llm, SAVED, blocks)
        reset_prefix_cache(llm)
        second = generate(llm, second_turns(first.token_ids), 8)
        assert blocks * BLOCK == second.external_tokens
        assert 0 == counter(llm, "vllm:ucm_dropped_blocks")
    assert expected == (first.token_ids, second.token_ids)


def test_prefill_engine_hits_what_the_decode_engine_wrote_back(
    llama: Path, expected: tuple[Tokens, Tokens], tmp_path: Path
) -> None:
    """A producer saves prompts, and a consumer over the same slab, which loads them, saves
    what it decodes and nothing else; an engine that prefills the next turn hits prompt and
    answer, and computes the same tokens as without a connector."""
    prompts = sum(whole(len(one)) for one in PROMPTS)
    both = sum(whole(len(one) + ANSWER - 1) for one in PROMPTS)
    config = ucm_config(tmp_path / "slab", consumer_saves_decoded=True)
    asked: list[Tokens] = []
    for role, saves, hits in (
        ("kv_producer", prompts, 0),
        ("kv_consumer", both - prompts, prompts),
        ("kv_both", 0, both),
    ):
        config["kv_role"] = role
        turns = second_turns(expected[0]) if role == "kv_both" else PROMPTS
        length = {"kv_producer": 1, "kv_consumer": ANSWER, "kv_both": 8}[role]
        with in_process_engine(
            llama, kv_transfer_config=config, block_size=BLOCK
        ) as llm:
            found = generate(llm, turns, length)
            assert hits * BLOCK == found.external_tokens
            if saves:
                assert saves == await_counter(llm, SAVED, saves)
            assert 0 == counter(llm, "vllm:ucm_dropped_blocks")
            asked.append(found.token_ids)
    assert [one[:1] for one in expected[0]] == asked[0]
    assert expected == (asked[1], asked[2])
