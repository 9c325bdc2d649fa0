# SPDX-License-Identifier: Apache-2.0
"""The connector as a child of the engine's own MultiConnector."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import (
    FAILURES,
    corrupt,
    halves,
    plant,
    prompt,
    traced,
    ucm_config,
)
from tests.e2e.engine import (
    EXTERNAL_HITS,
    ROOT,
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.test_harness import example_connector
from tests.e2e.test_models import assert_failures_are_told_by_request
from tests.kit.file_tier import registration
from tests.kit.lockstep import check_trace, read_traces
from tests.traces import traces_of
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.tracing import SETTING_UNSAFE

PROMPT = prompt(4000, 300)
OTHERS = [prompt(4001, 700), prompt(4002, 555)]
Config = dict[str, Any]


def child(home: Path, name: str, **settings: object) -> Config:
    """Return a child's configuration, over a slab and with traces of its own."""
    (home / name).mkdir(exist_ok=True)
    return ucm_config(home / name / "slab", **settings)


def around(*children: Config) -> Config:
    """Return a configuration that has these connectors as children."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def ours(llm: Any) -> list[tuple[Any, Any]]:
    """Return the halves of those children that are ours, scheduler's first."""
    pairs = zip(*(half._connectors for half in halves(llm)), strict=True)
    return [pair for pair in pairs if type(pair[0]).__name__ == "UCMConnector"]


def settle(llm: Any) -> None:
    """Let all saves end and be reported; nothing must be kept behind them."""
    for _, worker in ours(llm):
        assert worker._worker._runtime.flush(120.0)
    generate(llm, [[3]], 1)  # a step, in which the workers report
    for scheduler, worker in ours(llm):
        counts = scheduler._scheduler.counts() | worker._worker.counts()
        counts.pop("denied_keys")
        assert not any(counts.values()), counts


def totals(llm: Any, name: str) -> list[float]:
    """Return a counter of each child's scheduler, since its start."""
    schedulers = [scheduler._scheduler for scheduler, _ in ours(llm)]
    for one in schedulers:
        one.stats()  # what it has heard is counted when somebody asks
    return [one._counters.total(name) for one in schedulers]


@pytest.mark.parametrize("children", ["alone", "beside one without HMA", "two"])
def test_child_is_asked_at_the_end_of_a_request_and_its_answer_is_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: str
) -> None:
    """S1-19, S1-20: inside of another connector, by whichever entry point it asks, a
    request whose save has not begun keeps its blocks until every child says so; what
    was saved is loaded, with equal tokens."""
    from vllm import SamplingParams

    gate = Gate()
    plant(monkeypatch, FaultPlan(Fault("reserve", gate, nth=0)))
    configs = [child(tmp_path, "first")]
    if children == "two":
        configs.append(child(tmp_path, "second"))
    if children == "beside one without HMA":
        configs.append(example_connector(tmp_path / "example"))
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with in_process_engine(
        llama, kv_transfer_config=around(*configs), skip_tokenizer_init=True
    ) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        asked: set[str] = set()
        answers: list[Any] = []

        def record(target: Any, hook: str) -> None:
            inner = getattr(target, hook)

            def finished(*arguments: Any) -> Any:
                answers.append(inner(*arguments))
                if target is not scheduler.connector:
                    asked.add(hook)
                return answers[-1]

            monkeypatch.setattr(target, hook, finished)

        for target in (scheduler.connector, *(half for half, _ in ours(llm))):
            record(target, "request_finished")
            record(target, "request_finished_all_groups")
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
        assert {(True, None)} == {(keeps, params) for keeps, params in answers}
        assert (children == "beside one without HMA") == ("request_finished" in asked)
        settle(llm)
        reset_prefix_cache(llm)
        before = counter(llm, EXTERNAL_HITS)
        again = generate(llm, [PROMPT], 6)
        assert 256 == counter(llm, EXTERNAL_HITS) - before
    assert [said] == again.token_ids


