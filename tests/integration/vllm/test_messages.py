# SPDX-License-Identifier: Apache-2.0
"""Our messages in the engine's envelopes."""

import pickle
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucm.errors import MessageError
from ucm.integration.vllm import messages
from ucm.integration.vllm.messages import (
    PlanEnvelope,
    RankHandshake,
    ReportEnvelope,
    may_greet,
    plan_in,
)
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.scheduler.messages import StepPlan, StepReport, decode_report, encode


class ForeignReport(KVConnectorWorkerMetadata):
    """Another connector's report."""

    def aggregate(self, other):
        """Take anything."""
        return self


class TestPlan:
    def test_plan_comes_out_as_it_went_in(self):
        """A plan survives its envelope, also through the engine's own pickling."""
        plan = StepPlan(step=3, fences=(7,))
        envelope = PlanEnvelope(encode(plan))
        assert plan == plan_in(envelope)
        assert plan == plan_in(pickle.loads(pickle.dumps(envelope)))

    @pytest.mark.parametrize("given", [None, object(), KVConnectorMetadata()])
    def test_foreign_metadata_is_refused_by_both_types(self, given):
        """S1-10: what is no envelope of ours names both types instead of passing as
        an empty plan."""
        with pytest.raises(MessageError, match="PlanEnvelope") as caught:
            plan_in(given)
        assert type(given).__name__ in str(caught.value)

    @pytest.mark.parametrize("payload", [b"", b"\xff", b"\1broken"])
    def test_damaged_plan_is_refused(self, payload):
        """Bytes of another version, or none, are no plan."""
        with pytest.raises(MessageError):
            plan_in(PlanEnvelope(payload))


class TestReports:
    def test_reports_of_ranks_are_put_in_a_row(self):
        """Aggregating keeps each rank's report, in order, and changes no operand."""
        reports = [StepReport(rank=rank, released=(rank,)) for rank in range(3)]
        first, *others = (ReportEnvelope((encode(report),)) for report in reports)
        joined = first
        for other in others:
            joined = joined.aggregate(other)
        assert reports == [decode_report(payload) for payload in joined.payloads]
        assert 1 == len(first.payloads)

    def test_foreign_report_is_refused(self):
        """Another connector's report does not join ours; both types are named."""
        with pytest.raises(MessageError, match="ForeignReport cannot join ReportEnv"):
            ReportEnvelope(()).aggregate(ForeignReport())

    def test_handshake_survives_the_engines_pickling(self):
        """The engine passes handshakes between its processes as they are."""
        handshake = RankHandshake(b"any bytes")
        assert handshake == pickle.loads(pickle.dumps(handshake))


class Silent:
    """Another connector, as far as it is looked at: it has no handshake."""

    get_handshake_metadata = KVConnectorBase_V1.get_handshake_metadata


class Greeter:
    """Another connector, which has one."""

    def get_handshake_metadata(self) -> None:
        """Return it, or what it wraps has."""


class TestGreeting:
    def test_other_handshakes_go_before_ours(self, monkeypatch):
        """S1-19: the engine passes the first child's handshake on to all, and who has one of
        its own does not start with ours, nor, in stages, who has none; nobody else keeps ours
        from its scheduler."""
        own, other = (object.__new__(UCMConnector) for _ in range(2))
        wrapper = Greeter()
        wrapper._ucm_engine = own
        one, two = (
            SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=n))
            for n in (1, 2)
        )
        assert may_greet(own, two)  # in no engine
        monkeypatch.setattr(messages, "has_kv_transfer_group", lambda: True)
        for group, expected in (
            (own, (True, True)),
            (wrapper, (True, True)),
            (SimpleNamespace(_connectors=[own, Silent()]), (True, False)),
            (SimpleNamespace(_connectors=[other, own]), (True, True)),
            (SimpleNamespace(_connectors=[wrapper, other]), (True, True)),
            (SimpleNamespace(_connectors=[own, Greeter()]), (False, False)),
            (SimpleNamespace(_connectors=[Greeter(), own]), (False, False)),
        ):
            monkeypatch.setattr(messages, "get_kv_transfer_group", lambda it=group: it)
            assert expected == (may_greet(own, one), may_greet(own, two)), group
