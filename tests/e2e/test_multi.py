# SPDX-License-Identifier: Apache-2.0
"""The connector as the child of the engine's own MultiConnector."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import plant, prompt, ucm_config
from tests.e2e.engine import (
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.traces import traces_of
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.testing.lockstep import read_traces
from ucm.tracing import TICKET_SETTLED

PROMPT = prompt(4000, 300)


def around(child: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that has a connector as its only child."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [child]},
    }


def is_saved(traces: Path) -> bool:
    """Tell from the log whether a save is through."""
    return any(
        line["event"] == TICKET_SETTLED and line["outcome"] == "committed"
        for line in read_traces(traces)
    )


def test_child_is_asked_at_the_end_of_a_request_and_its_answer_is_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1-19: inside of another connector a request whose save has not begun keeps its
    blocks until the child says so; what was saved is loaded, with equal tokens."""
    from vllm import SamplingParams

    gate = Gate()
    plant(monkeypatch, FaultPlan(Fault("reserve", gate)))
    config = around(ucm_config(tmp_path / "slab"))
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with in_process_engine(
        llama, kv_transfer_config=config, skip_tokenizer_init=True
    ) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        answers = []
        inner = scheduler.connector.request_finished_all_groups

        def finished(*arguments: Any) -> Any:
            answers.append(inner(*arguments))
            return answers[-1]

        monkeypatch.setattr(
            scheduler.connector, "request_finished_all_groups", finished
        )
        engine.add_request("r", {"prompt_token_ids": PROMPT}, sampling)
        said: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                said = list(output.outputs[0].token_ids)
        gate.wait_reached()
        assert 1 == len(scheduler.requests)
        gate.open()
        drain(llm)
        assert 0 == len(scheduler.requests)
        assert [True] == [keeps for keeps, _ in answers]
        while not is_saved(traces_of(tmp_path / "slab")):
            generate(llm, [[3]], 1)
        reset_prefix_cache(llm)
        before = counter(llm, "vllm:external_prefix_cache_hits")
        again = generate(llm, [PROMPT], 6)
        assert [said] == again.token_ids
        assert 256 == counter(llm, "vllm:external_prefix_cache_hits") - before
