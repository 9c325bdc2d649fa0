# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's wrapper, of both generations, over the connector as it is."""

import functools
import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.integration.vllm.host_kit import world
from tests.integration.vllm_ascend.wrappers import (
    API,
    FIRST,
    PRESENT,
    forwarded,
    wrapper_class,
)
from tests.testing.host_kit import BUSY, ONE_FULL, missing
from ucm.errors import StoreUnavailableError
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.testing.faults import Fault, FaultPlan, raising
from ucm.testing.host import HostSettings

RELEASES = list(API)
HOOKS = [(version, name) for version in RELEASES for name in forwarded(version)]


class Recorder(UCMConnector):
    """Ours, whose hooks only note how they were called."""

    def __init__(self, *given: object) -> None:
        self.given = given
        self.calls: list[tuple[str, tuple[object, ...]]] = []


def note(hook: str):
    """Return a hook that notes its arguments and answers with its name."""

    def noted(self: Recorder, *args: object) -> str:
        self.calls.append((hook, args))
        return f"answer of {hook}"

    return noted


for _name in {hook for version in RELEASES for _, hook in forwarded(version).values()}:
    if not inspect.ismethod(getattr(UCMConnector, _name)):
        setattr(Recorder, _name, note(_name))


def a_config(transfer: object = object()):
    """Return what a wrapper looks at of a ``VllmConfig``."""
    return SimpleNamespace(kv_transfer_config=transfer)


class TestConstruction:
    @pytest.mark.parametrize(("version", "number"), [(FIRST, 2), (PRESENT, 3)])
    def test_wrapper_gives_two_arguments_or_three(self, version, number):
        """S3-01: the first generation gives no KV cache configuration, the present
        does."""
        wrapper = wrapper_class(version, Recorder)
        made = wrapper(a_config(), KVConnectorRole.WORKER, object())
        assert number == len(made._ucm_engine.given)

    @pytest.mark.parametrize("role", list(KVConnectorRole))
    def test_ours_does_nothing_under_the_first_generation(self, role):
        """S3-01: without a KV cache configuration ours constructs, and every hook of
        that wrapper answers as if there were nothing to save or load."""
        made = wrapper_class(FIRST, UCMConnector)(a_config(), role, object())
        request = SimpleNamespace(request_id="r")
        assert (0, False) == made.get_num_new_matched_tokens(request, 0)
        assert (False, None) == made.request_finished(request, [1])
        assert set() == made.get_block_ids_with_load_errors()
        metadata = made.build_connector_meta(SimpleNamespace())
        made.bind_connector_metadata(metadata)
        made.start_load_kv(SimpleNamespace(attn_metadata=None))
        made.wait_for_layer_load("layer")
        made.save_kv_layer("layer", None, None)
        made.wait_for_save()
        made.clear_connector_metadata()
        assert not made.has_connector_metadata()

    def test_missing_transfer_config_is_an_error_of_its_name(self):
        """S3-05: a construction without ``kv_transfer_config`` says what is missing."""
        with pytest.raises(ValueError, match="kv_transfer_config"):
            UCMConnector(a_config(None), KVConnectorRole.WORKER, object())


class TestHooks:
    @pytest.mark.parametrize(("version", "name"), HOOKS)
    def test_hook_reaches_ours_and_its_answer_comes_back(self, version, name):
        """S3-02, S3-03: through the wrapper of any release a hook does what it does
        when it is called directly."""
        kind, hook = forwarded(version)[name]
        assert hook in UCMConnector.__dict__
        wrapper = wrapper_class(version, Recorder)
        made = wrapper(a_config(), KVConnectorRole.WORKER, object())
        direct = Recorder()
        number = len(inspect.signature(getattr(UCMConnector, hook)).parameters) - 1
        if inspect.ismethod(getattr(UCMConnector, hook)):
            answers = [
                repr(type(getattr(owner, name)(*args)))
                for owner in (wrapper, UCMConnector)
                for args in [CLASS_ARGUMENTS[hook]]
            ]
            assert answers[0] == answers[1]
            return
        args = tuple(f"argument {at}" for at in range(min(number, 3)))
        assert getattr(direct, hook)(*args) == getattr(made, name)(*args)
        assert direct.calls == made._ucm_engine.calls, kind


def _metric_types() -> dict[type, Any]:
    """Return prometheus_client's, in no registry."""
    from prometheus_client import Counter as PromCounter
    from prometheus_client import Gauge, Histogram

    types = PromCounter, Gauge, Histogram
    return {each: functools.partial(each, registry=None) for each in types}


CLASS_ARGUMENTS = {
    "build_kv_connector_stats": (None,),
    "build_prom_metrics": (a_config(), _metric_types(), ["engine"], {0: ["0"]}),
}


class TestRuns:
    @pytest.mark.slow
    @pytest.mark.parametrize("version", [PRESENT, RELEASES[-1]])
    def test_cold_then_warm_through_the_wrapper(self, version):
        """S3-02, S3-10: saves, loads, preemptions and delayed frees through the
        wrapper break no rule of the host, over many lives."""
        seen: Counter[str] = Counter()
        settings = HostSettings(odds=BUSY)
        with world(
            7, ONE_FULL, settings=settings, wrap=around(version), is_whole=True
        ) as it:
            it.run(600)
            seen += it.host.seen
        assert set() == missing(seen, {"load", "deferred", "preempted"})

    @pytest.mark.slow
    def test_failed_load_is_told_by_blocks(self):
        """S3-09, S1-25: the wrapper asks ``get_finished`` alone; loads that fail are
        told by their blocks, once, and are computed."""
        error = StoreUnavailableError("planned")
        faults = [Fault("read", raising(error), nth) for nth in range(3, 60, 7)]
        with world(
            8,
            ONE_FULL,
            settings=HostSettings(odds=BUSY),
            plan=FaultPlan(*faults),
            wrap=around(PRESENT),
            is_whole=True,
        ) as it:
            it.run(600)
            seen = it.host.seen
        assert set() == missing(seen, {"load", "blocks_failed"})
        assert 0 == seen["load_failed"]


def around(version: str):
    """Return what puts a release's wrapper around a connector that exists."""

    def wrap(connector: UCMConnector) -> object:
        wrapper = wrapper_class(version, lambda *_: connector)
        config = SimpleNamespace(kv_transfer_config=object())
        return wrapper(config, connector.role, object())

    return wrap