@pytest.mark.parametrize("use_layerwise", [False, True], ids=["async", "layerwise"])
@pytest.mark.parametrize(
    "recipe",
    [models.LLAMA, models.GEMMA3, models.QWEN3_NEXT],
    ids=lambda recipe: recipe.name,
)
def test_two_children_save_both_and_whoever_has_it_loads(
    recipe: models.Recipe, tmp_path: Path, use_layerwise: bool
) -> None:
    """S1-20: two of ours side by side, also for hybrid models: both save, the first
    loads; a first one that starts empty leaves it to the second, saves what that one
    has loaded, and has it when it is asked alone."""
    model = models.make_model(recipe)
    first, second, fresh = (
        child(tmp_path, name, use_layerwise=use_layerwise)
        for name in ("first", "second", "fresh")
    )
    stages = (around(first, second), around(fresh, second), around(fresh))
    outputs, loaded = [], []
    for config in stages:
        with in_process_engine(
            model, kv_transfer_config=config, dtype=recipe.dtype
        ) as llm:
            outputs.append(generate(llm, OTHERS, 8))
            settle(llm)
            if config is stages[0]:
                saved = totals(llm, "ucm_saved_blocks_total")
                assert saved[0] == saved[1] > 0
                assert [0, 0] == totals(llm, "ucm_loaded_blocks_total")
                reset_prefix_cache(llm)
                outputs.append(generate(llm, OTHERS, 8))
            settle(llm)
            loaded.append([n > 0 for n in totals(llm, "ucm_loaded_blocks_total")])
            assert not any(totals(llm, "ucm_load_failures_total"))
    assert [[True, False], [False, True], [True]] == loaded
    assert [0, 1152, 1152, 1152] == [output.external_tokens for output in outputs]
    assert 1 == len({str(output.token_ids) for output in outputs})
    for name in ("first", "second", "fresh"):
        check_trace(read_traces(traces_of(tmp_path / name / "slab")), is_whole=True)


