# SPDX-License-Identifier: Apache-2.0
"""Row by row: layers wait for what they read, and failures on the way are recomputed."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import (
    FAILURES,
    LOADED,
    plant,
    prompt,
    quiesced,
    traced,
    ucm_config,
)
from tests.e2e.engine import counter, generate, in_process_engine, reset_prefix_cache
from tests.e2e.test_pressure import slowly
from ucm.errors import DeviceError, StoreUnavailableError
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

PROMPTS = [prompt(7000, 700), prompt(7001, 555)]
BLOCKS = 5 + 4
ROWS = models.LLAMA.config["num_hidden_layers"]
TOKENS = 8
ALONE = {"enable_prefix_caching": False}
"""Layer-wise loads do not go together with a cache of the engine's own."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """What the engine says without any connector."""
    with in_process_engine(llama) as llm:
        return generate(llm, PROMPTS, TOKENS).token_ids


def layerwise(tmp_path: Path, **settings: object) -> dict[str, Any]:
    """Return the configuration, over the test's slab."""
    return ucm_config(tmp_path / "slab", use_layerwise=True, **settings)


def fill(llama: Path, config: dict[str, Any]) -> None:
    """Have an engine save the prompts, and end."""
    with in_process_engine(llama, kv_transfer_config=config, **ALONE) as llm:
        generate(llm, PROMPTS, 1)
        assert {} == quiesced(llm)


@pytest.mark.parametrize("use_layerwise", [False, True])
def test_rows_are_copied_one_by_one_where_that_is_asked_for(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_layerwise: bool
) -> None:
    """S4-07: a save gathers each row for itself, one per layer here, and a load
    scatters so; without the setting a ticket is one copy. Both prompts are saved by one
    ticket, and loaded by one each."""
    plan = FaultPlan()
    plant(monkeypatch, plan)
    config = ucm_config(tmp_path / "slab", use_layerwise=use_layerwise)
    copies = ROWS if use_layerwise else 1
    with in_process_engine(llama, kv_transfer_config=config, **ALONE) as llm:
        generate(llm, PROMPTS, TOKENS)
        assert {} == quiesced(llm)
        assert copies == plan.calls["gather"]
        reset_prefix_cache(llm)
        generate(llm, PROMPTS, TOKENS)
        assert BLOCKS == counter(llm, LOADED)
    assert copies * len(PROMPTS) == plan.calls["scatter"]


@pytest.mark.parametrize("verb", ["read", "verify", "scatter"])
def test_layers_wait_for_rows_that_come_late(
    llama: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    """S4-04: however late a row is there, no layer reads its blocks before."""
    config = layerwise(tmp_path)
    fill(llama, config)
    plant(monkeypatch, FaultPlan(Fault(verb, slowly(0.1), nth=0)))
    with in_process_engine(llama, kv_transfer_config=config, **ALONE) as llm:
        late = generate(llm, PROMPTS, TOKENS)
        assert (BLOCKS, 0) == (counter(llm, LOADED), counter(llm, FAILURES))
        assert {} == quiesced(llm)
    assert expected == late.token_ids


@pytest.mark.parametrize(
    "fault",
    [
        Fault("read", raising(StoreUnavailableError("gone"))),
        Fault("verify", raising(StoreUnavailableError("gone"))),
        Fault("scatter", raising(DeviceError("lost")), nth=1),
        Fault("scatter", raising(DeviceError("lost")), nth=2 * ROWS),
    ],
    ids=["read", "verify", "first row", "last row"],
)
def test_row_that_fails_on_the_way_is_recomputed(
    llama: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    """S4-12: a load that fails, with its first row or its last, is told by its blocks;
    its request is computed again, the other one goes on, and the tokens are right."""
    config = layerwise(tmp_path)
    fill(llama, config)
    plant(monkeypatch, FaultPlan(fault))
    with in_process_engine(llama, kv_transfer_config=config, **ALONE) as llm:
        with traced(llm) as trace:
            recomputed = generate(llm, PROMPTS, TOKENS)
        assert 1 == counter(llm, FAILURES)
        assert {} == quiesced(llm)
    invalid = [
        len(call.result)
        for call in trace
        if call.hook == "get_block_ids_with_load_errors" and call.result
    ]
    assert invalid in ([4], [5])
    assert expected == recomputed.token_ids


def test_row_that_never_comes_ends_at_the_deadline(
    llama: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer waits for a row no longer than the load may last; the request is computed
    again, and the engine serves on."""
    config = layerwise(tmp_path, timeout={"load": 0.3})
    fill(llama, config)
    gate = Gate()
    plant(monkeypatch, FaultPlan(Fault("read", gate)))
    with in_process_engine(llama, kv_transfer_config=config, **ALONE) as llm:
        recomputed = generate(llm, PROMPTS, TOKENS)
        assert counter(llm, FAILURES) >= 1
        gate.open()
        assert {} == quiesced(llm)
        reset_prefix_cache(llm)
        again = generate(llm, PROMPTS, TOKENS)
        assert {} == quiesced(llm)
    assert expected == recomputed.token_ids == again.token_ids
