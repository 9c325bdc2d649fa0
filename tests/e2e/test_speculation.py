# SPDX-License-Identifier: Apache-2.0
"""Speculation with a head of EAGLE, EAGLE 3 or the model's own, on the real engine."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import LOADED, SAVED, halves, prompt, quiesced, ucm_config
from tests.e2e.drafts import make_draft, make_foreseeing
from tests.e2e.engine import (
    EXTERNAL_HITS,
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.test_features import (
    ACCEPTED,
    DRAFTED,
    PREEMPTIONS,
    keep_asynchronous,
)

LENGTH = 300
BLOCKS = LENGTH // 32
TINY: dict[str, Any] = {
    "block_size": 32,
    "num_blocks": 24,
    "max_num_seqs": 6,
    "max_model_len": 640,
}


_Guessing = tuple[Path, dict[str, object]]


@pytest.fixture(scope="module", params=["eagle", "eagle3", "mtp"])
def guessing(
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> _Guessing:
    """A model, and what the engine is told of the head that guesses for it."""
    target = tmp_path_factory.mktemp("draft") / request.param
    told: dict[str, object] = {"method": request.param, "num_speculative_tokens": 3}
    if request.param == "mtp":
        return make_foreseeing(target), told
    return llama, told | {"model": str(make_draft(request.param, llama, target))}


@contextmanager
def guesses(llm: Any) -> Iterator[list[list[int]]]:
    """Record what a synchronous engine is told of drafts, step by step."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    inner, told = scheduler.update_draft_token_ids, []

    def update(drafts: Any) -> None:
        told.extend(list(each) for each in drafts.draft_token_ids)
        inner(drafts)

    scheduler.update_draft_token_ids = update
    try:
        yield told
    finally:
        del scheduler.update_draft_token_ids


def test_head_guesses_as_it_did_from_saved_blocks(
    tmp_path: Path, guessing: _Guessing
) -> None:
    """Tokens are those of the model alone, and each guess from loaded blocks is that from
    computed ones: the head's layer is saved and loaded with the others."""
    model, speculation = guessing
    ids = prompt(3300, LENGTH)
    with in_process_engine(model, block_size=32) as llm:
        alone = generate(llm, [ids], 12).token_ids
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(
        model,
        kv_transfer_config=config,
        block_size=32,
        speculative_config=speculation,
    ) as llm:
        layout = halves(llm)[1]._worker._setup.layout
        assert 5 == sum(len(group.rows) for group in layout.groups)
        with guesses(llm) as cold:
            assert alone == generate(llm, [ids], 12).token_ids
        await_counter(llm, SAVED, BLOCKS)
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        with guesses(llm) as warm:
            assert alone == generate(llm, [ids], 12).token_ids
        assert 0 < counter(llm, EXTERNAL_HITS) - before
        assert cold == warm
        assert {} == quiesced(llm)


@pytest.mark.parametrize("drops", [False, True], ids=["preempts", "resets"])
def test_rejected_guesses_in_flight_are_saved_by_nobody(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    guessing: _Guessing,
    drops: bool,
) -> None:
    """Batches in flight carry guesses that are rejected, and requests are preempted amid
    them, by want of room or by a reset that takes all: what was saved of them gives the
    tokens of the model alone, also to another engine over the slab."""
    model, speculation = guessing
    prompts = [
        [*prompt(3310, 32 * (at % 4)), *prompt(3311 + at, 100)] for at in range(6)
    ]
    with in_process_engine(model, block_size=32) as llm:
        alone = generate(llm, prompts, 60).token_ids
    keep_asynchronous(monkeypatch)
    config = ucm_config(tmp_path / "slab", save_decoded="each_block")
    tiny = TINY | {
        "kv_transfer_config": config,
        "speculative_config": speculation,
        "async_scheduling": True,
    }
    with in_process_engine(model, **tiny) as llm:
        with resets_amid(llm) if drops else nullcontext():
            assert alone == generate(llm, prompts, 60).token_ids
        assert counter(llm, PREEMPTIONS) > 0
        assert counter(llm, DRAFTED) > 10 * counter(llm, ACCEPTED)
        assert {} == quiesced(llm)
    with in_process_engine(model, **tiny) as llm:
        assert alone == generate(llm, prompts, 60).token_ids
        assert counter(llm, LOADED) > 12
        assert {} == quiesced(llm)


@contextmanager
def resets_amid(llm: Any) -> Iterator[None]:
    """Preempt all that runs for a reset, behind every seventh plan."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    inner, plans = scheduler.update_from_output, itertools.count(1)

    def update(*args: Any) -> Any:
        answer = inner(*args)
        if next(plans) % 7 == 0:
            with suppress(RuntimeError):  # blocks are loaded to, or still read
                scheduler.reset_prefix_cache(reset_running_requests=True)
        return answer

    scheduler.update_from_output = update
    try:
        yield
    finally:
        del scheduler.update_from_output