def test_child_that_asks_its_tier_hides_no_blocks_of_the_next(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-54, S1-20: while the first child's tier is asked, the engine waits for all of them;
    what the tier has the first loads, and what it has lost meanwhile the second."""
    registered = str(registration(tmp_path / "registration"))
    monkeypatch.syspath_prepend(registered)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([registered, str(ROOT)]))
    tier = {"type": "file-tier", "path": str(tmp_path / "tier")}
    second = child(tmp_path, "second")
    said = []
    for name, loaded in (("first", [0, 0]), ("fresh", [2, 4])):
        config = around(child(tmp_path, name, tiers=[tier]), second)
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            tiers = ours(llm)[0][0]._scheduler._tiers
            _until(llm, lambda tiers=tiers: tiers._client.is_up)
            said += generate(llm, [PROMPT], 8).token_ids
            settle(llm)
            if name == "fresh":
                for path in (tmp_path / "tier").iterdir():
                    path.unlink(missing_ok=True)
            said += generate(llm, OTHERS[1:], 8).token_ids
            settle(llm)
            if name == "first":
                _until(llm, lambda: len(_spilled(tmp_path)) >= 6)
            assert loaded == totals(llm, "ucm_loaded_blocks_total")
            assert [2, 0] == totals(llm, "ucm_fetch_wants_total")
            assert 0 == len(tiers)
    assert said[:2] == said[2:]


def _until(llm: Any, is_so: Callable[[], bool]) -> None:
    """Let the engine run small steps until something is so."""
    until = time.monotonic() + 120.0
    while not is_so():
        assert until > time.monotonic()
        generate(llm, [[3]], 1)


def _spilled(home: Path) -> list[Path]:
    """Return the files of blocks in the tier."""
    return [path for path in (home / "tier").iterdir() if not path.suffix]


def test_failed_load_of_a_child_is_recomputed_or_loaded_by_the_next(
    gemma3: Path, tmp_path: Path
) -> None:
    """S4-15: of a hybrid model a child's failed load is told by request, as failed and
    as over, and never by blocks; the tokens stay the same."""
    first, second = child(tmp_path, "first"), child(tmp_path, "second")
    with in_process_engine(gemma3, kv_transfer_config=around(first, second)) as llm:
        cold = generate(llm, OTHERS, 8)
        settle(llm)
        corrupt(tmp_path / "first" / "slab")
        reset_prefix_cache(llm)
        with traced(llm) as trace:
            again = generate(llm, OTHERS, 8)
        settle(llm)
        assert counter(llm, FAILURES) > 0
    assert_failures_are_told_by_request(trace)
    assert cold.token_ids == again.token_ids


@pytest.mark.parametrize(("policy", "warnings"), [("fail", 1), ("recompute", 0)])
def test_child_warns_of_its_own_failure_policy(
    llama: Path, tmp_path: Path, policy: str, warnings: int
) -> None:
    """H-13: a failed load that ends its request is warned of as the child's own
    settings say, not as those of the connector around it."""
    config = child(tmp_path, "first") | {"kv_load_failure_policy": policy}
    with in_process_engine(llama, kv_transfer_config=around(config)):
        pass
    lines = read_traces(traces_of(tmp_path / "first" / "slab"))
    unsafe = [line["key"] for line in lines if line["event"] == SETTING_UNSAFE]
    assert warnings * ["kv_load_failure_policy"] == unsafe


@pytest.mark.parametrize("place", ["before", "behind"])
def test_child_of_somebody_else_may_have_a_handshake_of_its_own(
    llama: Path, tmp_path: Path, place: str
) -> None:
    """Of several children the engine passes only the first handshake on, to all of
    them: one that takes its own only starts in any place, and ours saves and loads."""
    foreign = example_connector(tmp_path / "example") | {
        "kv_connector": "ForeignConnector",
        "kv_connector_module_path": "tests.e2e.foreign",
    }
    configs = [foreign, child(tmp_path, "first")]
    if place == "behind":
        configs.reverse()
    with in_process_engine(llama, kv_transfer_config=around(*configs)) as llm:
        cold = generate(llm, [PROMPT], 6)
        settle(llm)
        assert [2] == totals(llm, "ucm_saved_blocks_total")
        reset_prefix_cache(llm)
        warm = generate(llm, [PROMPT], 6)
        assert [2 if place == "behind" else 0] == totals(llm, "ucm_loaded_blocks_total")
    assert 256 == warm.external_tokens
    assert cold.token_ids == warm.token_ids


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "two under way"])
def test_blocks_that_another_child_fails_to_load_are_not_saved(
    llama: Path, tmp_path: Path, *, is_async: bool
) -> None:
    """Another child serves requests within the step, one of them shares its blocks, and none
    comes: what ours has saved is what the engine computed again, and a fresh engine loads it
    with the tokens of one that computes everything."""
    absent = {
        "kv_connector": "AbsentConnector",
        "kv_connector_module_path": "tests.e2e.absent",
        "kv_role": "kv_both",
    }
    prompts = [*OTHERS, OTHERS[0][:512] + PROMPT]
    with in_process_engine(llama) as llm:
        computed = generate(llm, prompts, 8)
    config = around(absent, child(tmp_path, "first"))
    with in_process_engine(
        llama, kv_transfer_config=config, async_scheduling=is_async
    ) as llm:
        served = generate(llm, prompts, 8)
        settle(llm)
        saved = totals(llm, "ucm_saved_blocks_total")
    assert 0 < saved[0]
    assert is_async or computed.token_ids == served.token_ids
    with in_process_engine(
        llama, kv_transfer_config=around(child(tmp_path, "first"))
    ) as llm:
        loaded = generate(llm, prompts, 8)
        settle(llm)
    assert 9 * 128 <= loaded.external_tokens
    assert computed.token_ids == loaded.token_ids


def test_statistics_of_a_child_are_understood_in_another_process(
    tmp_path: Path,
) -> None:
    """The API server gets the children's statistics as text under the class's name,
    and would end with the first that it does not find: ours is found."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    config = KVTransferConfig(**around(child(tmp_path, "first")))
    logging = KVConnectorLogging(config)
    data = {"counters": {"ucm_saved_blocks_total": 2.0}, "gauges": {}, "histograms": {}}
    logging.observe({"UCMConnector": {"data": data}})
    assert logging.transfer_stats_accumulator is not None
    assert ["UCMConnector"] == list(logging.transfer_stats_accumulator.data)
