# SPDX-License-Identifier: Apache-2.0
"""
Holds a recorded run against the rules by which the fake host runs.

What a real engine does with a connector and what the fake host does with it must pass
alike: the order of the hooks, who may be scheduled, loaded and reported, and what the
scheduler is told of it all. Two states and their arrows, of a worker in a step and of
the scheduler between two steps::

    ready -P-> P -B-> bound -L-> loading -W-> saved -R-> R -E-> E -M-> M -C-> ready
    ready -B-> B -P-> bound      loading -R-> R' -E-> E' -M-> M' -W-> M -C-> ready

    open --plan--> planned --update--> open; planned --plan--> planned
"""

from typing import Any

from ucm.testing.host.aggregator import Aggregator
from ucm.testing.host.registrations import Registrations
from ucm.testing.host.requests import KVOutput
from ucm.testing.host.rules import Rule, require
from ucm.testing.host.trace import SCHEDULER, HookCall, HookTrace

__all__ = ["replay"]

_LETTERS = {
    "handle_preemptions": "P",
    "bind_connector_metadata": "B",
    "start_load_kv": "L",
    "wait_for_save": "W",
    "get_transfer_results": "R",
    "get_block_ids_with_load_errors": "E",
    "build_connector_worker_meta": "M",
    "clear_connector_metadata": "C",
}
_STEPS = [first + "L" + rest for first in ("PB", "BP") for rest in ("WREMC", "REMWC")]
_BEGINNINGS = {step[:end] for step in _STEPS for end in range(1, len(step) + 1)}


def replay(trace: HookTrace, *, alignment_tokens: int, num_groups: int = 1) -> None:
    """
    Hold a trace against the rules.

    Args:
        trace: Of an engine's run, from its first request on.
        alignment_tokens: Prefix lengths that end with a block of every group.
        num_groups: KV cache groups.

    Raises:
        HostAssertionError: A rule was broken, by the engine or by the connector.
    """
    sides = {one.side for one in trace.calls} - {SCHEDULER}
    replayed = _Replay(sorted(sides), alignment_tokens, num_groups)
    for at, call in enumerate(trace.calls):
        replayed.take(at, call)


