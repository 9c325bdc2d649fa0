# SPDX-License-Identifier: Apache-2.0
"""
The engine's scheduler, after ``vllm.v1.core.sched.scheduler`` of vLLM 0.33.

States and arrows of a request::

    waiting, preempted --match, async--> loading --received--> waiting, preempted
    waiting, preempted --blocks--> running --preempted--> preempted
    (any) --finished--> finished --blocks free--> (gone)

A failed load frees its blocks, and the request is matched again in the same step. A
request that finishes while it loads keeps its blocks until the load is reported, unless
it was not ordered yet.
"""

from collections import Counter, deque

from ucm.layout import GroupKind, KVLayout
from ucm.testing.host.choices import Choices
from ucm.testing.host.hooks import SchedulerHooks
from ucm.testing.host.loads import Loads
from ucm.testing.host.overwriting import Overwriting
from ucm.testing.host.pool import BlockPool
from ucm.testing.host.questions import Questions
from ucm.testing.host.registrations import Registrations
from ucm.testing.host.requests import (
    BlockState,
    Request,
    Status,
)
from ucm.testing.host.settings import HostSettings
from ucm.testing.host.steps import Draft, Scheduled, Step, plan_passes
from ucm.testing.host.tables import KVTables, LocalHit, written_blocks

__all__ = ["FakeScheduler"]


