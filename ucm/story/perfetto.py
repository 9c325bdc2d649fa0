# SPDX-License-Identifier: Apache-2.0
"""A drawing in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""

from collections.abc import Iterator

from ucm.story.drawing import Bar, Drawing

__all__ = ["events_of"]

_Event = dict[str, object]


def events_of(drawing: Drawing) -> dict[str, object]:
    """
    Return the document: a lane is a process, a row of bars a thread.

    A bar, and each of its stages below it, is a complete event (``X``). Stages of one
    ticket that overlap, as layer-wise ones do, are given threads of their own, because
    events of one thread must nest.
    """
    events: list[_Event] = []
    for pid, lane in enumerate(drawing.lanes, 1):
        name = f"{lane.process} {lane.kind}".strip()
        of_lane = {"pid": pid, "tid": 0, "args": {"name": name}}
        events.append({"ph": "M", "name": "process_name", **of_lane})
        most = 1 + max(len(_nested(bar)) for bar in lane.bars)
        for bar in lane.bars:
            events.extend(_of_bar(bar, lane.kind, pid, bar.row * most))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_s": drawing.began_s, "notes": list(drawing.notes)},
    }


def _of_bar(bar: Bar, kind: str, pid: int, first_tid: int) -> Iterator[_Event]:
    args = {name or f"note {at}": text for at, (name, text) in enumerate(bar.facts)}
    whole = (bar.name, 0.0, bar.end_s - bar.begin_s)
    yield _event(bar, whole, kind, pid, first_tid) | {"args": args}
    for at, stages in enumerate(_nested(bar)):
        for stage in stages:
            tid = first_tid + at
            yield _event(bar, stage, kind, pid, tid)


def _nested(bar: Bar) -> list[list[tuple[str, float, float]]]:
    """Return the stages in lists of which none has two that overlap."""
    found: list[list[tuple[str, float, float]]] = []
    for stage in sorted(bar.stages, key=lambda stage: stage[1]):
        for stages in found:
            if stages[-1][2] <= stage[1]:
                stages.append(stage)
                break
        else:
            found.append([stage])
    return found


def _event(
    bar: Bar, stage: tuple[str, float, float], kind: str, pid: int, tid: int
) -> _Event:
    name, begin, end = stage
    return {
        "ph": "X",
        "name": name,
        "cat": f"{kind},{bar.outcome}",
        "ts": round((bar.begin_s + begin) * 1e6, 3),
        "dur": round(max(0.0, end - begin) * 1e6, 3),
        "pid": pid,
        "tid": tid,
    }
