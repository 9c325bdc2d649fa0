# SPDX-License-Identifier: Apache-2.0
"""The engine under pressure: tiny pools, slow stores, many requests, aborts."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import (
    FAILURES,
    LOADED,
    SAVED,
    plant,
    prompt,
    quiesced,
    traced,
    ucm_config,
)
from tests.e2e.engine import (
    await_counter,
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from ucm.errors import StoreUnavailableError
from ucm.integration.vllm.messages import plan_in
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

SHARED = prompt(10, 256)
MIXED = [
    [*SHARED[: 32 * (n % 9)], *prompt(100 + n, 60 + 17 * (n % 7))] for n in range(32)
]


def slowly(seconds: float) -> Callable[[], None]:
    """Return an act that takes a while, as a slow medium does."""
    never = threading.Event()

    def act() -> None:
        never.wait(seconds)

    return act


def plain(model: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return what the engine says without a connector, with room for all."""
    with in_process_engine(model, block_size=32) as llm:
        return generate(llm, prompts, tokens).token_ids


def preemptions(llm: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that grows by each request that the engine preempts."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    inner = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.add(request.request_id)
        return inner(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    return preempted


class TestManyRequests:
    def test_32_concurrent_requests_with_shared_prefixes_are_exact(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """S2-16: shared and distinct prefixes, cold and loaded, give the plain engine's
        tokens; S1-15: afterwards no container of either half keeps anything."""
        expected = plain(llama, MIXED, 24)
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(
            llama, kv_transfer_config=config, block_size=32, max_num_seqs=32
        ) as llm:
            cold = generate(llm, MIXED, 24)
            await_counter(llm, SAVED, 60)
            reset_prefix_cache(llm)
            warm = generate(llm, MIXED, 24)
            assert counter(llm, LOADED) > 60
            assert {} == quiesced(llm)
        assert expected == cold.token_ids == warm.token_ids
        assert warm.external_tokens > 2000


@pytest.mark.parametrize("use_layerwise", [False, True], ids=["async", "layerwise"])
class TestSmallPool:
    def test_preemption_under_a_tiny_pool_is_exact(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        use_layerwise: bool,
    ) -> None:
        """S1-07, S1-08: requests are preempted while a slow store still holds their
        saves; what they resume from and what is stored stays right, for another
        engine too."""
        prompts = [prompt(200 + n, 150) for n in range(6)]
        expected = plain(llama, prompts, 100)
        config = ucm_config(tmp_path / "slab", use_layerwise=use_layerwise)
        tiny: dict[str, Any] = {
            "kv_transfer_config": config,
            "block_size": 32,
            "num_blocks": 24,
            "max_num_seqs": 6,
            "max_model_len": 256,
            "enable_prefix_caching": not use_layerwise,
        }
        with monkeypatch.context() as patch:
            plant(patch, FaultPlan(Fault("reserve", slowly(0.02), nth=0)))
            with in_process_engine(llama, **tiny) as llm:
                preempted = preemptions(llm, patch)
                cold = generate(llm, prompts, 100)
                assert preempted
                preempted.clear()
                reset_prefix_cache(llm)
                warm = generate(llm, prompts, 100)
                assert preempted
                assert counter(llm, LOADED) > 0
                assert {} == quiesced(llm)
        with in_process_engine(llama, **tiny) as llm:
            restarted = generate(llm, prompts, 100)
            assert counter(llm, LOADED) > 0
            assert 0 == counter(llm, FAILURES)
            assert {} == quiesced(llm)
        assert expected == cold.token_ids == warm.token_ids == restarted.token_ids

    @pytest.mark.parametrize("verb", ["reserve", "seal", "gather"])
    def test_recycled_window_blocks_stay_exact_with_a_slow_store(
        self,
        gemma3: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
        use_layerwise: bool,
    ) -> None:
        """S1-09: a sliding window recycles blocks inside running requests while slow
        saves still wait for them; neither output nor stored bytes suffer, as the same
        engine and another one show that load them."""
        prompts = [prompt(300 + n, 180 + 40 * n) for n in range(5)]
        expected = plain(gemma3, prompts, 60)
        config = ucm_config(
            tmp_path / "slab", timeout={"fence": 0.01}, use_layerwise=use_layerwise
        )
        tiny: dict[str, Any] = {
            "kv_transfer_config": config,
            "block_size": 32,
            "num_blocks": 40,
            "max_num_seqs": 5,
            "max_model_len": 512,
            "max_num_batched_tokens": 64,
            "enable_chunked_prefill": True,
        }
        with monkeypatch.context() as patch:
            plant(patch, FaultPlan(Fault(verb, slowly(0.03), nth=0)))
            with in_process_engine(gemma3, **tiny) as llm:
                with traced(llm) as trace:
                    cold = generate(llm, prompts, 60)
                fenced = sum(
                    bool(plan_in(call.arguments[0]).fences)
                    for call in trace
                    if call.hook == "handle_preemptions"
                )
                reset_prefix_cache(llm)
                warm = generate(llm, prompts, 60)
                assert counter(llm, LOADED) > 0
                assert {} == quiesced(llm)
        with in_process_engine(gemma3, **tiny) as llm:
            restarted = generate(llm, prompts, 60)
            assert counter(llm, LOADED) > 0
            assert 0 == counter(llm, FAILURES)
            assert {} == quiesced(llm)
        # Blocks are held for their copy only: not while the store is slow to seal.
        assert fenced > 0 or verb == "seal"
        assert expected == cold.token_ids == warm.token_ids == restarted.token_ids


class TestSlowAndBrokenStores:
    def test_step_never_waits_for_a_hung_store(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S1-01, S1-05: while the store hangs the request ends, its blocks are given
        back and the engine's cache can be emptied; the save counts once it is over."""
        gate = Gate()
        plant(monkeypatch, FaultPlan(Fault("seal", gate)))
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            generate(llm, [prompt(400, 300)], 4)
            gate.wait_reached()
            reset_prefix_cache(llm)
            assert 0 == counter(llm, SAVED)
            gate.open()
            assert 2 == await_counter(llm, SAVED, 2)

    def test_store_that_fails_costs_saves_and_nothing_else(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S1-25: every save fails; the tokens are right, the blocks come back, the
        failures are counted and nothing is visible."""
        broken = FaultPlan(
            Fault("commit", raising(StoreUnavailableError("gone")), nth=0)
        )
        plant(monkeypatch, broken)
        prompts = [prompt(500, 300)]
        expected = plain(llama, prompts, 8)
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            cold = generate(llm, prompts, 8)
            reset_prefix_cache(llm)
            again = generate(llm, prompts, 8)
            assert 0 == counter(llm, SAVED)
            assert 0 == again.external_tokens
            assert {} == quiesced(llm)
        assert expected == cold.token_ids == again.token_ids


class TestDelayedFree:
    def test_blocks_of_a_finished_request_are_kept_until_its_save_has_read_them(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S1-02, S1-03, S3-10: a request that ends before its save has begun keeps its
        blocks; they are freed once, after the copy, and the save counts."""
        from vllm import SamplingParams

        gate = Gate()
        plant(monkeypatch, FaultPlan(Fault("reserve", gate)))
        config = ucm_config(tmp_path / "slab")
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        with in_process_engine(
            llama, kv_transfer_config=config, skip_tokenizer_init=True
        ) as llm:
            engine = llm.llm_engine
            scheduler = engine.engine_core.engine_core.scheduler
            with traced(llm) as trace:
                engine.add_request(
                    "r", {"prompt_token_ids": prompt(950, 300)}, sampling
                )
                while engine.has_unfinished_requests():
                    engine.step()
                gate.wait_reached()
                for _ in range(3):
                    engine.step()
                assert 1 == len(scheduler.requests)
                assert not llm.reset_prefix_cache()
                gate.open()
                drain(llm)
            assert 0 == len(scheduler.requests)
            assert llm.reset_prefix_cache()
            assert 2 == await_counter(llm, SAVED, 2)
        kept = [
            call.result[0]
            for call in trace
            if call.hook == "request_finished_all_groups"
        ]
        sent = [
            name
            for call in trace
            if call.hook == "get_transfer_results"
            for name in call.result.finished_sending
        ]
        assert ([True], 1) == (kept, len(sent))


class TestParkedLoads:
    def test_engine_goes_on_while_a_load_is_under_way(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S3-04: loads run beside the engine; no layer of another request waits for
        them, and the request itself runs only once all its layers are there."""
        from vllm import SamplingParams

        gate = Gate()
        plant(monkeypatch, FaultPlan(Fault("read", gate)))
        config = ucm_config(tmp_path / "slab")
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        with in_process_engine(
            llama, kv_transfer_config=config, skip_tokenizer_init=True
        ) as llm:
            engine, done = llm.llm_engine, {}

            def step() -> None:
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = list(output.outputs[0].token_ids)

            cold = generate(llm, [prompt(900, 300)], 8)
            await_counter(llm, SAVED, 2)
            reset_prefix_cache(llm)
            for name, seed in (("parked", 900), ("other", 901)):
                ids = {"prompt_token_ids": prompt(seed, 300)}
                engine.add_request(name, ids, sampling)
            while "other" not in done:
                step()
            gate.wait_reached()
            assert {"other"} == set(done)
            gate.open()
            while "parked" not in done:
                step()
            drain(llm)
            assert 2 == counter(llm, LOADED)
        assert cold.token_ids == [done["parked"]]


class TestAbort:
    def test_abort_at_any_point_leaves_nothing_behind(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """H-02, S1-28: requests that are aborted before their first step, while they
        load, and while their saves run, free all their blocks, each told once."""
        from vllm import SamplingParams

        plan = FaultPlan(Fault("read", slowly(0.05), nth=0))
        plant(monkeypatch, plan)
        config = ucm_config(tmp_path / "slab")
        sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        ids = {"prompt_token_ids": prompt(600, 300)}
        with in_process_engine(
            llama, kv_transfer_config=config, skip_tokenizer_init=True
        ) as llm:
            expected = generate(llm, [ids["prompt_token_ids"]], 8)
            await_counter(llm, SAVED, 2)
            engine = llm.llm_engine
            with traced(llm) as trace:
                for steps in range(8):
                    reset_prefix_cache(llm)
                    name = f"abort-{steps}"
                    engine.add_request(name, ids, sampling)
                    for _ in range(steps):
                        engine.step()
                    engine.abort_request([name])
                    drain(llm)
            told = [
                name
                for call in trace
                if call.hook == "get_transfer_results"
                for name in (
                    *call.result.finished_sending,
                    *call.result.finished_recving,
                )
            ]
            assert sorted(set(told)) == sorted(told)
            reset_prefix_cache(llm)
            assert {} == quiesced(llm)
            again = generate(llm, [ids["prompt_token_ids"]], 8)
        assert expected.token_ids == again.token_ids
        assert 256 == again.external_tokens
