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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from ucm.integration.vllm.adapters import Adapters
from ucm.integration.vllm.compat import (
    BlockTables,
    StateOffers,
    overwritten_blocks,
)
from ucm.integration.vllm.wishes import WishReader
from ucm.layout import GroupKind, KVLayout
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.matches import PrefixMatch
from ucm.scheduler.misses import Miss
from ucm.scheduler.records import Record
from ucm.scheduler.requests import (
    NO_LIMIT,
    NO_WISHES,
    RequestEnd,
    ScheduledRequest,
    StateOffer,
    StepFacts,
    Wishes,
)

__all__ = ["UNWEIGHED", "Known", "Running"]

UNWEIGHED: Final = range(0), False


class Known(msgspec.Struct, eq=False, gc=False):
    """
    One of the engine's requests, from when it is first heard of to its end.

    Args:
        request: vLLM's own.
        wishes: What it asks of the store.
        record: What becomes of it; None before its first look-up.
        has_blocks: Whether it was given some.
        own_tokens: While it waits to run, those that the engine had and that we load.
        computed_tokens: That the engine had itself when it last asked for more.
        match: What its last look-up said; None once that has decided.
        life: How often the request was given blocks.
        found_tokens: That were found by the last one that decided.
        wanted_tokens: That it looked for.
        miss: Why it fell short, or was not made; None if it did not.
        weighed: The tokens of the hit on which was decided last, and whether it is computed.
        most: Tokens that the engine may have room to load.
    """

    request: Any
    wishes: Wishes
    record: Record | None = None
    has_blocks: bool = False
    own_tokens: int = NO_LIMIT
    computed_tokens: int = 0
    match: PrefixMatch | None = None
    life: int = 0
    found_tokens: int = 0
    wanted_tokens: int = 0
    miss: Miss | None = None
    weighed: tuple[range, bool] = UNWEIGHED
    most: int = NO_LIMIT


class Running:
    """
    The requests that are not over, also those that never run.

    Args:
        adapters: Knows by which hashes a request is saved.
        adapter: Knows who is to be looked at, and whether new blocks matter.
        reader: Knows what requests ask of the store.
        layout: The engine's groups.
    """

    def __init__(
        self,
        adapters: Adapters,
        adapter: SchedulerAdapter,
        reader: WishReader,
        layout: KVLayout,
    ) -> None:
        self._adapters = adapters
        self._adapter = adapter
        self._reader = reader
        self._due = adapter.due
        self._groups = groups = layout.groups
        is_state = (group.kind is GroupKind.STATE for group in groups)
        self._states = list(itertools.compress(enumerate(groups), is_state))
        self._known: dict[str, Known] = {}
        self._tables = BlockTables()
        self.given: list[tuple[Known, Any]] = []
        """Who was given blocks since the last step into which we load nothing, and which."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def have_blocks(self) -> bool:
        """Whether any of them was given blocks; looks at all."""
        return any(known.has_blocks for known in self._known.values())

    @property
    def num_tables(self) -> int:
        """Requests whose block tables are kept."""
        return len(self._tables)

    def known(self, request: Any) -> Known:  # noqa: ANN401 - vLLM's Request
        """Return what is kept of a request; what it asks for is read once."""
        known = self._known.get(request.request_id)
        if known is None or known.request is not request:
            known = Known(request, self._reader.of(request))
            self._known[request.request_id] = known
        return known

    def step(self, output: Any) -> StepFacts | None:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the facts of a step, if there is anything to tell; leaves *output*."""
        resolve, offers = self._tables.begin_step(output)
        always = {*output.scheduled_cached_reqs.resumed_req_ids, *offers}
        new, due = output.scheduled_new_reqs, self._due_ones(output, always)
        preempted, is_idle = output.preempted_req_ids, not output.num_scheduled_tokens
        given, self.given = self.given, []
        is_read = self._adapter.holds_blocks  # who writes which blocks matters then
        if not (new or due or preempted or is_idle or is_read):
            return None
        return StepFacts(
            scheduled=tuple(self._looked_at(output, due, resolve, offers)),
            preempted=self._known_tokens(preempted) if preempted else {},
            allocated=self._allocated(output, given) if is_read or offers else (),
            overwritten=overwritten_blocks(output).union(self._moved_onto(output)),
            is_idle=is_idle,
        )

    def end(
        self, request_id: str, tables: Sequence[Sequence[int]]
    ) -> RequestEnd | None:
        """Let go of a request, and return what there is of it if it had blocks."""
        self._tables.kept.pop(request_id, None)
        known = self._known.pop(request_id, None)
        if known is None or not known.has_blocks:
            return None
        request = known.request
        return RequestEnd(
            computed_tokens=request.num_computed_tokens,
            known_tokens=request.num_tokens,
            prompt_tokens=request.num_prompt_tokens,
            hashes=self._adapters.hashes_of(request),
            tables=tables,
            wishes=known.wishes,
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
            known = self._known.get(request_id)
            request = None if known is None else known.request
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
                own_tokens=known.own_tokens if known and is_new else NO_LIMIT,
                states=[StateOffer(*each) for each in offers[request_id]]
                if request_id in offers
                else (),
                wishes=NO_WISHES if known is None else known.wishes,
            )
            if known is not None:
                known.own_tokens = NO_LIMIT
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

    def _allocated(
        self,
        output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput
        given: Iterable[tuple[Known, Any]],
    ) -> list[int]:
        """
        Return the blocks that running requests were given; it matters to saves.

        A resumed one tells all its blocks, also those that it only reads: see ``_looked_at``.
        Who was given some and does not run waits for another connector, which loads into those
        behind what the engine had itself.
        """
        chain = itertools.chain.from_iterable
        blocks, runs = (
            list(chain(chain(_new_ones(output)))),
            output.num_scheduled_tokens,
        )
        for known, theirs in given:
            if theirs is not None and known.request.request_id not in runs:
                tables = theirs.get_block_ids()
                for group, table in zip(self._groups, tables, strict=True):
                    blocks += table[known.computed_tokens // group.block_tokens :]
        return blocks

    def _moved_onto(self, output: Any) -> Iterator[int]:  # noqa: ANN401 - vLLM's SchedulerOutput
        """
        Yield the new blocks of recurrent groups.

        Onto these the second model runner moves running states before it calls any hook.
        """
        for at, group in self._states:
            for new in output.scheduled_new_reqs:
                first = new.num_computed_tokens // group.block_tokens
                yield from new.block_ids[at][first:]
            for blocks in _new_ones(output):
                yield from blocks[at]

    def _known_tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Return how many tokens requests had computed, or were about to."""
        known = {each: self._known.get(each) for each in request_ids}
        return {
            request_id: 0 if each is None else each.request.num_tokens - 1
            for request_id, each in known.items()
        }


def _new_ones(output: Any) -> Iterator[Sequence[Sequence[int]]]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Yield by group the new blocks of those that go on, and of none that is resumed."""
    cached = output.scheduled_cached_reqs
    new, resumed = cached.new_block_ids, cached.resumed_req_ids
    if resumed:
        is_resumed = map(resumed.__contains__, cached.req_ids)
        new = itertools.compress(new, map(operator.not_, is_resumed))
    return filter(None, new)
