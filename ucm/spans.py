# SPDX-License-Identifier: Apache-2.0
"""
Spans of tickets in the host's OpenTelemetry trace, if it records one.

The host has its provider and exporter; nothing of them is chosen or changed here, and a
process in which nobody has imported OpenTelemetry does not pay for it. A span is made when
its ticket is over, with the times that were taken on its way.

What a client sends as ``traceparent`` is not trusted: it counts if it has the form of W3C.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["tell_spans", "trace_id_of", "traceparent_in"]

_HEADER: Final = "traceparent"
_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}"
)
_NS: Final = 1e9


def traceparent_in(headers: object) -> str:
    """Return the ``traceparent`` among a request's headers; empty if there is none."""
    given = headers.get(_HEADER) if isinstance(headers, Mapping) else None
    return given if isinstance(given, str) and _FORM.fullmatch(given) else ""


def trace_id_of(traceparent: str) -> str:
    """Return the id of the trace; empty without one."""
    found = _FORM.fullmatch(traceparent)
    return found[1] if found else ""


def tell_spans(
    name: str,
    traceparent: str,
    *,
    began_s: float,
    total_s: float,
    edges: Iterable[tuple[str, float, float]],
    attributes: Mapping[str, str | int],
) -> None:
    """
    Add a span and one for each stage to a trace, if the host records it.

    What the host's own processors raise ends here: the SDK does not catch it.

    Args:
        name: Of the span.
        traceparent: Of the request; its span is the parent.
        began_s: When it began, as unix time.
        total_s: How long it took.
        edges: Stages; begin and end in seconds after *began_s*.
        attributes: Of the span.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return
    start = int(began_s * _NS)

    def at(seconds: float) -> int:
        return start + int(seconds * _NS)

    with contextlib.suppress(Exception):
        context = _context(traceparent)
        tracer = api.get_tracer("ucm")
        span = tracer.start_span(
            name, context=context, start_time=start, attributes=dict(attributes)
        )
        if span.is_recording():
            inside = api.set_span_in_context(span)
            for stage, begin, end in edges:
                child = tracer.start_span(stage, context=inside, start_time=at(begin))
                child.end(end_time=at(end))
        span.end(end_time=at(total_s))


def _context(traceparent: str) -> Any:  # noqa: ANN401 - OpenTelemetry's Context
    # The host has the package; and only one that has it comes here.
    from opentelemetry.trace.propagation import tracecontext

    propagator = tracecontext.TraceContextTextMapPropagator()
    return propagator.extract({_HEADER: traceparent})
