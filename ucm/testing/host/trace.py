# SPDX-License-Identifier: Apache-2.0
"""
What an engine asked of a connector, call by call, in a form that can be kept.

A trace is taken in a process that has both sides of the connector. ``replay`` in
``ucm.testing.host.replay`` holds it against the rules.
"""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import attrs

__all__ = ["SCHEDULER", "HookCall", "HookTrace"]

SCHEDULER = "scheduler"
"""The side of a scheduler's call; a worker's is ``worker-`` and its rank."""
_Values = dict[str, Any]


@attrs.frozen
class HookCall:
    """
    One call.

    Args:
        side: Whose hook.
        hook: Its name.
        told: What of the arguments matters.
        result: What of the answer matters.
    """

    side: str
    hook: str
    told: _Values
    result: Any = None


class HookTrace:
    """All calls, in order."""

    def __init__(self, calls: Iterable[HookCall] = ()) -> None:
        self.calls = list(calls)

    def watch(self, target: object, side: str) -> None:
        """Record all calls of a side's hooks from now on, those that it has."""
        hooks = _SCHEDULER_HOOKS if side == SCHEDULER else _WORKER_HOOKS
        for hook in hooks:
            inner = getattr(target, hook, None)
            if inner is not None:
                setattr(target, hook, self._recorded(side, hook, inner, hooks[hook]))

    def to_json(self) -> str:
        """Return the trace as text, one line per call."""
        lines = (
            json.dumps([one.side, one.hook, one.told, one.result], sort_keys=True)
            for one in self.calls
        )
        return "[\n" + ",\n".join(lines) + "\n]\n"

    @classmethod
    def from_json(cls, text: str) -> "HookTrace":
        """Read what ``to_json`` wrote."""
        return cls(HookCall(*one) for one in json.loads(text))

    def _recorded(
        self,
        side: str,
        hook: str,
        inner: Callable[..., Any],
        describe: Callable[..., _Values],
    ) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it takes
            told = describe(*args)
            result = inner(*args, **kwargs)
            told_result = _RESULTS.get(hook, _no_result)(result)
            self.calls.append(HookCall(side, hook, told, told_result))
            return result

        return call


def _request(request: Any, *_: object) -> _Values:  # noqa: ANN401 - an engine's own
    return {"request": request.request_id}


def _match(request: Any, computed: int) -> _Values:  # noqa: ANN401
    return {
        "request": request.request_id,
        "num_tokens": request.num_tokens,
        "computed": computed,
    }


def _allocated(request: Any, blocks: Any, external: int) -> _Values:  # noqa: ANN401
    return {
        "request": request.request_id,
        "blocks": [list(table) for table in blocks.get_block_ids()],
        "external": external,
    }


def _plan(output: Any) -> _Values:  # noqa: ANN401
    return {
        "scheduled": dict(output.num_scheduled_tokens),
        "new": [one.req_id for one in output.scheduled_new_reqs],
        "resumed": sorted(output.scheduled_cached_reqs.resumed_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
    }


def _output(output: Any) -> _Values:  # noqa: ANN401
    return {
        "sent": sorted(output.finished_sending or ()),
        "received": sorted(output.finished_recving or ()),
        "failed": sorted(output.failed_recving or ()),
        "blocks": sorted(output.invalid_block_ids or ()),
    }


def _results(results: Any) -> _Values:  # noqa: ANN401
    return {
        "sent": sorted(results.finished_sending or ()),
        "received": sorted(results.finished_recving or ()),
        "failed": sorted(results.failed_recving or ()),
    }


def _finished_ids(names: Iterable[str]) -> _Values:
    return {"finished": sorted(names)}


def _nothing(*_: object) -> _Values:
    return {}


def _no_result(_: object) -> None:
    return None


_SCHEDULER_HOOKS: dict[str, Callable[..., _Values]] = {
    "on_new_request": _request,
    "get_num_new_matched_tokens": _match,
    "update_state_after_alloc": _allocated,
    "build_connector_meta": _plan,
    "request_finished_all_groups": _request,
    "update_connector_output": _output,
}
_WORKER_HOOKS: dict[str, Callable[..., _Values]] = {
    "handle_preemptions": _nothing,
    "bind_connector_metadata": _nothing,
    "start_load_kv": _nothing,
    "wait_for_save": _nothing,
    "get_transfer_results": _finished_ids,
    "get_block_ids_with_load_errors": _nothing,
    "build_connector_worker_meta": _nothing,
    "clear_connector_metadata": _nothing,
}
_RESULTS: dict[str, Callable[[Any], Any]] = {
    "get_num_new_matched_tokens": list,
    "request_finished_all_groups": lambda answer: answer[0],
    "get_transfer_results": _results,
    "get_block_ids_with_load_errors": sorted,
}
