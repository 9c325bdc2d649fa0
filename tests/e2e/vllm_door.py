# SPDX-License-Identifier: Apache-2.0
"""vLLM behind our connector, as the contract of doors drives it."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from tests.e2e import models
from tests.e2e.connector import LOADED, halves, quiesced, ucm_config
from tests.e2e.engine import (
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.kit.lockstep import check_trace, read_traces
from tests.traces import traces_of
from ucm.testing.door import POOL, ROOM, Ability, Door, Prompts, Setting

__all__ = ["VLLMDoor"]

OTHER = attrs.evolve(models.LLAMA, name="llama-other", seed=8)


class VLLMDoor(Door):
    """
    The engine in this process.

    Args:
        settings: Of the connector, beside its store.
    """

    block_tokens = 32
    cannot = MappingProxyType(
        {
            Ability.KILL: "it runs in this process; test_processes.py kills one",
            Ability.TIERS: "test_tiers.py shows it, where fetching pays and where not",
        }
    )

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._up = contextlib.ExitStack()
        self._llm: Any = None
        self._slab = Path()
        self._block_bytes = 0

    def start(self, slab: Path, setting: Setting) -> None:
        """Start over a slab; a trace of it is checked when it ends."""
        capacity = "64MiB"
        if setting is Setting.SMALL:
            capacity = str(ROOM * self._block_bytes)
        config = ucm_config(slab, capacity, **self._settings)
        self._slab = slab
        self._llm = self._up.enter_context(self._engine(setting, config))
        self._block_bytes = halves(self._llm)[1]._worker._setup.layout.max_block_bytes

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Ask for all at once."""
        return generate(self._llm, prompts, num_tokens).token_ids

    def loaded_blocks(self) -> int:
        """Read the metric of the engine."""
        return counter(self._llm, LOADED)

    def settle(self) -> None:
        """Wait for the runtime, and a step in which it reports."""
        quiesced(self._llm)

    def forget(self) -> None:
        """Empty the engine's own cache."""
        reset_prefix_cache(self._llm)

    def stop(self) -> None:
        """End it, and check what it has logged."""
        self._llm = None
        self._up.close()
        check_trace(read_traces(traces_of(self._slab)), is_whole=True)

    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Ask an engine without a connector, and with room for all."""
        with self._engine(
            Setting.PLAIN if setting is Setting.TIGHT else setting
        ) as llm:
            return generate(llm, prompts, num_tokens).token_ids

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Abort after no step, one step, and so on."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=200, ignore_eos=True, detokenize=False
        )
        for steps in range(8):
            reset_prefix_cache(self._llm)
            names = [f"abort-{steps}-{at}" for at, _ in enumerate(prompts)]
            for name, tokens in zip(names, prompts, strict=True):
                engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
            for _ in range(steps):
                engine.step()
            engine.abort_request(names)
            drain(self._llm)

    def preemptions(self) -> int:
        """Read the metric of the engine."""
        return counter(self._llm, "vllm:num_preemptions")

    def left(self) -> Mapping[str, int]:
        """Return what either half's containers hold."""
        return quiesced(self._llm)

    def _engine(self, setting: Setting, config: dict[str, Any] | None = None) -> Any:
        recipe = OTHER if setting is Setting.FOREIGN else models.LLAMA
        tight = {"num_blocks": POOL, "max_model_len": 256, "max_num_seqs": 6}
        return in_process_engine(
            models.make_model(recipe),
            kv_transfer_config=config,
            block_size=self.block_tokens,
            **(tight if setting is Setting.TIGHT else {}),
        )
