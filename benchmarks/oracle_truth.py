# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.oracle`` holds all engines against: one without connector."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.oracle_load import Adapter, Asked, inputs
from benchmarks.oracle_seen import Eyes
from benchmarks.oracle_settings import RECIPES, Setting, model_arguments
from tests.e2e.engine import in_process_engine
from tests.e2e.models import make_model
from tests.e2e.test_keys import write_adapter

__all__ = ["Truth"]


class Truth:
    """
    What an engine without connector says.

    Args:
        past: All that was asked.
        place: Made, for adapters.
    """

    def __init__(self, setting: Setting, past: Sequence[Asked], place: Path) -> None:
        self._setting, self._past, self._place = setting, past, place
        self.answers = 0
        """That were compared."""

    def compare(self, eyes: Eyes | None) -> list[str]:
        """
        Return which answers are wrong; *eyes* learn what blocks should be.

        Beside states none is compared: the engine alone says other things in other batches, and
        much the same without the first half of a prompt.
        """
        setting = self._setting
        self._place.mkdir()
        for content in {each.content for each in self._past} - {0}:
            write_adapter(self._place / str(content), content)
        asked = [each for each in self._past if each.said and not setting.has_states]
        with in_process_engine(
            make_model(RECIPES[setting.model]),
            max_model_len=setting.max_len + 8,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            # A state is seen where a step ends.
            long_prefill_token_threshold=setting.block_tokens * setting.has_states,
            kv_cache_memory_bytes=512 << 20,
            async_scheduling=False,
            **model_arguments(setting),
        ) as llm:
            if eyes:
                self._learn(llm, eyes)
            wrong = self._others(llm, asked) if asked else []
        self.answers = len(asked)
        return [f"{each.name} of {len(each.prompt)} says otherwise" for each in wrong]

    def _learn(self, llm: Any, eyes: Eyes) -> None:  # noqa: ANN401 - vLLM's LLM
        """Have all prompts and their answers computed, and their blocks kept."""
        asked = {
            (tuple(each.request.all_token_ids), each.salt, each.content): each.hashes
            for each in self._past
        }
        hashes = {
            (tokens, salt, str(content or "")): known
            for (tokens, salt, content), known in asked.items()
        }
        with eyes.learning(llm, hashes):
            self._say(llm, [([*tokens], *rest, 1) for tokens, *rest in asked])

    def _others(self, llm: Any, asked: Sequence[Asked]) -> list[Asked]:  # noqa: ANN401 - vLLM's LLM
        """Return who says something else than the engine."""
        said = self._say(
            llm,
            [(each.prompt, each.salt, each.content, len(each.said)) for each in asked],
        )
        return [
            each for each, right in zip(asked, said, strict=True) if each.said != right
        ]

    def _say(
        self,
        llm: Any,  # noqa: ANN401 - vLLM's LLM
        asked: Sequence[tuple[list[int], str, int, int]],
    ) -> list[list[int]]:
        """Return what the engine answers to tokens with salt and adapter, so many tokens each."""
        from vllm import SamplingParams

        prompts = [inputs(tokens, salt) for tokens, salt, *_ in asked]
        adapters = [
            Adapter(held, self._place / str(held), held).request() if held else None
            for *_, held, _ in asked
        ]
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=n, ignore_eos=True, detokenize=False
            )
            for *_, n in asked
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]
