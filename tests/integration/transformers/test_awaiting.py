# SPDX-License-Identifier: Apache-2.0
"""The face with ``await``: the same, and no loop is held."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.cache.kit import both_loops, run
from tests.e2e.models import LLAMA, MISTRAL
from tests.integration.transformers.kit import (
    HERE,
    KEEPS_TYPES_APART,
    config_of,
    generate,
    model_of,
    prompt,
)
from ucm.errors import ConfigError, PipelineClosedError
from ucm.integration.transformers import PromptCache, dynamic

IDS = prompt(1, 100)


def held_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Event, threading.Event]:
    """Hold whoever copies into a lane: return when one does, and what lets it go on."""
    reached, go_on = threading.Event(), threading.Event()
    inner = dynamic.Staging.copy_in

    def copy_in(*args: Any) -> None:
        reached.set()
        assert go_on.wait(60.0)
        inner(*args)

    monkeypatch.setattr(dynamic.Staging, "copy_in", copy_in)
    return reached, go_on


@pytest.mark.slow
@both_loops
class TestAwaiting:
    def test_restored_cache_gives_the_same_tokens(
        self, tmp_path: Path, loop: str
    ) -> None:
        """R-41, R-81: on either loop; closed, and opened again."""
        model = model_of(LLAMA)
        done = generate(model, IDS)

        async def main() -> None:
            async with PromptCache(
                config_of(tmp_path), model, lane_tokens=32
            ) as prompts:
                assert (None, 0) == await prompts.restore(IDS)
                assert 96 == await prompts.save(done.sequences, done.past_key_values)
            async with PromptCache(config_of(tmp_path), model) as prompts:
                past, num_tokens = await prompts.restore(IDS)
                assert 96 == num_tokens
                assert 6 == prompts.cache.statistics().loaded_blocks
            assert torch.equal(done.sequences, generate(model, IDS, past).sequences)
            with pytest.raises(PipelineClosedError):
                await prompts.restore(IDS)

        run(loop, main)

    @KEEPS_TYPES_APART
    def test_autocast_of_the_loop_is_that_of_its_verbs(
        self, tmp_path: Path, loop: str
    ) -> None:
        """R-05: it is a thread's own, and verbs go on others."""
        model = model_of(LLAMA)

        async def main() -> None:
            with torch.autocast(HERE.type, torch.bfloat16):
                done = generate(model, IDS)
                async with PromptCache(config_of(tmp_path), model) as prompts:
                    assert 96 == await prompts.save(
                        done.sequences, done.past_key_values
                    )
                    assert 96 == (await prompts.restore(IDS)).num_tokens
            async with PromptCache(config_of(tmp_path), model) as prompts:
                assert (None, 0) == await prompts.restore(IDS)

        run(loop, main)

    @KEEPS_TYPES_APART
    def test_autocast_is_that_of_where_the_states_are(
        self, tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A model's first part may be elsewhere, or all of it until this is entered: each
        save under autocast was refused."""
        model = model_of(LLAMA)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(type(model), "device", torch.device("meta"))
            opened = PromptCache(config_of(tmp_path), model)

        async def main() -> None:
            with torch.autocast(HERE.type, torch.bfloat16):
                done = generate(model, IDS)
                async with opened as prompts:
                    saving = prompts.save(done.sequences, done.past_key_values)
                    assert 96 == await saving
                    assert 96 == (await prompts.restore(IDS)).num_tokens

        run(loop, main)

    def test_more_than_there_are_lanes_wait_in_line(
        self, tmp_path: Path, loop: str
    ) -> None:
        """R-41: forty at once, two at a time; each finds what is stored."""
        model = model_of(LLAMA)
        done, found = generate(model, IDS), []

        async def main() -> None:
            async with PromptCache(config_of(tmp_path), model, lanes=2) as prompts:
                await prompts.save(done.sequences, done.past_key_values)

                async def ask() -> None:
                    found.append((await prompts.restore(IDS)).num_tokens)

                async with anyio.create_task_group() as group:
                    for _ in range(40):
                        group.start_soon(ask)

        run(loop, main)
        assert [96] * 40 == found

    def test_cancelled_verb_ends_first_and_leaves_all_lanes(
        self, tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-42: nobody writes to a lane that the next one is given, and none is lost."""
        model = model_of(LLAMA)
        done = generate(model, IDS)
        reached, go_on = held_copies(monkeypatch)

        async def main() -> None:
            async with PromptCache(config_of(tmp_path), model, lanes=1) as prompts:
                async with anyio.create_task_group() as group:
                    group.start_soon(prompts.save, done.sequences, done.past_key_values)
                    await anyio.to_thread.run_sync(reached.wait)  # the loop goes on
                    group.cancel_scope.cancel()
                    go_on.set()
                past, num_tokens = await prompts.restore(IDS)
                assert 96 == num_tokens
                assert torch.equal(done.sequences, generate(model, IDS, past).sequences)

        run(loop, main)

    def test_what_a_cache_holds_at_the_call_is_saved(
        self, tmp_path: Path, loop: str
    ) -> None:
        """A host that goes on with the cache, or crops it, before its save has its turn."""
        model = model_of(LLAMA)
        done = generate(model, IDS)

        async def main() -> None:
            async with PromptCache(config_of(tmp_path), model) as prompts:
                past, ids = done.past_key_values, done.sequences.clone()
                saving = prompts.save(ids, past)
                past.crop(20 - past.get_seq_length())
                ids.zero_()
                assert 96 == await saving
                past, num_tokens = await prompts.restore(IDS)
                assert 96 == num_tokens
                assert torch.equal(done.sequences, generate(model, IDS, past).sequences)

        run(loop, main)

    def test_model_that_is_refused_opens_nothing(
        self, tmp_path: Path, loop: str
    ) -> None:
        """By name, on entering."""

        async def main() -> None:
            with pytest.raises(ConfigError, match="DynamicSlidingWindowLayer"):
                await PromptCache(config_of(tmp_path), model_of(MISTRAL)).__aenter__()

        run(loop, main)
        assert [] == [*tmp_path.iterdir()]


@pytest.mark.slow
class TestCut:
    """Tasks that are cancelled by asyncio's own means, which know no scope that shields."""

    def test_task_cancelled_while_it_opens_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-42: what a thread opens then, for nobody, is closed."""
        opens, goes_on = threading.Event(), threading.Event()
        identify = dynamic.identify

        def late(*args: Any, **options: Any) -> Any:
            opens.set()
            assert goes_on.wait(60.0)
            return identify(*args, **options)

        monkeypatch.setattr(dynamic, "identify", late)
        prompts = PromptCache(config_of(tmp_path), model_of(LLAMA))

        async def main() -> None:
            task = asyncio.create_task(prompts.__aenter__())
            await asyncio.to_thread(opens.wait)
            task.cancel()
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(PipelineClosedError):
                prompts.cache.match([])

        asyncio.run(main())

    def test_task_cancelled_amid_a_save_ends_with_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-42: the next verb is not given a lane that is still written to, nor waits for it."""
        model = model_of(LLAMA)
        done = generate(model, IDS)
        reached, goes_on = held_copies(monkeypatch)

        async def main() -> None:
            async with PromptCache(config_of(tmp_path), model, lanes=1) as prompts:
                saving = prompts.save(done.sequences, done.past_key_values)
                task = asyncio.create_task(saving)
                await asyncio.to_thread(reached.wait)
                for _ in range(3):
                    task.cancel()
                    await asyncio.sleep(0)
                assert not task.done()
                goes_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert 96 == (await prompts.restore(IDS)).num_tokens

        asyncio.run(main())
