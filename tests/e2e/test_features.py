# SPDX-License-Identifier: Apache-2.0
"""Features of the engine beside ucm: the answer is that of the engine alone."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.e2e import models
from tests.e2e.connector import LOADED, SAVED, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    EXTERNAL_HITS,
    await_counter,
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.kit.lockstep import read_traces
from tests.traces import traces_of
from ucm.tracing import PREFIX_MATCHED

PROMPTS = [prompt(3000 + at, 300 + 40 * at) for at in range(4)]
"""Two, two, two and three blocks, and a tail."""
BLOCKS = 9
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
PREEMPTIONS = "vllm:num_preemptions"


def cold_and_warm(
    model: Path, store: Path, ask: Callable[[Any], Any], **arguments: object
) -> None:
    """
    Ask an engine alone, then one with ucm before and after its own cache was emptied.

    All answers must be equal, and the last must come from saved blocks.
    """
    with in_process_engine(model, **arguments) as llm:  # type: ignore[arg-type]
        alone = ask(llm)
    config = ucm_config(store)
    with in_process_engine(model, kv_transfer_config=config, **arguments) as llm:  # type: ignore[arg-type]
        assert alone == ask(llm)
        await_counter(llm, SAVED, BLOCKS)
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        assert alone == ask(llm)
        assert 128 * BLOCKS == counter(llm, EXTERNAL_HITS) - before
        assert BLOCKS <= counter(llm, LOADED)
        assert {} == quiesced(llm)


def test_fp8_cache_is_restored_as_it_was(llama: Path, tmp_path: Path) -> None:
    """A KV cache in fp8 gives the same tokens from saved blocks."""
    import torch

    cpu = torch.cpu
    if not (cpu._is_avx512_supported() or cpu._is_amx_tile_supported()):
        pytest.skip("vLLM has no fp8 KV cache on a CPU without AVX-512 or AMX")

    def ask(llm: Any) -> object:
        return generate(llm, PROMPTS, 12).token_ids

    cold_and_warm(llama, tmp_path / "slab", ask, kv_cache_dtype="fp8")


def test_prompt_embeddings_are_part_of_the_key(llama: Path, tmp_path: Path) -> None:
    """Prompts given as embeddings hit their own blocks, and no others."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(300, 128, generator=generator) for _ in range(4)]
    given.append(torch.cat([given[0][:128], given[1][128:]]))  # a block in common
    sampling = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )

    def ask(llm: Any) -> object:
        outputs = llm.generate(
            [{"prompt_embeds": each} for each in given], sampling, use_tqdm=False
        )
        drain(llm)
        return [list(output.outputs[0].token_ids) for output in outputs]

    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, enable_prompt_embeds=True) as llm:
        alone = ask(llm)
    with in_process_engine(
        llama, kv_transfer_config=config, enable_prompt_embeds=True
    ) as llm:
        assert alone == ask(llm)
        await_counter(llm, SAVED, 9)  # the fifth shares its first with the first
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        assert alone == ask(llm)
        assert 128 * 10 == counter(llm, EXTERNAL_HITS) - before
        assert {} == quiesced(llm)


def test_pooling_model_gives_the_same_vectors(llama: Path, tmp_path: Path) -> None:
    """A decoder that answers with an embedding computes the same from saved blocks."""

    def ask(llm: Any) -> tuple[object, int]:
        before = counter(llm, EXTERNAL_HITS)
        outputs = llm.embed(
            [{"prompt_token_ids": each} for each in PROMPTS], use_tqdm=False
        )
        drain(llm)
        vectors = [output.outputs.embedding for output in outputs]
        return vectors, counter(llm, EXTERNAL_HITS) - before

    arguments: dict[str, Any] = {"runner": "pooling", "convert": "embed"}
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, **arguments) as llm:
        alone, _ = ask(llm)
    with in_process_engine(llama, kv_transfer_config=config, **arguments) as llm:
        assert (alone, 0) == ask(llm)
    with in_process_engine(llama, kv_transfer_config=config, **arguments) as llm:
        assert (alone, 128 * BLOCKS) == ask(llm)