class FakeScheduler:
    """
    Decides who runs, who loads and who is thrown out.

    Args:
        hooks: The connector's side.
        layout: The engine's groups.
        num_blocks: Blocks in memory.
        num_ranks: Workers.
        choices: Takes the decisions.
        settings: The engine.
        seen: Counts what happens.
    """

    def __init__(
        self,
        hooks: SchedulerHooks,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_ranks: int,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
    ) -> None:
        self.hooks = hooks
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.holding: list[Request] = []
        self.registrations = Registrations(num_ranks)
        self.pool = BlockPool(num_blocks)
        self.tables = KVTables(layout, self.pool, seen, caches=settings.local_cache)
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.is_halted = False
        self.steps = 0
        self.processed = 0
        self._states = [
            (at, group)
            for at, group in enumerate(layout.groups)
            if group.kind is GroupKind.STATE
        ]
        self._questions = Questions(hooks, layout, choices, settings, seen)
        self.loads = Loads(self._questions, self.registrations, choices, settings, seen)
        self._layout = layout
        self._choices = choices
        self._settings = settings
        self._seen = seen
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self.late_frees: deque[tuple[int, list[int]]] = deque()
        self._overwriting = Overwriting(layout, self.tables, choices, settings, seen)

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "requests": len(self.requests),
            "running": len(self.running),
            "waiting": len(self.waiting),
            "holding": len(self.holding),
            "received": len(self.received),
            "failed": len(self.failed),
            "late_frees": len(self.late_frees),
            "late_loads": len(self.loads),
            "used_blocks": self.pool.num_used,
            **self.registrations.counts(),
        }

    def has_requests(self) -> bool:
        """Return whether a step is to be taken for somebody, or for the connector."""
        queued = len(self.running) + len(self.waiting) + len(self.holding)
        some = len(self.requests) - queued * self.is_halted  # some keep their blocks
        if some or self._finished_ids:
            return True
        asks = getattr(self.hooks, "has_pending_push_work", bool)  # since vLLM 0.24
        self._seen["kept_awake"] += (keeps := asks())
        return keeps

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Take a request whose id is free."""
        self.requests[request.request_id] = request
        self.registrations.known.add(request.request_id)
        self.waiting.append(request)
        self.hooks.on_new_request(request)

    def finish(self, request: Request, how: Status = Status.FINISHED) -> None:
        """End a request, in whatever state it is."""
        delayed = False
        name = request.request_id
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            delayed = not self.loads.drop(request) and name not in self.received
            self.received.discard(name)
            self.failed.discard(name)
        for queue in (self.running, self.waiting, self.holding):
            if request in queue:
                queue.remove(request)
        request.status = how
        processed = request.num_computed_tokens - request.in_flight_tokens
        self.tables.slide(request, max(0, processed))
        keeps = self._questions.keeps(request)
        if keeps:
            self.registrations.free_delayed(name)
        self._seen["deferred" if keeps else "free_now"] += 1
        self._finished_ids.add(name)
        if not delayed and not keeps:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Free a finished request's blocks and forget it."""
        name = request.request_id
        self._free(request)
        del self.requests[name]
        self.registrations.ended(name)
        if not self.registrations.is_open(name):
            self.registrations.known.discard(name)

    def _free(self, request: Request) -> None:
        """Free a request's blocks, once no step in flight writes them."""
        blocks = self.tables.pop(request)
        if request.last_step > self.processed:
            self.late_frees.append((self.steps, blocks))
            self._seen["late_free"] += 1
            return
        for block in blocks:
            self.pool.free(block)

    # A step.

    def schedule(self) -> Step:
        """Plan a step and let the connector add its part."""
        odds, choices = self._settings.odds, self._choices
        self.tables.newest = choices.chance("newest", odds.newest)
        budget = choices.pick("budget", self._settings.step_tokens)
        draft = Draft(0 if choices.chance("empty", odds.empty) else budget)
        if self.is_halted:
            return self._planned(Draft(0))
        self._preempt_some(draft)
        may_resume = not draft.has_preempted or choices.chance("resume", odds.resume)
        draft.has_preempted = False
        self._schedule_running(draft)
        if may_resume and not draft.has_preempted:
            self._schedule_waiting(draft)
        return self._planned(draft)

    def _preempt_some(self, draft: Draft) -> None:
        odds = self._settings.odds.preempt
        for request in self.running.copy():
            if self._choices.chance("preempt", odds) and not request.in_flight_tokens:
                self._preempt(request, draft)

    def _preempt(self, request: Request, draft: Draft) -> None:
        self._seen["preempted"] += 1
        draft.has_preempted = True
        draft.drop(request)
        self.running.remove(request)
        self._free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.valid_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted_ids.add(request.request_id)

    def _schedule_running(self, draft: Draft) -> None:
        for request in self.running.copy():
            tokens = min(request.unscheduled_tokens, draft.budget)
            if tokens <= 0 or request.status is not Status.RUNNING:
                continue
            computed = request.num_computed_tokens
            tokens = self.tables.clip(computed, tokens)
            self.tables.slide(request, computed - request.in_flight_tokens)
            blocks = self.tables.allocate(request, computed, tokens)
            while blocks is None:
                victim = self._victim(draft)
                if victim is None:
                    return
                self._seen["preempted_for_room"] += 1
                self._preempt(victim, draft)
                if victim is request:
                    return
                blocks = self.tables.allocate(request, computed, tokens)
            self.tables.cache(request, min(computed + tokens, request.num_tokens))
            told = tuple(blocks) if any(blocks) else None
            draft.add(Scheduled(request, tokens, told))

    def _victim(self, draft: Draft) -> Request | None:
        """Return who is thrown out: the last one by default, anybody by priority."""
        able = [
            each
            for each in self.running
            if not each.in_flight_tokens
            # The engine's own cache would name blocks that are never computed.
            and not (self._settings.local_cache and each.request_id in draft.entries)
        ]
        if not able:
            return None
        if self._choices.chance("last", 0.5):
            return able[-1]
        return self._choices.pick("victim", able)

    def _schedule_waiting(self, draft: Draft) -> None:
        for request in [*self.holding, *self.waiting]:
            if draft.budget <= 0:
                return
            if not self._choices.chance("admit", self._settings.odds.admit):
                continue
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self.received:
                    continue
                self._loaded(request)
            if not self._admit(request, draft):
                return

    def _loaded(self, request: Request) -> None:
        """Let a request go on whose load was reported."""
        name = request.request_id
        self.received.remove(name)
        if name in self.failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self.tables.cache(request, request.num_computed_tokens)
        self.failed.discard(name)
        if request.num_computed_tokens == request.num_tokens:
            self._seen["full_hit"] += 1
            request.num_computed_tokens -= 1
        again = request.num_preemptions > 0
        request.status = Status.PREEMPTED if again else Status.WAITING

    def _admit(self, request: Request, draft: Draft) -> bool:
        """Let a request load or run; return False when there is no room for it."""
        local: LocalHit | None = None
        external, parks, tail = 0, False, 0
        if not request.num_computed_tokens:
            local, tail = self._find_local(request)
            found = self._questions.match(request, local[1], tail)
            if found is None:
                self._seen["asked_later"] += 1
                return True
            external, parks = found
            tail = 0 if external else tail
        computed = request.num_computed_tokens + external + tail
        computed += local[1] if local else 0
        tokens = 0 if parks else min(request.num_tokens - computed, draft.budget)
        tokens = self.tables.clip(computed, tokens)
        blocks = self.tables.allocate(
            request,
            computed,
            tokens,
            local=local,
            reserved=self._reserved(request) if parks else 0,
        )
        if blocks is None:
            return False
        request.has_run = True
        if parks:
            self.loads.order(request, external, blocks, self.steps, self.processed)
        else:
            self._questions.tell_blocks(request, external)
        self._seen["local_hit"] += bool(local and local[1])
        request.num_computed_tokens = computed
        request.valid_tokens = max(request.valid_tokens, computed)
        queue = self.holding if request in self.holding else self.waiting
        queue.remove(request)
        if parks:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self.holding.append(request)
            return True
        self._run(request, tokens, draft)
        if external:
            self._seen["load_in_step"] += 1
            self.registrations.loading_now.update(*blocks)
            draft.loading.add(request.request_id)
        if tail:
            self._seen["partial_hit"] += 1
            draft.copies.append(request)
        return True

    def _run(self, request: Request, tokens: int, draft: Draft) -> None:
        resumes = request.status is Status.PREEMPTED
        self._seen["resumed" if resumes else "started"] += 1
        self._seen["resumed_at_once"] += request.request_id in self._preempted_ids
        request.status = Status.RUNNING
        self.running.append(request)
        computed = request.num_computed_tokens
        self.tables.cache(request, min(computed + tokens, request.num_tokens))
        tables = tuple(table.copy() for table in request.tables)
        draft.add(
            Scheduled(request, tokens, tables, is_new=not resumes, is_resumed=resumes)
        )

    def _reserved(self, request: Request) -> int:
        """Return the blocks that must stay free for those who wait with blocks."""
        return sum(
            self.tables.remaining(each)
            for each in [*self.holding, *self.running]
            if each is not request
        )

    def _find_local(self, request: Request) -> tuple[LocalHit, int]:
        """Return the engine's own hit, and tokens of a block behind it."""
        local = self.tables.find(request)
        if not self._settings.partial_hits or not self.tables.has_next(
            request, local[1]
        ):
            return local, 0
        size = min(group.block_tokens for group in self._layout.groups)
        most = min(size - 1, request.num_tokens - 1 - local[1])
        return local, self._choices.below("tail", most + 1)

    # The plan.

    def _planned(self, draft: Draft) -> Step:
        self.steps += 1
        output = draft.output()
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        output.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        offers = self._offers(draft)
        output.kv_connector_block_state = BlockState(
            req_ids={*draft.entries, *offers},
            resolve_block_ids=lambda name: tuple(
                table.copy() for table in self.requests[name].tables
            ),
            boundary_state_offloads=offers,
        )
        fresh = self.loads.overwritten(self.tables.take_fresh())
        fresh = self._overwriting.plan(output, fresh, self.loads.take_begun())
        metadata = self._questions.plan(output)
        output.kv_connector_block_state = None
        step = Step(
            number=self.steps,
            output=output,
            metadata=metadata,
            fresh=fresh,
            passes=plan_passes(self._layout, draft, shares=self._settings.local_cache),
            generates=[],
            scheduled=[],
        )
        for entry in draft.entries.values():
            request = entry.request
            step.scheduled.append((request, entry.tokens))
            request.num_computed_tokens += entry.tokens
            request.in_flight_tokens += entry.tokens
            request.last_step = step.number
            computed = request.num_computed_tokens
            request.valid_tokens = max(request.valid_tokens, computed)
            if computed == request.num_tokens + request.placeholders:
                request.placeholders += 1
                step.generates.append(request)
        return step

    def _offers(self, draft: Draft) -> dict[str, list[tuple[int, int, int]]]:
        """Return the states that this step completes, also those within a block."""
        for entry in draft.entries.values():
            request = entry.request
            end = request.num_computed_tokens + entry.tokens
            for at, group in self._states:
                if end % group.block_tokens and end <= request.num_tokens:
                    table = request.tables[at]
                    block = table[written_blocks(group, end - 1, end)[0]]
                    self.tables.offer(request, group, block, end)
        return self.tables.take_offers()
