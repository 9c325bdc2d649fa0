# SPDX-License-Identifier: Apache-2.0
"""
The engine's requests, and what is told of them, in the words of ``ucm.scheduler``.

Whatever is asked of a request is asked when the request is new or resumed, is due, offers
a state, or ends. Who is due shows in two numbers of each that runs, and these are looked
up only in steps in which anybody can be (``Due``).

Threading: all of it runs on the engine's scheduler thread, and nothing waits.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ucm.integration.vllm.adapters import Adapters
from ucm.integration.vllm.compat import (
    BlockTables,
    StateOffers,
    overwritten_blocks,
)
from ucm.integration.vllm.wishes import WishReader
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.requests import (
    NO_LIMIT,
    NO_WISHES,
    RequestEnd,
    ScheduledRequest,
    StateOffer,
    StepFacts,
    Wishes,
)

__all__ = ["Running"]

_NOBODY = None, NO_WISHES


class Running:
    """
    The requests that have blocks.

    Args:
        adapters: Knows by which hashes a request is saved.
        adapter: Knows who is to be looked at, and whether new blocks matter.
        reader: Knows what requests ask of the store.
    """

    def __init__(
        self, adapters: Adapters, adapter: SchedulerAdapter, reader: WishReader
    ) -> None:
        self._adapters = adapters
        self._adapter = adapter
        self._reader = reader
        self._wishes: dict[str, tuple[Any, Wishes]] = {}
        """By request that was looked at, and is not over; also of those that never run."""
        self.own: dict[str, int] = {}
        """By request that waits to run, the tokens that the engine had and that we load."""
        self._due = adapter.due
        self._requests: dict[str, Any] = {}
        self._tables = BlockTables()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_tables(self) -> int:
        """Requests whose block tables are kept."""
        return len(self._tables)

    @property
    def num_wishes(self) -> int:
        """Requests whose wishes are kept."""
        return len(self._wishes)

    def wishes_of(self, request: Any) -> Wishes:  # noqa: ANN401 - vLLM's Request
        """Return what a request asks for; it is read once."""
        known = self._wishes.get(request.request_id)
        if known is None or known[0] is not request:
            known = self._wishes[request.request_id] = (
                request,
                self._reader.of(request),
            )
        return known[1]

    def begin(self, request: Any) -> Wishes:  # noqa: ANN401 - vLLM's Request
        """Take note of a request that was given blocks; return what it asks for."""
        request_id = request.request_id
        self._requests[request_id] = request
        known = self._wishes.get(request_id, _NOBODY)
        return known[1] if known[0] is request else self.wishes_of(request)

    def step(self, output: Any) -> StepFacts | None:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the facts of a step, if there is anything to tell; leaves *output*."""
        resolve, offers = self._tables.begin_step(output)
        always = {*output.scheduled_cached_reqs.resumed_req_ids, *offers}
        new, due = output.scheduled_new_reqs, self._due_ones(output, always)
        preempted, is_idle = output.preempted_req_ids, not output.num_scheduled_tokens
        if not (new or due or preempted or is_idle or self._adapter.holds_blocks):
            return None  # who writes which blocks matters to who reads them
        return StepFacts(
            scheduled=tuple(self._looked_at(output, due, resolve, offers)),
            preempted=self._known_tokens(preempted) if preempted else {},
            allocated=self._allocated(output) if self._adapter.holds_blocks else (),
            overwritten=overwritten_blocks(output),
            is_idle=is_idle,
        )

    def end(
        self, request_id: str, tables: Sequence[Sequence[int]]
    ) -> RequestEnd | None:
        """Let go of a request, and return what there is of it if it had blocks."""
        self._tables.kept.pop(request_id, None)
        self.own.pop(request_id, None)
        _, wishes = self._wishes.pop(request_id, _NOBODY)
        request = self._requests.pop(request_id, None)
        return None if request is None else self._ended(request, tables, wishes)

    def _ended(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        tables: Sequence[Sequence[int]],
        wishes: Wishes,
    ) -> RequestEnd:
        return RequestEnd(
            computed_tokens=request.num_computed_tokens,
            known_tokens=request.num_tokens,
            prompt_tokens=request.num_prompt_tokens,
            hashes=self._adapters.hashes_of(request),
            tables=tables,
            wishes=wishes,
        )

    def _looked_at(
        self,
        output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput
        due: Sequence[tuple[str, int]],
        resolve: Callable[[str], Any],
        offers: StateOffers,
    ) -> list[ScheduledRequest]:
        looks, counts = [], output.num_scheduled_tokens
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        new_ones = [
            (new.req_id, new.num_computed_tokens, new.block_ids)
            for new in output.scheduled_new_reqs
        ]
        for request_id, computed, *blocks in (*new_ones, *due):
            request = self._requests.get(request_id)
            tables = blocks[0] if blocks else resolve(request_id)
            is_new = bool(blocks) or request_id in resumed
            look = ScheduledRequest(
                request_id=request_id,
                computed_tokens=computed,
                end_tokens=computed + counts[request_id],
                prompt_tokens=0 if request is None else request.num_prompt_tokens,
                hashes=() if request is None else self._adapters.hashes_of(request),
                tables=tables,
                new_block_ids=tables if is_new else (),
                is_new=is_new,
                own_tokens=self.own.pop(request_id, NO_LIMIT) if is_new else NO_LIMIT,
                states=[StateOffer(*each) for each in offers[request_id]]
                if request_id in offers
                else (),
                wishes=self._wishes.get(request_id, _NOBODY)[1],
            )
            looks.append(look)
        return looks

    def _due_ones(
        self,
        output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput
        always: Collection[str],
    ) -> Sequence[tuple[str, int]]:
        """Return who of those that go on is to be looked at, and its computed tokens."""
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        ids, computed = cached.req_ids, cached.num_computed_tokens
        # Whoever is scheduled advances by a token at least, which none of the others does.
        most = sum(counts.values()) - len(ids) + 1
        for new in output.scheduled_new_reqs:
            most -= counts[new.req_id]
        if (self._due.is_nobody(most) and not always) or not ids:
            return ()
        # No line of Python for each: this is the one thing that grows with who runs.
        ends = list(map(operator.add, computed, map(counts.get, ids)))
        dues = list(map(self._due.get, ids, itertools.repeat(0)))
        short = min(map(operator.sub, dues, ends))
        if not always and self._due.are_short_by(short, len(ids)):
            return []
        is_due = map(operator.ge, ends, dues)
        if always:
            is_due = map(operator.or_, is_due, map(always.__contains__, ids))
        return list(itertools.compress(zip(ids, computed, strict=True), is_due))

    def _allocated(self, output: Any) -> list[int]:  # noqa: ANN401 - vLLM's SchedulerOutput
        """
        Return the blocks that running requests were given; it matters to saves.

        A resumed one tells all its blocks, also those that it only reads: see ``_looked_at``.
        """
        cached = output.scheduled_cached_reqs
        given, resumed = cached.new_block_ids, cached.resumed_req_ids
        if resumed:
            is_resumed = map(resumed.__contains__, cached.req_ids)
            given = itertools.compress(given, map(operator.not_, is_resumed))
        chain = itertools.chain.from_iterable
        return list(chain(chain(filter(None, given))))

    def _known_tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Return how many tokens requests had computed, or were about to."""
        known = {
            request_id: self._requests.get(request_id) for request_id in request_ids
        }
        return {
            request_id: 0 if request is None else request.num_tokens - 1
            for request_id, request in known.items()
        }