class _Replay:
    def __init__(self, workers: list[str], alignment: int, num_groups: int) -> None:
        self._ranks = {side: rank for rank, side in enumerate(workers)}
        self._alignment = alignment
        self._num_groups = num_groups
        self._registrations = Registrations(len(workers))
        self._aggregator = Aggregator(len(workers))
        self._done = dict.fromkeys(workers, "")
        self._outputs: list[KVOutput] = []
        self._matched: dict[str, tuple[int, bool]] = {}
        self._loading: set[str] = set()
        self._running: set[str] = set()
        self._answers: dict[str, bool] = {}
        self._is_planned = False
        self._at = 0

    def take(self, at: int, call: HookCall) -> None:
        """Take the next call."""
        self._at = at
        if call.side != SCHEDULER:
            self._worker(call)
        else:
            getattr(self, f"_{call.hook}")(**call.told, result=call.result)

    def _insist(self, holds: object, rule: Rule, message: str, **ids: object) -> None:
        require(holds, rule, message, call=self._at, **ids)

    def _worker(self, call: HookCall) -> None:
        letter = _LETTERS[call.hook]
        done = self._done[call.side]
        if not done.endswith(letter):
            done = letter if done in _STEPS else done + letter
            self._insist(
                done in _BEGINNINGS,
                Rule.HOOK_ORDER,
                f"{call.hook} behind {done[:-1]}",
                side=call.side,
            )
            self._done[call.side] = done
        if call.hook == "get_transfer_results":
            self._report(
                call.side,
                KVOutput(
                    finished_sending=set(call.result["sent"]),
                    finished_recving=set(call.result["received"]),
                    failed_recving=set(call.result["failed"]),
                ),
            )
        elif call.hook == "get_block_ids_with_load_errors" and call.result:
            self._report(call.side, KVOutput(invalid_block_ids=set(call.result)))

    def _report(self, side: str, output: KVOutput) -> None:
        self._registrations.check(
            self._ranks[side], output, is_single_group=self._num_groups == 1
        )
        self._outputs.append(output)

    # The scheduler's hooks.

    def _on_new_request(self, request: str, result: None) -> None:
        self._insist(
            request not in self._registrations.known,
            Rule.HOOK_ORDER,
            "the id is in use",
            request=request,
        )
        self._registrations.known.add(request)
        self._answers.pop(request, None)

    def _get_num_new_matched_tokens(
        self, request: str, num_tokens: int, computed: int, result: list[Any]
    ) -> None:
        self._insist(
            request in self._registrations.known and request not in self._loading,
            Rule.HOOK_ORDER,
            "asked for a request that does not wait",
            request=request,
        )
        tokens, parks = result
        self._matched[request] = (tokens or 0), parks
        if not tokens:
            self._insist(not parks, Rule.ASYNC_NOTHING, "", request=request)
            return
        end = computed + tokens
        self._insist(
            end <= num_tokens - (not parks),
            Rule.MATCH_TOO_LONG,
            f"{end} of {num_tokens} tokens",
            request=request,
        )
        self._insist(
            end >= num_tokens - 1 or end % self._alignment == 0,
            Rule.MATCH_UNALIGNED,
            f"{end} tokens",
            request=request,
        )

    def _update_state_after_alloc(
        self,
        request: str,
        blocks: list[list[int]],
        external: int,
        result: None,
    ) -> None:
        tokens, parks = self._matched.pop(request, (0, False))
        self._insist(
            external in (0, tokens) and request not in self._loading,
            Rule.HOOK_ORDER,
            f"{external} tokens to load, of {tokens} that were offered",
            request=request,
        )
        if not external:
            return
        if parks:
            self._loading.add(request)
            new = frozenset(block for table in blocks for block in table)
            self._registrations.load_begins(request, new)
        else:
            self._registrations.loading_now.update(*blocks)

    def _build_connector_meta(
        self,
        scheduled: dict[str, int],
        new: list[str],
        resumed: list[str],
        preempted: list[str],
        finished: list[str],
        result: None,
    ) -> None:
        self._is_planned = True
        self._running -= set(preempted)
        started = set(new) | set(resumed)
        self._insist(
            not started & self._running and started <= set(scheduled),
            Rule.HOOK_ORDER,
            f"{sorted(started)} start, {sorted(self._running)} run",
        )
        self._running |= started
        self._insist(
            set(scheduled) <= self._running,
            Rule.HOOK_ORDER,
            f"{sorted(scheduled)} are scheduled, {sorted(self._running)} run",
        )
        self._insist(
            set(finished) <= set(self._answers) | self._registrations.known,
            Rule.HOOK_ORDER,
            f"{finished} are told as finished",
        )

    def _request_finished_all_groups(self, request: str, *, result: bool) -> None:
        if request in self._answers:
            self._insist(
                result == self._answers[request],
                Rule.FINISHED_CHANGED,
                f"{result} now",
                request=request,
            )
            return
        self._insist(
            request in self._registrations.known,
            Rule.HOOK_ORDER,
            "finished before it came",
            request=request,
        )
        self._answers[request] = result
        self._running.discard(request)
        self._matched.pop(request, None)
        if result:
            self._registrations.free_delayed(request)
        elif request not in self._loading:
            self._leave(request)

    def _update_connector_output(
        self,
        sent: list[str],
        received: list[str],
        failed: list[str],
        blocks: list[int],
        result: None,
    ) -> None:
        self._insist(self._is_planned, Rule.HOOK_ORDER, "news without a step")
        told = self._aggregator.aggregate(self._outputs)
        self._outputs.clear()
        self._registrations.loading_now.clear()
        expected = (
            sorted(told.finished_sending or ()),
            sorted(told.finished_recving or ()),
            sorted(told.failed_recving),
            sorted(told.invalid_block_ids),
        )
        self._insist(
            expected == (sent, received, failed, blocks),
            Rule.HOOK_ORDER,
            f"the ranks told {expected}, the scheduler heard of "
            f"{(sent, received, failed, blocks)}",
        )
        for name in received:
            self._loading.discard(name)
            self._registrations.ended(name)
            if name in self._answers:
                self._leave(name)
        for name in sent:
            self._leave(name)

    def _leave(self, request: str) -> None:
        self._loading.discard(request)
        self._registrations.known.discard(request)
        self._registrations.ended(request)
