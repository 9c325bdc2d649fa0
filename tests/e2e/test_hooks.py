# SPDX-License-Identifier: Apache-2.0
"""What the door promises to the host, hook by hook, on a live engine."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.e2e.connector import (
    Call,
    corrupt,
    halves,
    prompt,
    quiesced,
    traced,
    ucm_config,
)
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache
from tests.e2e.test_connector_class import FORWARDED
from tests.kit.lockstep import check_trace, read_traces
from tests.traces import traces_of
from ucm.errors import MessageError
from ucm.integration.vllm.messages import PlanEnvelope, plan_in
from ucm.integration.vllm.step import Step
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.metrics import METRICS
from ucm.scheduler.messages import MESSAGE_VERSION


@attrs.frozen
class Recorded:
    """An engine and what its hooks did in a mixed run."""

    llm: Any
    trace: list[Call]
    slab: Path

    def results(self, hook: str) -> list[Any]:
        """Return what a hook answered, in order."""
        return [call.result for call in self.trace if call.hook == hook]


@pytest.fixture(scope="module")
def recorded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Save, load and fail a load, with all hooks recorded."""
    slab = tmp_path_factory.mktemp("hooks") / "slab"
    with in_process_engine(llama, kv_transfer_config=ucm_config(slab)) as llm:
        with traced(llm) as trace:
            prompts = [prompt(n, 300) for n in range(6)]
            generate(llm, prompts, 4)
            reset_prefix_cache(llm)
            generate(llm, prompts[:3], 4)
            corrupt(slab)
            reset_prefix_cache(llm)
            generate(llm, prompts[3:], 4)
            quiesced(llm)
        yield Recorded(llm, trace, slab)
    check_trace(read_traces(traces_of(slab)))


class _Wrapper(KVConnectorBase_V1, SupportsHMA):
    """As vllm-ascend's: holds the connector and forwards what it knows."""

    def __init__(self, engine: UCMConnector) -> None:
        self._ucm_engine = engine


for _name in FORWARDED:
    setattr(
        _Wrapper,
        _name,
        lambda self, *args, _name=_name, **kwargs: getattr(self._ucm_engine, _name)(
            *args, **kwargs
        ),
    )
_Wrapper.__abstractmethods__ = frozenset()


class TestConstruction:
    def test_two_or_three_arguments_construct(self, recorded: Recorded) -> None:
        """S3-01: wrappers of older engines pass two arguments, of newer ones three."""
        config = recorded.llm.llm_engine.vllm_config
        two = UCMConnector(config, KVConnectorRole.SCHEDULER)
        assert (0, False) == two.get_num_new_matched_tokens(None, 0)
        scheduler, _ = halves(recorded.llm)
        three = UCMConnector(
            config, KVConnectorRole.SCHEDULER, scheduler._kv_cache_config
        )
        three.shutdown()

    def test_missing_transfer_config_is_a_clear_error(self, recorded: Recorded) -> None:
        """S3-05: construction names what is missing."""
        config = copy.copy(recorded.llm.llm_engine.vllm_config)
        config.kv_transfer_config = None
        with pytest.raises(ValueError, match="kv_transfer_config"):
            UCMConnector(config, KVConnectorRole.SCHEDULER)

    def test_wrapper_gets_what_the_connector_gives(self, recorded: Recorded) -> None:
        """S3-02: through a wrapper that holds it, each hook gives the same result."""
        scheduler, worker = halves(recorded.llm)
        for inner in (scheduler, worker):
            wrapper = _Wrapper(inner)
            assert inner.get_finished_count() == wrapper.get_finished_count()
            assert inner.take_events() == wrapper.take_events()
            assert set() == wrapper.get_block_ids_with_load_errors()
            assert inner.get_finished(set()) == wrapper.get_finished(set())
            assert inner.has_connector_metadata() == wrapper.has_connector_metadata()
            assert inner.get_handshake_metadata() == wrapper.get_handshake_metadata()
            assert wrapper.wait_for_save() is None
            assert wrapper.start_load_kv(None) is None
            assert wrapper.wait_for_layer_load("model.layers.0") is None


