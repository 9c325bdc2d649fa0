# SPDX-License-Identifier: Apache-2.0
"""
A small engine with workers, to drive the adapter the way a real one does.

It keeps what every block of its pool really holds: a request must find its whole needed
prefix whenever it runs. Fences and deferrals are compared with the tickets that the
workers have in hand.
"""

from collections import deque

from tests.kit.consistency import validate
from tests.scheduler.model import hashes_of, make_adapter
from tests.scheduler.tables import (
    Request,
    first_needed,
    missing_blocks,
    names_after,
    offers_at,
    written_blocks,
)
from tests.scheduler.workers import Ticket, Workers
from ucm.config import SaveDecoded
from ucm.layout import KVLayout
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.requests import (
    Disposition,
    RequestEnd,
    ScheduledRequest,
    StepFacts,
)


class Host(Workers):
    """The engine's scheduler, its block pool and its workers."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_ranks: int = 2,
        loads_in_step: bool = False,
        max_step_blocks: int = 1000,
        decoded: SaveDecoded = SaveDecoded.EACH_BLOCK,
        **limits: int,
    ) -> None:
        super().__init__(num_ranks)
        self.layout = layout
        self.adapter = make_adapter(
            layout,
            self.index,
            num_ranks=num_ranks,
            shards=num_ranks,
            span_blocks=3,
            max_step_blocks=max_step_blocks,
            full_hits=not loads_in_step,
            parks=not loads_in_step,
            decoded=decoded,
            **limits,
        )
        self.num_blocks = num_blocks
        self.loads_in_step = loads_in_step
        self.free = deque(range(1, num_blocks + 1))
        self.requests: dict[str, Request] = {}
        self.generations: dict[int, tuple[str, int]] = {}
        self.lives = self.looks = 0
        self.leaving: set[str] = set()
        self.over: set[tuple[str, int]] = set()
        self.now = 0.0

    # The engine.

    def add(self, request_id: str, family: str, num_tokens: int) -> None:
        """Take a request whose id is free."""
        self.requests[request_id] = Request(request_id, family, num_tokens)

    def step(
        self, *, admit: list[str], preempt: list[str], chunk: int, overwrite: int = 0
    ) -> None:
        """Schedule, plan and run one step, which overwrites some free blocks too."""
        preempted: set[str] = set()
        batch: list[tuple[Request, int]] = []
        for request_id in preempt:
            self._preempt(self.requests[request_id], preempted)
        for request in list(self.requests.values()):
            if request.state == "running":
                self._schedule(request, chunk, batch, preempted)
        for request_id in sorted(set(admit) - preempted):
            self._admit(self.requests[request_id], chunk, batch, preempted)
        told = [self._facts_of(*each) for each in batch]
        facts = StepFacts(
            scheduled=tuple(each for each in told if self._is_told(each)),
            preempted={name: self.requests[name].num_tokens - 1 for name in preempted},
            allocated=[
                block_id
                for each in told
                if not each.is_new
                for table in self.requests[each.request_id].unseen
                for block_id in table
            ],
            overwritten=frozenset(list(self.free)[:overwrite]),
            is_idle=not told,
        )
        for request, _ in batch:
            request.unseen = [[] for _ in self.layout.groups]
        self._run(facts, batch)

    def finish(self, request_id: str) -> None:
        """End a request in whatever state it is."""
        request = self.requests[request_id]
        is_held = any(
            (request_id, request.life)
            in {self.generations[at] for _, at in ticket.owners}
            for ticket in self.tickets.values()
            if ticket.is_held
        )
        end = RequestEnd(
            computed_tokens=request.computed,
            known_tokens=request.num_tokens,
            prompt_tokens=request.num_prompt,
            hashes=self._hashes(request),
            tables=request.tables,
        )
        counts, before = self.adapter.counts, self.adapter.counts()["endings"]
        answer = self.adapter.request_finished(request_id, end)
        if counts()["endings"] > before:
            self.count("left")
            self.leaving.add(request_id)
        expected = is_held or request_id in self.leaving
        assert expected == (answer is Disposition.DEFER)
        assert answer is self.adapter.request_finished(request_id, end)
        self.count(answer.value)
        if answer is Disposition.DEFER:
            assert request.state == "running"
            request.state = "deferred"
        elif request.state == "loading":
            request.state = "ended_loading"
        else:
            self._free(request)
            del self.requests[request_id]

    def _admit(
        self,
        request: Request,
        chunk: int,
        batch: list[tuple[Request, int]],
        preempted: set[str],
    ) -> None:
        if request.state == "loaded":
            self.adapter.blocks_allocated(
                request.request_id,
                request.tables,
                self._hashes(request),
                computed_tokens=request.computed,
                external_tokens=0,
            )
        else:
            request.is_new = True
            found = self._match(request)
            if found or not request.failed:
                # After a failed load the same life goes on without one.
                self.lives += 1
                request.life = self.lives
            needed = found
            if not found or self.loads_in_step:
                needed += min(chunk, request.num_tokens - found)
            if not self._allocate(request, needed):
                self._free(request)
                return
            self._slide(request, found)
            self.adapter.blocks_allocated(
                request.request_id,
                request.tables,
                self._hashes(request),
                computed_tokens=0,
                external_tokens=found,
            )
            request.failed = False
            if found:
                self.count("load")
                request.computed = found
                request.state = "loading"
                if not self.loads_in_step:
                    return
        request.state = "running"
        self._schedule(request, chunk, batch, preempted)

    def _match(self, request: Request) -> int:
        asked = (request.request_id, request.num_tokens, self._hashes(request), 0)
        before = self.adapter.counts()
        found = self.adapter.match_prefix(*asked)
        assert found == self.adapter.match_prefix(*asked)
        assert before == self.adapter.counts()
        return found.tokens

    def _schedule(
        self,
        request: Request,
        chunk: int,
        batch: list[tuple[Request, int]],
        preempted: set[str],
    ) -> None:
        count = min(chunk, request.num_tokens - request.computed)
        self._slide(request, request.computed)
        if self._allocate(request, request.computed + count):
            batch.append((request, count))
        elif request.is_new:
            request.state = "loaded"
        else:
            self._preempt(request, preempted)

    def _facts_of(self, request: Request, count: int) -> ScheduledRequest:
        is_new, request.is_new = request.is_new, False
        new = [list(table) for table in request.tables] if is_new else []
        ends = {request.computed + count} | ({request.computed} if is_new else set())
        return ScheduledRequest(
            request_id=request.request_id,
            computed_tokens=request.computed,
            end_tokens=request.computed + count,
            prompt_tokens=request.num_prompt,
            hashes=self._hashes(request),
            tables=[list(table) for table in request.tables],
            new_block_ids=new,
            is_new=is_new,
            states=offers_at(self.layout, request, ends - {0}),
        )

    def _is_told(self, facts: ScheduledRequest) -> bool:
        """Return whether a step tells of a request; at times also of one not due."""
        self.looks += 1
        due = self.adapter.due.get(facts.request_id, 0)
        must = facts.is_new or facts.states or facts.end_tokens >= due
        self.count("told" if must else "not_due")
        return bool(must) or self.looks % 5 == 0

    def _hashes(self, request: Request) -> list[bytes]:
        size = self.layout.hash_block_tokens
        return hashes_of(request.family, request.num_tokens // size)

    def _allocate(self, request: Request, tokens: int) -> bool:
        if not request.tables:
            request.tables = [[] for _ in self.layout.groups]
            request.unseen = [[] for _ in self.layout.groups]
        missing = [
            missing_blocks(group, len(request.tables[at]), tokens)
            for at, group in enumerate(self.layout.groups)
        ]
        if sum(map(sum, missing)) > len(self.free):
            return False
        for at, wanted in enumerate(missing):
            for is_real in wanted:
                block_id = self.free.popleft() if is_real else 0
                request.tables[at].append(block_id)
                request.unseen[at] += [block_id] if is_real else []
        return True

    def _slide(self, request: Request, computed: int) -> None:
        """Give back the blocks that the next token's window does not reach."""
        for at, group in enumerate(self.layout.groups):
            for i in range(first_needed(group, computed)):
                if request.tables[at][i]:
                    self.free.append(request.tables[at][i])
                    request.tables[at][i] = 0
                    self.count("recycled")

    def _preempt(self, request: Request, preempted: set[str]) -> None:
        self.count("preempted")
        preempted.add(request.request_id)
        self._free(request)
        self.lives += 1
        request.life = self.lives
        request.state = "waiting"

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.free.extend(block_id for block_id in reversed(table) if block_id)
        request.tables, request.unseen, request.computed = [], [], 0

    # One step of the workers.

    def _run(self, facts: StepFacts, batch: list[tuple[Request, int]]) -> None:
        held = {number for number, each in self.tickets.items() if each.is_held}
        plan = self.adapter.plan_step(facts)
        validate(self.adapter)
        written = written_blocks(self.layout, facts, plan.loads)
        readers = {each: set(self.tickets[each].order.block_ids) for each in held}
        torn = {each for each in held if readers[each] & facts.overwritten}
        expected = {each for each in held if readers[each] & written}
        assert torn == set(plan.overwritten)
        assert expected - torn == set(plan.fences)
        for transfer_id in (*plan.fences, *plan.overwritten):
            self.count("fenced")
            self.fence(transfer_id, plan.lost.get(transfer_id))
        self._accept(plan.loads)
        self.content.update(dict.fromkeys(facts.overwritten))
        if self.loads_in_step:
            for order in plan.loads:
                self.load_everywhere(order)
        for request, count in batch:
            self._forward(request, count)
        self._accept(plan.saves)
        for each in plan.deferred:
            assert self.requests[each.request_id].state == "deferred"
            self.over.add((each.request_id, each.generation))
            self.leaving.discard(each.request_id)
            for worker in self.ranks:
                worker.deferred.add((each.request_id, each.generation))
        if self.loads_in_step and plan.loads:
            for name in {each.request_id for each in plan.loads if each.generation % 4}:
                self.count("ended_in_step")
                self.finish(name)  # the engine hears of ends before it hears of loads
            for rank in range(len(self.ranks)):
                self.report(rank)

    def _accept(self, orders: tuple[SpanOrder, ...]) -> None:
        for order in orders:
            for owner in order.owners:
                life = owner.request_id, self.requests[owner.request_id].life
                assert life == self.generations.setdefault(owner.generation, life)
                assert owner.life not in self.over
            self.count("shared" if len(order.owners) > 1 else "own")
            assert order.transfer_id not in self.tickets
            assert 0 not in order.block_ids
            assert (12, 3)[order.kind is TransferKind.SAVE] >= len(order.block_ids)
            everyone = [set(range(len(self.ranks))) for _ in range(3)]
            self.tickets[order.transfer_id] = Ticket(order, *everyone)
            if order.kind is TransferKind.LOAD:
                self.requests[order.request_id].generation = order.generation
                for rank in self.ranks:
                    loading = rank.loading.setdefault(order.request_id, set())
                    loading.add(order.transfer_id)

    def _forward(self, request: Request, count: int) -> None:
        end = request.computed + count
        is_clean = self.prefix_is_clean(self.layout, request)
        assert is_clean or self.loads_in_step
        for at, group in enumerate(self.layout.groups):
            names = names_after(
                self.layout, group, request.family, request.computed, end
            )
            for i, name in names.items():
                content = (at, name) if is_clean and name is not None else None
                self.content[request.tables[at][i]] = content
        request.computed = end
        request.num_tokens = max(request.num_tokens, end + 1)

    # What the workers report.

    def report(self, number: int) -> None:
        """Send what a rank has to tell, and then what the engine makes of it."""
        self.adapter.apply_report(self.take_report(number))
        for request_id in self.take_received(number):
            if self.all_told("receiving", request_id, number):
                self.adapter.loads_finished({request_id})
                if request_id in self.requests:
                    self._received(self.requests[request_id])
        for request_id in self.take_sent(number):
            if self.all_told("sending", request_id, number):
                assert self.requests[request_id].state == "deferred"
                self._free(self.requests.pop(request_id))
                self.adapter.deferral_ended({request_id})
        validate(self.adapter)

    def _received(self, request: Request) -> None:
        request.failed = request.generation in self.failed
        if self.loads_in_step:
            if request.failed and request.state == "running":
                # Everything from the first bad block on is computed again.
                request.computed = 0
            return
        assert request.state in {"loading", "ended_loading"}
        if request.state == "ended_loading":
            self._free(request)
            del self.requests[request.request_id]
        elif request.failed:
            self._free(request)
            request.state = "waiting"
        else:
            request.state = "loaded"
            if request.computed == request.num_tokens:
                self.count("full_hit")
                request.computed -= 1

    def drain(self) -> None:
        """End all requests and let the workers come to rest."""
        for request_id, request in list(self.requests.items()):
            if request.state in {"waiting", "loading", "loaded", "running"}:
                self.finish(request_id)
        for _ in range(3):
            self.step(admit=[], preempt=[], chunk=1)
            for rank in range(len(self.ranks)):
                while self.work(rank, 0):
                    pass
                self.report(rank)
        assert {} == self.requests
        assert {} == self.tickets
        assert set(range(1, self.num_blocks + 1)) == set(self.free)
        assert self.num_blocks == len(self.free)
        assert self.adapter.is_idle, self.adapter.counts()
