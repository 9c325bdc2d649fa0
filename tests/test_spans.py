# SPDX-License-Identifier: Apache-2.0
"""Tickets of a traced request are spans in the host's trace, and nowhere else."""

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.rig import order, running
from ucm.pipeline.tickets import Direction
from ucm.spans import tell_spans, trace_id_of, traceparent_in

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STAGES = ["event_wait", "gather", "transfer", "commit"]


@pytest.fixture
def exported(monkeypatch):
    """Return what a host that records spans would export."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


class Broken(SpanProcessor):
    """A processor that raises whenever a span begins."""

    def on_start(self, span, parent_context=None):
        """Raise."""
        raise RuntimeError


def save(rig, traceparent):
    """Save a block in the engine's step 5 for a request with this trace."""
    rig.runtime.begin_step(5, {1: traceparent} if traceparent else {})
    rig.submit(order(1, Direction.SAVE, range(1), range(1, 2)))
    rig.settle()


class TestHeader:
    def test_header_is_found(self):
        """The form is that of W3C; later versions of it have the same parts."""
        assert TRACEPARENT == traceparent_in({"traceparent": TRACEPARENT})
        assert TRACE_ID == trace_id_of(TRACEPARENT)

    @pytest.mark.parametrize(
        "headers",
        [
            None,
            {},
            "traceparent",
            [TRACEPARENT],
            {"traceparent": None},
            {"traceparent": 7},
            {"traceparent": ""},
            {"traceparent": f"{TRACEPARENT}\n"},
            {"traceparent": f"ff{TRACEPARENT[2:]}"},
            {"traceparent": TRACEPARENT.upper()},
            {"traceparent": f"00-{'0' * 32}-{PARENT_ID}-01"},
            {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}"},
            {"traceparent": TRACEPARENT + "x" * 100000},
        ],
    )
    def test_anything_else_counts_as_none(self, headers):
        """It comes from a client, goes into messages and logs, and is not trusted."""
        assert "" == traceparent_in(headers)

    def test_no_trace_has_no_id(self):
        """A request without a trace is told of without one."""
        assert "" == trace_id_of("")


class TestSpans:
    def test_ticket_joins_the_requests_trace_with_its_stages(self, exported):
        """The span is a child of the request's, its stages are its children, one behind
        the other, and all is within the ticket's time."""
        with running() as rig:
            save(rig, TRACEPARENT)
        spans = {span.name: span for span in exported.get_finished_spans()}
        whole = spans.pop("ucm.save")
        assert STAGES == list(spans)
        assert TRACE_ID == f"{whole.context.trace_id:032x}"
        assert PARENT_ID == f"{whole.parent.span_id:016x}"
        assert {whole.context.span_id} == {
            each.parent.span_id for each in spans.values()
        }
        assert ("committed", "", 1) == (
            whole.attributes["ucm.outcome"],
            whole.attributes["ucm.reason"],
            whole.attributes["ucm.ticket"],
        )
        times = [
            at for each in spans.values() for at in (each.start_time, each.end_time)
        ]
        assert sorted(times) == times
        assert whole.start_time <= times[0]
        assert times[-1] <= whole.end_time + 1000  # rounded to a microsecond

    def test_request_without_a_trace_has_no_span(self, exported):
        """A host that records is not given spans of requests that nobody follows."""
        with running() as rig:
            save(rig, "")
        assert () == exported.get_finished_spans()

    def test_trace_that_is_not_sampled_has_no_span(self, exported):
        """The host has decided that this request is not recorded."""
        with running() as rig:
            save(rig, f"{TRACEPARENT[:-2]}00")
        assert () == exported.get_finished_spans()

    def test_host_that_records_nothing_is_left_as_it_is(self):
        """No provider is chosen for it."""
        before = trace.get_tracer_provider()
        with running() as rig:
            save(rig, TRACEPARENT)
        (line,) = [e for e in rig.tracer.events if "ticket.settled" == e["event"]]
        assert (TRACE_ID, 5) == (line["trace_id"], line["step"])
        assert before is trace.get_tracer_provider()

    def test_processor_that_raises_is_the_hosts_own_matter(self, monkeypatch):
        """The SDK lets through what a processor of the host's raises at a span's start; the
        load fails as it would without, and others go on."""
        provider = TracerProvider()
        provider.add_span_processor(Broken())
        monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
        with running() as rig:
            rig.runtime.begin_step(5, {1: TRACEPARENT})
            rig.submit(order(1, Direction.LOAD, [1], [1]))
            assert "evicted" == rig.settle()[1].reason
            rig.submit(order(2, Direction.LOAD, [2], [2]))
            assert "evicted" == rig.settle()[2].reason
            assert "" == rig.runtime.failure

    def test_process_without_opentelemetry_pays_nothing(self, monkeypatch):
        """What the host has not imported is not imported for it."""
        ours = [name for name in sys.modules if name.startswith("opentelemetry")]
        for name in ours:
            monkeypatch.delitem(sys.modules, name)
        tell_spans(
            "ucm.save", TRACEPARENT, began_s=1.0, total_s=1.0, edges=(), attributes={}
        )
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
