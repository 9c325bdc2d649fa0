# SPDX-License-Identifier: Apache-2.0
"""The real engine's configuration leads to the mode that the table promises."""

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.e2e import models
from tests.e2e.connector import halves, ucm_config
from tests.e2e.engine import in_process_engine
from tests.kit.lockstep import read_traces
from tests.traces import traces_of
from ucm.tracing import SCHEDULER_STARTED, SETTING_UNSAFE


def start(recipe: models.Recipe, store: Path, **settings: object) -> str:
    """Start and end an engine; return its mode, of which both halves are agreed."""
    config = ucm_config(store, **settings)
    with in_process_engine(
        models.make_model(recipe),
        dtype=recipe.dtype,
        max_num_seqs=4,
        kv_transfer_config=config,
    ) as llm:
        scheduler, worker = halves(llm)
        mode = scheduler._scheduler._setup.mode
        assert worker._worker._setup.mode == mode
        return str(mode.name)


def logged(store: Path, event: str) -> list[dict[str, Any]]:
    """Return what was logged of one kind."""
    return [line for line in read_traces(traces_of(store)) if line["event"] == event]


class TestModes:
    @pytest.mark.parametrize(
        ("recipe", "name"),
        [
            (models.LLAMA, "layerwise-cached"),
            (models.DEEPSEEK, "layerwise"),
            (models.GEMMA3, "layerwise-groups"),
            (models.QWEN3_NEXT, "layerwise-recurrent"),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_model_decides_how_layerwise_it_can_be(
        self, recipe: models.Recipe, name: str, tmp_path: Path
    ) -> None:
        """S4-32, S4-33: with `use_layerwise` alone the groups of the model's KV cache
        lead to the mode, and the log says which and why."""
        slab = tmp_path / "slab"
        assert name == start(recipe, slab, use_layerwise=True)
        (line,) = logged(slab, SCHEDULER_STARTED)
        assert name == line["mode"]
        assert line["reason"].endswith(".")

    def test_overlapping_batches_load_asynchronously(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S4-32: where the engine overlaps its batches, as it does by default on
        accelerators, loads are not layer-wise."""
        platform = type(current_platform)
        inner = platform.check_and_update_config

        def overlap(_: type, vllm_config: Any) -> None:
            inner(vllm_config)
            vllm_config.scheduler_config.async_scheduling = True

        monkeypatch.setattr(platform, "check_and_update_config", classmethod(overlap))
        mode = start(models.LLAMA, tmp_path / "slab", use_layerwise=True)
        assert "layerwise-overlapping" == mode

    @pytest.mark.parametrize(
        ("recipe", "claim", "wrong"),
        [(models.QWEN3_NEXT, True, []), (models.LLAMA, True, ["true"])],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_claim_about_the_model_is_compared(
        self, recipe: models.Recipe, claim: bool, wrong: list[str], tmp_path: Path
    ) -> None:
        """S4-33: `use_hybrid_linear_attention` is a warning where it is wrong, and the
        engine starts all the same, in the mode that it has without."""
        slab = tmp_path / "slab"
        assert "direct" == start(recipe, slab, use_hybrid_linear_attention=claim)
        assert wrong == [line["value"] for line in logged(slab, SETTING_UNSAFE)]
