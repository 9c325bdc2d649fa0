# SPDX-License-Identifier: Apache-2.0
"""
A small engine beside another connector, which loads within the step and fails at times.

It schedules as vLLM does, as far as that matters here: blocks are shared by hash as soon as a step
that fills them is planned, outputs come some plans later, and of blocks that did not come an output
tells, upon which the engine goes back and computes them again, or ends who has them. It knows what
each token of its pool really holds: one that was computed behind garbage is garbage. So that it sees at
once when the adapter saves what is not under its key.

One seed decides everything. Pure, on the caller's thread.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

import attrs

from tests.kit.consistency import validate
from tests.kit.served_pool import SIZE, Part, Pool, Request
from tests.scheduler.model import ONE_FULL, SetIndex, make_adapter
from ucm.scheduler.messages import SpanOrder, StepPlan, StepReport
from ucm.scheduler.requests import Disposition, RequestEnd, StepFacts

__all__ = ["ServedEngine"]

_ARRIVALS: Final = 60
_LONGEST: Final = 600
"""Steps in which all who are left have to come to their end."""


class ServedEngine:
    """
    An engine over an adapter with one rank, whose saves are over with their step.

    Args:
        seed: Decides everything.
        is_served: The other connector serves, and fails.
        is_disturbed: Requests are aborted and preempted, and blocks are few.
    """

    def __init__(
        self, seed: int, *, is_served: bool = True, is_disturbed: bool = True
    ) -> None:
        self.seen: Counter[str] = Counter()
        """What happened, and how often."""
        self._again = f"ServedEngine({seed}, {is_served=}, {is_disturbed=}).run()"
        dice = self._dice = random.Random(seed)
        self._batches = dice.choice([1, 2, 2, 3])
        self._ends_who_fail = dice.random() < 0.3
        self._budget, self._chunk = dice.choice([8, 16, 64]), dice.choice([4, 7, 16])
        self._families, self._at_once = dice.choice([1, 2, 3]), dice.choice([1, 1, 3])
        self._serves = dice.choice([0.3, 0.8]) * is_served
        self._fails = dice.choice([0.2, 0.6])
        self._aborts = dice.choice([0, 0.05]) * is_disturbed
        self._preempts = dice.choice([0, 0.05]) * is_disturbed
        self._pool = Pool(dice.choice([24, 40, 80]) if is_disturbed else 2000)
        self._index = SetIndex()
        counted = self._batches + dice.choice([0, 1])  # a door may think of more
        self.adapter = make_adapter(ONE_FULL, self._index, batches=counted)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._deferred: dict[str, list[int]] = {}
        self._flight: deque[tuple[list[Part], StepPlan]] = deque()
        self._released: list[int] = []

    def run(self) -> None:
        """
        Take requests for a while, and let all come to their end.

        Raises:
            AssertionError: Garbage was saved, or something is left; it says how to run it again.
        """
        for _ in range(_ARRIVALS):
            for _ in range(self._at_once * (self._dice.random() < 0.5)):
                self._arrive()
            self._step()
        for _ in range(_LONGEST):
            if not (self._requests or self._deferred):
                break
            self._step()
        else:
            self._fail(f"stuck: {[*self._requests]}, {[*self._deferred]} deferred")
        for _ in range(4):  # what was under way, and reports
            self._step()
        if not (self.adapter.is_idle and self._pool.is_free):
            self._fail(f"left at the end: {self.adapter.counts()}")
        self.seen["dropped"] += self.adapter.totals.dropped_blocks

    def _fail(self, what: str) -> NoReturn:
        again = f"from {__name__} import ServedEngine; {self._again}"
        raise AssertionError(f'{what}\nagain: python -c "{again}"')

    def _arrive(self) -> None:
        """Take a request that has the start of its prompt in common with some others."""
        dice, number = self._dice, self.seen["arrived"]
        self.seen["arrived"] += 1
        prompt = dice.randrange(5, 33)
        total = prompt + dice.choice([0, 0, 1, 3, 9])
        family, branches_at = dice.randrange(self._families), dice.choice([0, 2, 4, 99])
        branch = f"{family}.{branches_at}.{dice.randrange(3)}"
        hashes = []
        for at in range(total // SIZE):
            name = f"{family}" if at < branches_at else branch
            name = name if (at + 1) * SIZE <= prompt else f"decoded.{number}"
            hashes.append(f"{name}:{at}".rjust(16).encode())
        request = Request(f"r{number}", prompt, total, hashes)
        self._requests[request.name] = request
        self._waiting.append(request)

    def _step(self) -> None:
        """Plan a step, and take the outputs that are due, or come early."""
        ran = self._schedule()
        while self._flight and (
            not ran or len(self._flight) >= self._batches or self._dice.random() < 0.2
        ):
            self._take_output(*self._flight.popleft())

    def _schedule(self) -> bool:
        """Plan a step; return whether anybody runs in it."""
        preempted: dict[str, int] = {}
        allocated: list[int] = []
        due, must_tell = dict(self.adapter.due), self.adapter.holds_blocks
        if self._running and self._dice.random() < self._preempts:
            self._preempt(preempted)
        parts = self._go_on(preempted, allocated)
        if not preempted:
            parts += self._admit(sum(part.end - part.computed for part in parts))
        looks = [
            part.as_look()
            for part in parts
            if part.is_new or due.get(part.request.name, 0) <= part.end
        ]
        facts = StepFacts(
            scheduled=tuple(looks),
            preempted=preempted,
            allocated=allocated if must_tell else (),
            is_idle=not parts,
        )
        is_told = looks or preempted or must_tell or not parts
        self._report()
        plan = self.adapter.plan_step(facts if is_told else None)
        validate(self.adapter)
        self.seen["in doubt"] += len(self.adapter.foreign.doubts)
        self.seen["bad"] += len(self.adapter.foreign.bad)
        self._flight.append((parts, plan))
        return bool(parts)

    def _preempt(self, preempted: dict[str, int]) -> None:
        """Take its blocks from who came last."""
        request = self._running.pop()
        self._pool.give_back(request.table)
        request.table, request.computed, request.is_running = [], 0, False
        request.stale = request.in_flight
        self._waiting.insert(0, request)
        preempted[request.name] = request.total
        self.seen["preempted"] += 1

    def _count(self, request: Request, computed: int, budget: int) -> int:
        """Return how many tokens of a request the step computes."""
        most = max(1, request.prompt - computed)  # of those that it decodes, one
        return min(most, request.total - computed, self._chunk, budget)

    def _go_on(self, preempted: dict[str, int], allocated: list[int]) -> list[Part]:
        """Compute of those who run, in their order."""
        parts: list[Part] = []
        budget = self._budget
        for request in [*self._running]:
            if not request.is_running:
                continue
            count = self._count(request, request.computed, budget)
            if count <= 0:
                continue
            end = request.computed + count
            need = max(0, -(-end // SIZE) - len(request.table))
            while (new := self._pool.take(need)) is None:
                if self._running[-1] is request:
                    break
                self._preempt(preempted)
            if new is None:
                continue
            request.table += new
            allocated += new
            budget -= count
            parts.append(self._part(request, request.computed, end))
        return parts

    def _admit(self, spent: int) -> list[Part]:
        """Let those run who wait, as long as there are tokens and blocks."""
        parts = []
        for request in [*self._waiting]:
            if (left := self._budget - spent) <= 0:
                break
            if request.stale:
                continue
            shared = self._pool.share(request.hashes[: (request.total - 1) // SIZE])
            served = self._serve(request, len(shared))
            computed = (len(shared) + served) * SIZE
            end = computed + self._count(request, computed, left)
            new = self._pool.take(-(-end // SIZE) - len(shared))
            if new is None:
                self._pool.give_back(shared)
                break
            self._waiting.remove(request)
            self._running.append(request)
            request.is_running, request.table = True, shared + new
            request.was_served |= served > 0
            self.seen["served"] += served > 0
            part = self._part(request, computed, end)
            spent += end - computed
            parts.append(
                attrs.evolve(part, shared=len(shared), served=served, is_new=True)
            )
        return parts

    def _serve(self, request: Request, shared: int) -> int:
        """Return how many blocks the other connector loads behind those of the cache."""
        if request.was_served or self._dice.random() >= self._serves:
            return 0
        most = (request.prompt - 1) // SIZE - shared
        return self._dice.randint(1, most) if most > 0 else 0

    def _part(self, request: Request, computed: int, end: int) -> Part:
        request.computed, request.in_flight = end, request.in_flight + end - computed
        self._pool.cache(request.table[: end // SIZE], request.hashes)
        return Part(request, computed, end, [*request.table])

    def _take_output(self, parts: Sequence[Part], plan: StepPlan) -> None:
        """Run a step, and take note of what came of it."""
        lost = self._load(parts)
        self._compute(parts)
        for order in plan.saves:
            self._save(order)
        for request in [*self._requests.values()]:
            if self._dice.random() < self._aborts:
                self._finish(request, is_aborted=True)
        back = self._go_back(parts, lost) if lost else []
        for part in parts:
            self._ran(part, is_back=part.request in back)
        for request in back if self._ends_who_fail else ():
            self._finish(request)
        if lost:
            self.adapter.foreign.lost(lost)
        for ended in plan.deferred:
            self._report()
            self._pool.give_back(self._deferred.pop(ended.request_id))
            self.adapter.deferral_ended([ended.request_id])

    def _load(self, parts: Iterable[Part]) -> set[int]:
        """Have the other connector load; return blocks that did not come."""
        lost = set()
        for part in parts:
            for at in range(part.shared, part.shared + part.served):
                block_id, came = part.table[at], self._dice.random() >= self._fails
                for rest in range(SIZE):
                    token = part.request.token(at * SIZE + rest) if came else None
                    self._pool.write(block_id, rest, token)
                if not came:
                    lost.add(block_id)
        self.seen["failed"] += len(lost)
        return lost

    def _compute(self, parts: Sequence[Part]) -> None:
        """Compute tokens from those before them, which others may compute in the same step."""
        pool = self._pool
        for part in parts:
            shared = pool.spoiled.intersection(part.table[: part.shared])
            self.seen["shared bad"] += any(None in pool.tokens[each] for each in shared)
        order = [(at, part) for part in parts for at in range(part.computed, part.end)]
        for position, part in sorted(order, key=lambda each: each[0]):
            at, rest = divmod(position - 1, SIZE)
            before = None if at < 0 else pool.tokens[part.table[at]][rest]
            is_good = at < 0 or before == part.request.token(position - 1)
            at, rest = divmod(position, SIZE)
            token = part.request.token(position) if is_good else None
            pool.write(part.table[at], rest, token)

    def _save(self, order: SpanOrder) -> None:
        """Store blocks, whose tokens have to be those of their keys."""
        for block_id, each in zip(order.block_ids, order.split_hashes(), strict=True):
            if self._pool.tokens[block_id] != [(each, rest) for rest in range(SIZE)]:
                self._fail(f"garbage in block {block_id} is saved for {order.owners}")
            self._index.put(order.group_id, [each])
            self.seen["saved"] += 1
            self.seen["saved anew"] += block_id in self._pool.spoiled
        self._released.append(order.transfer_id)

    def _report(self) -> None:
        """Tell the adapter of the saves that are over."""
        if ids := tuple(self._released):
            report = StepReport(
                rank=0,
                released=ids,
                settled_saves=ids,
                new_blocks=dict.fromkeys(ids, 0),
            )
            self.adapter.apply_report(report)
            self._released = []

    def _go_back(self, parts: Sequence[Part], lost: set[int]) -> list[Request]:
        """
        Have the first of those who stand on a block that did not come compute it again.

        Others who share it go on behind what this step has computed of them, less that.
        """
        counts = {part.request.name: part.end - part.computed for part in parts}
        back, taken = [], set[int]()
        for request in self._running:
            before = request.computed - counts.get(request.name, 0)
            table = request.table[: -(-before // SIZE)]
            bad = [at for at, block_id in enumerate(table) if block_id in lost]
            if not bad:
                continue
            mine = [at for at in bad if table[at] not in taken]
            request.computed = mine[0] * SIZE if mine else before
            taken.update(table[at] for at in bad)
            back.append(request)
            if self._ends_who_fail and mine:
                self._pool.forget(request.table[mine[0] :])
        return back

    def _ran(self, part: Part, *, is_back: bool) -> None:
        """Take note that the output of a request's part has come."""
        request, count = part.request, part.end - part.computed
        request.in_flight -= count
        if request.stale:
            request.stale -= count
            return
        is_done = request.computed >= request.total and not request.in_flight
        if is_done and request.is_running and not is_back:
            self._finish(request)

    def _finish(self, request: Request, *, is_aborted: bool = False) -> None:
        """End a request; who is aborted while there are doubts leaves nothing, as at the door."""
        (self._running if request.is_running else self._waiting).remove(request)
        end = None
        if request.is_running and not (is_aborted and self.adapter.foreign.doubts):
            end = RequestEnd(
                computed_tokens=min(request.computed, request.total),
                known_tokens=request.total + 1,
                prompt_tokens=request.prompt,
                hashes=request.hashes,
                tables=[[*request.table]],
            )
        self.seen["aborted"] += is_aborted
        del self._requests[request.name]
        request.is_running = False
        disposition = self.adapter.request_finished(request.name, end)
        if disposition is Disposition.DEFER:
            self._deferred[request.name] = request.table
        else:
            self._pool.give_back(request.table)
