# SPDX-License-Identifier: Apache-2.0
"""What the real engine tells us of its requests, in one line of each, and as spans."""

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.e2e.connector import SAVED, prompt, ucm_config
from tests.e2e.engine import (
    await_counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.kit.lockstep import read_traces
from tests.traces import traces_of

PROMPT = prompt(1, 700)
BLOCK = 32
WHOLE = 700 // BLOCK
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def add(llm: Any, name: str, tokens: list[int], **more: Any) -> None:
    """Give the engine a request that nobody waits for."""
    from vllm import SamplingParams

    given = {"prompt_token_ids": tokens}
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    llm.llm_engine.add_request(name, given, sampling, **more)


def test_each_request_has_its_line_and_a_traced_one_its_spans(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-71: the first request saved its prompt, the second one found it, the third one was
    traced and the fourth one given up; the engine's own words for that are understood."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, kv_transfer_config=config, block_size=BLOCK) as llm:
        generate(llm, [PROMPT], 1)
        await_counter(llm, SAVED, WHOLE)
        reset_prefix_cache(llm)
        generate(llm, [PROMPT], 1)
        reset_prefix_cache(llm)
        add(llm, "traced", PROMPT, trace_headers={"traceparent": TRACEPARENT})
        drain(llm)
        add(llm, "given up", prompt(2, 300))
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["given up"], internal=False)
        drain(llm)
    lines = list(read_traces(traces_of(tmp_path / "slab")))
    ended = [line for line in lines if line["event"] == "request.ended"]
    ended = [line for line in ended if line["prompt_tokens"] > 1]
    saved, found, traced, given_up = ended
    # Nobody came behind it to hear of its save, unless that was over with its last copy.
    told = saved["saved_blocks"] + saved["unsettled_blocks"]
    assert (WHOLE, 0, 0) == (told, saved["dropped_blocks"], saved["matched_tokens"])
    for line in (found, traced):
        assert WHOLE * BLOCK == line["matched_tokens"] == line["loaded_tokens"]
        assert line["load_s"] > 0
    assert ["finished"] * 3 + ["aborted"] == [line["outcome"] for line in ended]
    assert 300 == given_up["prompt_tokens"]
    assert TRACE_ID == traced["trace_id"]
    spans = exporter.get_finished_spans()  # some are the engine's own
    ours = [span for span in spans if TRACE_ID == f"{span.context.trace_id:032x}"]
    (load,) = [span for span in ours if span.name == "ucm.load"]
    stages = [span for span in ours if span.parent.span_id == load.context.span_id]
    assert ["event_wait", "fetch", "scatter", "publish"] == [
        span.name for span in stages
    ]
