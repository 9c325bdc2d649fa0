# SPDX-License-Identifier: Apache-2.0
"""What ``ucm trace`` and ``ucm top`` tell of the real engine in trouble."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import SAVED, corrupt, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    await_counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.traces import traces_of
from ucm.cli.main import main
from ucm.story.collected import collect
from ucm.story.drawing import draw
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lives import lives_of


@pytest.fixture
def ucm(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return what calls the command and returns its answer for programs."""

    def call(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return call


def in_trouble(llm: Any, slab: Path) -> None:
    """Have requests preempted and their saves refused, one aborted, and a load fail."""
    from vllm import SamplingParams

    generate(llm, [prompt(200 + n, 150) for n in range(6)], 100)
    lone = prompt(300, 150)
    generate(llm, [lone], 1)
    assert {} == quiesced(llm)
    await_counter(llm, SAVED, 1)
    reset_prefix_cache(llm)
    corrupt(slab)
    generate(llm, [lone], 1)
    sampling = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    llm.llm_engine.add_request(
        "aborted", {"prompt_token_ids": prompt(400, 150)}, sampling
    )
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    drain(llm)
    assert {} == quiesced(llm)


def test_what_befell_requests_can_be_told_apart(
    llama: Path, tmp_path: Path, ucm: Callable[..., dict[str, Any]]
) -> None:
    """R-71: on the real engine preempted, aborted, failed and refused requests each have
    their mark, a story and a reason; and while it runs, it is seen live."""
    slab = tmp_path / "slab"
    config = ucm_config(slab, queue={"tickets": 1, "window": 1, "span_bytes": 70_000})
    with in_process_engine(
        llama,
        kv_transfer_config=config,
        block_size=32,
        num_blocks=24,
        max_num_seqs=6,
        max_model_len=256,
        skip_tokenizer_init=True,
    ) as llm:
        in_trouble(llm, slab)
        (engine,) = ucm("top", str(slab))["engines"]
        assert ["scheduler", "worker-0"] == [
            name.rpartition("-")[0] for name in engine["processes"]
        ]
        assert engine["counters"]["ucm_load_failures_total|corrupt"] == 1
    assert not (slab / "status").exists()
    log = traces_of(slab)
    reading = Reading()
    lives = lives_of(collect(read_logs(find_logs(log), reading)))
    assert [] == reading.notes()
    marks = {mark for life in lives for mark in (life.outcome, *life.marks)}
    assert {"finished", "aborted", "preempted", "failed", "refused"} == marks
    assert {"requests", "save", "load"} == {lane.kind for lane in draw(lives).lanes}
    (failed,) = [life for life in lives if life.ended and life.ended.load_failure]
    reasons = ucm("trace", "why", failed.request_id, "--log", str(log))["reasons"]
    assert ("failed load", "corrupt") in [
        (reason["kind"], reason["reason"]) for reason in reasons
    ]
    (aborted,) = [life for life in lives if life.outcome == "aborted"]
    told = ucm("trace", "show", aborted.request_id, "--log", str(log))["lives"]
    assert ["aborted"] == [life["outcome"] for life in told]
    assert "aborted" == told[0]["happened"][-1]["what"]