class TestScheduler:
    def test_saves_are_never_required(self, recorded: Recorded) -> None:
        """H-04: a dropped save is a later miss, never a request to be repeated."""
        scheduler, _ = halves(recorded.llm)
        assert scheduler.requires_kv_delivery is False
        assert not UCMConnector.requires_piecewise_for_cudagraph({})
        layerwise = {"use_layerwise": True}
        assert UCMConnector.requires_piecewise_for_cudagraph(layerwise)
        mock = {**layerwise, "hit_ratio": 0.5}
        assert not UCMConnector.requires_piecewise_for_cudagraph(mock)

    def test_count_leaves_out_what_the_engine_has(self, recorded: Recorded) -> None:
        """S3-08: only tokens beyond the engine's own hit are promised."""
        scheduler, _ = halves(recorded.llm)
        stored = prompt(0, 300)
        request = _request(recorded.llm, stored)
        assert (256, True) == scheduler.get_num_new_matched_tokens(request, 0)
        assert (128, True) == scheduler.get_num_new_matched_tokens(request, 128)
        assert (0, False) == scheduler.get_num_new_matched_tokens(request, 256)

    def test_local_hit_in_the_middle_of_a_block_is_declined(
        self, recorded: Recorded
    ) -> None:
        """H-09: no assertion, no load, for a hit that is not block aligned."""
        scheduler, _ = halves(recorded.llm)
        request = _request(recorded.llm, prompt(0, 300))
        assert (0, False) == scheduler.get_num_new_matched_tokens(request, 100)

    def test_asking_changes_nothing(self, recorded: Recorded) -> None:
        """S3-07: the engine may ask in every step; statistics and holds stay."""
        scheduler, _ = halves(recorded.llm)
        request = _request(recorded.llm, prompt(0, 300))
        answers = {scheduler.get_num_new_matched_tokens(request, 0)}
        before = scheduler._scheduler._adapter.counts()  # with a record of it
        answers |= {scheduler.get_num_new_matched_tokens(request, 0) for _ in range(50)}
        assert {(256, True)} == answers
        assert before == scheduler._scheduler._adapter.counts()
        assert scheduler.get_kv_connector_stats() is None
        scheduler.request_finished(request, [])

    def test_request_that_was_never_scheduled_is_freed_at_once(
        self, recorded: Recorded
    ) -> None:
        """S1-28: nothing of it is held and nothing raises."""
        scheduler, _ = halves(recorded.llm)
        request = _request(recorded.llm, prompt(0, 300))
        assert (False, None) == scheduler.request_finished(request, [])
        assert (False, None) == scheduler.request_finished_all_groups(request, ([],))

    def test_external_tokens_alone_decide_to_load(self, recorded: Recorded) -> None:
        """H-07: an allocation with zero external tokens orders no load."""
        ordered = {
            order.request_id
            for call in recorded.trace
            if call.hook == "build_connector_meta"
            for order in plan_in(call.result).loads
        }
        promised = {
            call.arguments[0].request_id
            for call in recorded.trace
            if call.hook == "update_state_after_alloc" and call.arguments[2] > 0
        }
        assert promised == ordered
        assert len(promised) >= 6

    def test_planning_leaves_the_engines_output_alone(self, recorded: Recorded) -> None:
        """S3-06: the output is not modified, and a second plan has nothing left."""
        scheduler, _ = halves(recorded.llm)
        engine = recorded.llm.llm_engine.engine_core.engine_core
        output = engine.scheduler.schedule()
        before = copy.deepcopy(output)
        plan = plan_in(scheduler.build_connector_meta(_with_state(output)))
        output.kv_connector_block_state = None
        assert before == output
        assert plan.is_empty

    def test_saves_are_held_and_the_request_deferred(self, recorded: Recorded) -> None:
        """S1-02, S1-22, S3-10: a request with pending saves is kept, others are not;
        what was kept is freed only after the worker told of it."""
        answers = [
            (call.arguments[0].request_id, call.result[0])
            for call in recorded.trace
            if call.hook == "request_finished_all_groups"
        ]
        deferred = {name for name, kept in answers if kept}
        sent = [
            name
            for result in recorded.results("get_transfer_results")
            for name in result.finished_sending
        ]
        assert sorted(deferred) == sorted(sent)
        assert {False} <= {kept for _, kept in answers}