def test_log_probabilities_of_prompts_are_computed_anew(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wants them for all tokens of a prompt loads none of these, also in an engine that leaves
    that to its connectors: the rows of loaded tokens would be memory that nobody has written."""
    from vllm import SamplingParams

    leave_skipping_to_connectors(monkeypatch)
    sampling = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
    )

    def ask(llm: Any) -> list[float]:
        outputs = llm.generate(
            [{"prompt_token_ids": each} for each in PROMPTS], sampling, use_tqdm=False
        )
        drain(llm)
        rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
        return [found.logprob for row in rows for found in row.values()]

    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, kv_transfer_config=config) as llm:
        cold = ask(llm)
        await_counter(llm, SAVED, BLOCKS)
        reset_prefix_cache(llm)
        assert pytest.approx(cold, abs=1e-3) == ask(llm)
        assert 0 == counter(llm, EXTERNAL_HITS)
        reset_prefix_cache(llm)
        assert 128 * BLOCKS == generate(llm, PROMPTS, 1).external_tokens
        assert {} == quiesced(llm)


def leave_skipping_to_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out of the engine's scheduler what vLLM before 0.32 does not have."""
    from vllm.v1.core.sched import scheduler

    text = textwrap.dedent(inspect.getsource(scheduler.Scheduler.schedule))
    line = "if request.skip_reading_prefix_cache:\n"
    assert 1 == text.count(line)
    scope: dict[str, Any] = {}
    older = text.replace(line, "if False:\n")
    exec(compile(older, scheduler.__file__, "exec"), vars(scheduler), scope)  # noqa: S102
    monkeypatch.setattr(scheduler.Scheduler, "schedule", scope["schedule"])


def test_draft_model_drafts_as_well_from_saved_blocks(
    llama: Path, tmp_path: Path
) -> None:
    """
    Speculation with a draft model: equal tokens, and the draft layers' blocks are right.

    Their bytes decide no token, only how many drafts are accepted: all of them where
    model and draft are one, also when both go on from what was loaded.
    """
    speculation = {
        "method": "draft_model",
        "model": str(llama),
        "num_speculative_tokens": 3,
    }

    def ask(llm: Any) -> object:
        rejected = counter(llm, DRAFTED) - counter(llm, ACCEPTED)
        tokens = generate(llm, PROMPTS, 12).token_ids
        return tokens, counter(llm, DRAFTED) - counter(llm, ACCEPTED) - rejected

    cold_and_warm_speculating(llama, tmp_path / "slab", ask, speculation)


def test_draft_model_that_guesses_badly_changes_no_token(
    llama: Path, tmp_path: Path
) -> None:
    """Tokens are those of the model alone, whatever the drafts are worth."""
    other = attrs.evolve(models.LLAMA, name="llama-draft", seed=11)
    speculation = {
        "method": "draft_model",
        "model": str(models.make_model(other)),
        "num_speculative_tokens": 3,
    }

    def ask(llm: Any) -> object:
        return generate(llm, PROMPTS, 12).token_ids

    cold_and_warm_speculating(llama, tmp_path / "slab", ask, speculation)


def test_request_for_which_there_is_hardly_room_is_answered(
    llama: Path, tmp_path: Path
) -> None:
    """With speculation the engine takes up a load only beside free blocks, which a memory as
    large as the request never has: less is loaded, and nobody hangs."""
    ids = prompt(5, 500)
    speculation = {
        "method": "draft_model",
        "model": str(llama),
        "num_speculative_tokens": 16,
    }
    tiny = {"block_size": 32, "num_blocks": 17, "max_model_len": 512}
    with in_process_engine(llama, **tiny) as llm:
        alone = generate(llm, [ids], 4).token_ids
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(
        llama, kv_transfer_config=config, speculative_config=speculation, **tiny
    ) as llm:
        assert alone == generate(llm, [ids], 4).token_ids
        await_counter(llm, SAVED, 15)
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        assert alone == generate(llm, [ids], 4).token_ids
        assert 0 < counter(llm, EXTERNAL_HITS) - before < 480
        assert {} == quiesced(llm)


def cold_and_warm_speculating(
    model: Path,
    store: Path,
    ask: Callable[[Any], Any],
    speculation: dict[str, object],
) -> None:
    """As ``cold_and_warm``, against the tokens of an engine that does not speculate."""
    with in_process_engine(model) as llm:
        alone = generate(llm, PROMPTS, 12).token_ids
    config = ucm_config(store)
    with in_process_engine(
        model, kv_transfer_config=config, speculative_config=speculation
    ) as llm:
        cold = ask(llm)
        await_counter(llm, SAVED, BLOCKS)
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        assert cold == ask(llm)
        assert 128 * BLOCKS == counter(llm, EXTERNAL_HITS) - before
        assert alone == generate(llm, PROMPTS, 12).token_ids
        assert {} == quiesced(llm)


def streamed(llm: Any, name: str, parts: list[list[int]]) -> list[int]:
    """
    Return the answer to a prompt that comes in parts, each answered before the next.

    Only the asynchronous front end streams; the engine's core takes its requests here
    as from there.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    client, processor = llm.llm_engine.engine_core, llm.llm_engine.input_processor
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens: list[int] = []
    for at, part in enumerate([*parts, [0]]):
        request = processor.process_inputs(
            request_id=name,
            # The session makes the first part longer as others come.
            prompt=TokensPrompt(prompt_token_ids=list(part)),
            params=sampling,
            supported_tasks=client.get_supported_tasks(),
            resumable=at < len(parts),  # what is not ends the session
        )
        client.add_request(request)
        while len(tokens) < 4 * min(at + 1, len(parts)):
            for output in client.get_output().outputs:
                tokens += output.new_token_ids
    drain(llm)
    return tokens


def test_streamed_input_goes_on_from_saved_blocks(llama: Path, tmp_path: Path) -> None:
    """A prompt that comes in parts, each answered before the next, gives the same tokens
    when its first part was loaded."""
    parts = [prompt(3100 + part, 300) for part in range(4)]
    with in_process_engine(llama) as llm:
        alone = streamed(llm, "alone", parts)
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, kv_transfer_config=config) as llm:
        assert alone == streamed(llm, "cold", parts)
        assert {} == quiesced(llm)
        reset_prefix_cache(llm)
        assert alone == streamed(llm, "warm", parts)
        assert {} == quiesced(llm)
    matched = [
        each["external_tokens"]
        for each in read_traces(traces_of(tmp_path / "slab"))
        if each["event"] == PREFIX_MATCHED
    ]
    assert [256] == matched


@pytest.mark.parametrize("drafts", [0, 3], ids=["tokens", "drafts"])
@pytest.mark.parametrize("use_layerwise", [False, True], ids=["async", "layerwise"])
def test_batches_in_flight_are_exact_in_a_tiny_pool(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafts: int,
    use_layerwise: bool,
) -> None:
    """The next batch is scheduled before the last one's tokens are known, and requests are
    preempted amid both: equal tokens, from saved blocks too, and nothing is left."""
    keep_asynchronous(monkeypatch)
    prompts = [prompt(3200 + at, 150) for at in range(6)]
    with in_process_engine(llama, block_size=32) as llm:
        alone = generate(llm, prompts, 60).token_ids
    config = ucm_config(
        tmp_path / "slab", use_layerwise=use_layerwise, save_decoded="each_block"
    )
    tiny: dict[str, Any] = {
        "block_size": 32,
        "num_blocks": 24,
        "max_num_seqs": 6,
        "max_model_len": 256,
        "async_scheduling": True,
    }
    if drafts:
        tiny["speculative_config"] = {
            "method": "draft_model",
            "model": str(llama),
            "num_speculative_tokens": drafts,
        }
    with in_process_engine(llama, kv_transfer_config=config, **tiny) as llm:
        assert llm.llm_engine.engine_core.engine_core.batch_queue is not None
        assert alone == generate(llm, prompts, 60).token_ids
        assert counter(llm, PREEMPTIONS) > 0
        assert {} == quiesced(llm)
        reset_prefix_cache(llm)
        assert alone == generate(llm, prompts, 60).token_ids
        assert counter(llm, LOADED) > 0
        assert {} == quiesced(llm)


def keep_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine schedule asynchronously where its platform, a CPU, switches that off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_keep(_: object, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(
        platform, "check_and_update_config", classmethod(check_and_keep)
    )
