# SPDX-License-Identifier: Apache-2.0
"""
What the scheduler makes of a step's results, in the order of ``update_from_output``.

Failed loads, then new tokens and finished requests, then the connector's own news, then
received and sent requests. So ``request_finished`` of a step comes before
``update_connector_output``.
"""

from collections import Counter

from ucm.layout import KVLayout
from ucm.testing.host.choices import Choices
from ucm.testing.host.invalid import BlockUser, recover
from ucm.testing.host.requests import KVOutput, Request, Status
from ucm.testing.host.rules import Rule, require
from ucm.testing.host.scheduler import FakeScheduler
from ucm.testing.host.settings import HostSettings
from ucm.testing.host.steps import Step

__all__ = ["Results"]


class Results:
    """
    Takes results in.

    Args:
        scheduler: Whose requests they are about.
        layout: The engine's groups.
        choices: Decide when a request has said enough.
        settings: The engine.
        seen: Counts what happens.
    """

    def __init__(
        self,
        scheduler: FakeScheduler,
        layout: KVLayout,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self._choices = choices
        self._settings = settings
        self._seen = seen

    def process(self, step: Step, output: KVOutput) -> None:
        """Take in the results of a step."""
        scheduler = self._scheduler
        scheduler.processed = step.number
        while scheduler.late_frees and scheduler.late_frees[0][0] <= step.number:
            for block in scheduler.late_frees.popleft()[1]:
                scheduler.pool.free(block)
        scheduler.loads.step_ended(step.number)
        failed = self._fail_loads(output.failed_recving)
        failed += self._fail_blocks(output.invalid_block_ids, step)
        for request, tokens in step.scheduled:
            request.in_flight_tokens -= tokens
        for request in step.generates:
            request.placeholders -= 1
            if not request.is_finished() and request not in failed:
                self._generate(request)
        if not self._settings.recomputes:
            for request in failed:
                self._seen["failed"] += 1
                scheduler.finish(request)
        if step.scheduled or not output.is_empty:
            scheduler.hooks.update_connector_output(output)
        self._receive(output)

    def _generate(self, request: Request) -> None:
        request.grow(1)
        enough = request.num_output_tokens >= request.max_tokens
        if enough or self._choices.chance("stop", self._settings.odds.stop_early):
            self._seen["finished"] += 1
            self._scheduler.finish(request)

    def _fail_loads(self, names: set[str]) -> list[Request]:
        failed = []
        for name in sorted(names):
            request = self._scheduler.requests.get(name)
            if request is None or request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            self._seen["load_failed"] += 1
            if self._settings.recomputes:
                request.num_computed_tokens = request.valid_tokens = 0
                self._scheduler.failed.add(name)
            else:
                failed.append(request)
        return failed

    def _fail_blocks(self, blocks: set[int], step: Step) -> list[Request]:
        """Cut requests at their first failed block; each block is recomputed once."""
        if not blocks:
            return []
        scheduled = dict(step.scheduled)
        waiting = [
            request
            for request in self._scheduler.holding
            if request.status is Status.WAITING_FOR_REMOTE_KVS
        ]
        running = list(self._scheduler.running)
        recovery = recover(
            self._layout.groups[:1],  # engines tell blocks of one group only
            [
                BlockUser(
                    request_id=request.request_id,
                    tables=request.tables[:1],
                    computed_tokens=request.num_computed_tokens,
                    cached_tokens=request.num_computed_tokens
                    - scheduled.get(request, 0),
                )
                for request in (*waiting, *running)
            ],
            {(0, block) for block in blocks},
        )
        for cut in recovery.cuts:
            self._cut(self._scheduler.requests[cut.request_id], cut.computed_tokens)
        cuts = {cut.request_id for cut in recovery.cuts}
        self._scheduler.failed.update(
            cuts.intersection(request.request_id for request in waiting)
        )
        return [request for request in running if request.request_id in cuts]

    def _cut(self, request: Request, tokens: int) -> None:
        """Let a request go on from its first tokens."""
        self._seen["blocks_failed"] += 1
        request.num_computed_tokens = request.valid_tokens = tokens
        size = self._layout.groups[0].block_tokens
        request.cached[0] = min(request.cached[0], tokens // size)

    def _receive(self, output: KVOutput) -> None:
        scheduler = self._scheduler
        for name in sorted(output.finished_recving or ()):
            request = self._known(name, "finished_recving")
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                scheduler.received.add(name)
                scheduler.registrations.ended(name)
            else:
                self._seen["received_late"] += 1
                scheduler.leave(request)
        for name in sorted(output.finished_sending or ()):
            self._seen["freed_later"] += 1
            scheduler.leave(self._known(name, "finished_sending"))

    def _known(self, name: str, what: str) -> Request:
        request = self._scheduler.requests.get(name)
        require(
            request is not None,
            Rule.REPORT_UNKNOWN,
            f"{what}, but its blocks are free already",
            request=name,
        )
        assert request is not None  # said before
        return request