class TestWorker:
    def test_each_request_is_told_once_and_after_it_finished(
        self, recorded: Recorded
    ) -> None:
        """S1-03, S1-04, H-01: only deferred requests are told as sent, once, and not
        before the engine said that they finished."""
        finished: set[str] = set()
        told: list[str] = []
        for call in recorded.trace:
            if call.hook == "request_finished_all_groups":
                finished.add(call.arguments[0].request_id)
            if call.hook == "get_transfer_results":
                assert call.result.finished_sending <= finished
                told.extend(call.result.finished_sending)
        assert len(told) == len(set(told))

    def test_failed_load_is_told_as_received_and_failed(
        self, recorded: Recorded
    ) -> None:
        """H-05: a failed load is in both sets of the same answer, and in no other."""
        results = recorded.results("get_transfer_results")
        failed = set().union(*(result.failed_recving for result in results))
        assert failed
        for result in results:
            assert result.failed_recving <= result.finished_recving
        received = [name for result in results for name in result.finished_recving]
        assert failed <= set(received)

    def test_invalid_block_ids_are_never_told(self, recorded: Recorded) -> None:
        """S3-09: failures go by request, so the set is empty however often asked."""
        answers = recorded.results("get_block_ids_with_load_errors")
        assert {frozenset()} == set(map(frozenset, answers))

    def test_plan_is_carried_out_once_however_often_it_is_bound(
        self, recorded: Recorded
    ) -> None:
        """S2-07, S2-08: hooks that are called again with one plan submit nothing."""
        _, worker = halves(recorded.llm)
        envelope = next(
            call.result
            for call in reversed(recorded.trace)
            if call.hook == "build_connector_meta" and plan_in(call.result).saves
        )
        half = worker._worker
        half._step = Step(plan_in(envelope), envelope, has_loaded=True, has_saved=True)
        before = half.counts()
        for _ in range(3):
            worker.bind_connector_metadata(envelope)
            worker.wait_for_save()
            worker.clear_connector_metadata()
        assert before == half.counts()

    def test_results_may_be_asked_before_saves_are_submitted(
        self, recorded: Recorded
    ) -> None:
        """H-06, S1-24: the order of hooks within a step does not matter, and a step
        without a plan is nothing."""
        _, worker = halves(recorded.llm)
        worker.get_transfer_results(set())
        worker.wait_for_save()
        worker.start_load_kv(None)
        empty = PlanEnvelope(plan_free := _empty_plan())
        worker.bind_connector_metadata(empty)
        assert (None, None) == worker.get_finished({"unknown"})
        worker.wait_for_save()
        worker.clear_connector_metadata()
        assert plan_free == empty.payload

    def test_metadata_of_another_connector_is_refused_by_type(
        self, recorded: Recorded
    ) -> None:
        """S1-10, S1-11: the fence reads its own argument, and names both types when
        it is not ours."""

        class Foreign(KVConnectorMetadata):
            pass

        _, worker = halves(recorded.llm)
        with pytest.raises(MessageError, match=r"PlanEnvelope.*Foreign"):
            worker.handle_preemptions(Foreign())

    def test_plan_survives_the_engines_own_pickling(self, recorded: Recorded) -> None:
        """H-12: what travels is bytes with a version; it comes back equal."""
        plans = recorded.results("build_connector_meta")
        for envelope in plans:
            assert envelope == pickle.loads(pickle.dumps(envelope))
            assert MESSAGE_VERSION == envelope.payload[0]
        assert max(len(envelope.payload) for envelope in plans) < 64 << 10


class TestStats:
    def test_every_metric_is_registered_once(self, recorded: Recorded) -> None:
        """S3-14: each declared metric is known to the engine under its own name."""
        names = {
            metric.name.removeprefix("vllm:")
            for metric in recorded.llm.get_metrics()
            if "ucm" in metric.name
        }
        declared = {name.removesuffix("_total") for name in METRICS}
        assert names <= declared
        assert {"ucm_saved_blocks", "ucm_loaded_blocks", "ucm_load_failures"} <= names


def _request(llm: Any, token_ids: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    return Request(
        request_id="probe",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=core.request_block_hasher,
    )


def _with_state(output: Any) -> Any:
    from vllm.v1.core.sched.output import KVConnectorBlockState

    output.kv_connector_block_state = KVConnectorBlockState(set(), dict, {})
    return output


def _empty_plan() -> bytes:
    from ucm.scheduler.messages import StepPlan, encode

    return encode(StepPlan(step=10**9))


def test_output_without_reports_is_taken(recorded: Recorded) -> None:
    """An engine step in which no worker had anything to tell changes nothing."""
    scheduler, _ = halves(recorded.llm)
    before = scheduler._scheduler.counts()
    scheduler.update_connector_output(KVConnectorOutput())
    assert before == scheduler._scheduler.counts()
