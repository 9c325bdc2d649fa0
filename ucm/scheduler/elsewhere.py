# SPDX-License-Identifier: Apache-2.0
"""
What ranks on other machines have of requests' prefixes, as far as they have said.

The scheduler sees its own machine's store only. Of each rank elsewhere it asks with a plan
that its part of a prefix be fetched and kept, and hears with a report up to which token its
machine has it. What counts is the least of all; who has not answered has nothing. A prefix that
is more than a plan takes is asked for in parts, one plan after the other.

What a request wants deleted is told them likewise.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from ucm.scheduler.budget import WANT_NBYTES
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import Forgotten, PrefixWant
from ucm.scheduler.requests import Wishes

__all__ = ["Elsewhere", "News"]

_MOST_OPEN: Final = 1024
"""Wants at a time, as many as an agent takes; who asks beyond finds nothing."""
_MOST_FORGOTTEN: Final = 1024
_WANT: Final = 512
"""Bytes of a want without its hashes and ranks."""
_NUMBER: Final = 9


@attrs.define
class _Part:
    """
    A want, and what was answered.

    Args:
        want: Of some tokens of a request.
        silent: Ranks that have not answered.
        reach: The least of what was answered, in tokens.
    """

    want: PrefixWant
    silent: set[int]
    reach: int


class News(NamedTuple):
    """What is new to ranks elsewhere; see ``StepPlan``."""

    wants: tuple[PrefixWant, ...] = ()
    dropped: tuple[int, ...] = ()
    forgotten: tuple[Forgotten, ...] = ()


class Elsewhere:
    """Asks ranks on other machines, with plans, and takes their answers from reports."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """Who is elsewhere; nobody: all this is of no concern."""
        self._numbers = itertools.count(1)
        self._asked: dict[str, list[_Part]] = {}
        """The parts of each request's prefix, in order."""
        self._part_of: dict[int, _Part] = {}
        self._wants: list[PrefixWant] = []
        """For the next plan."""
        self._later: deque[PrefixWant] = deque()
        self._dropped: list[int] = []
        self._forgotten: deque[Forgotten] = deque(maxlen=_MOST_FORGOTTEN)
        self._nbytes = 0

    def ask(
        self,
        request_id: str,
        matcher: PrefixMatcher,
        hashes: Sequence[bytes],
        tokens: range,
        times: tuple[float, float, float],
        wishes: Wishes,
    ) -> bool:
        """
        Ask for some tokens of a request, from the next plan on.

        Args:
            request_id: Whose; another want that it had is dropped.
            matcher: Names keys.
            hashes: Its block hashes.
            tokens: From those that are computed to the longest hit.
            times: Seconds for the answer, for keeping what was found, and for computing it.
            wishes: Of the request.

        Returns:
            Whether there was room; it is asked again otherwise, or finds nothing.
        """
        self.drop(request_id)
        seconds, hold_s, compute_s = times
        words = itertools.chain.from_iterable(wishes.tiers or ())
        fixed = sum(_NUMBER + len(word.encode()) for word in words)
        wants = [
            PrefixWant(
                number=next(self._numbers),
                keyspace_digest=matcher.keyspace_digest,
                ranks=self.ranks,
                start=some.start,
                stop=some.stop,
                hashes=some_hashes,
                seconds=seconds,
                hold_s=hold_s,
                compute_s=compute_s * len(some) / len(tokens),
                only=wishes.tiers,
                priority=wishes.priority,
                tenant=wishes.tenant,
            )
            for some, some_hashes in self._parts(matcher, hashes, tokens, fixed)
        ]
        is_room = not self._nbytes or self._nbytes + _nbytes(wants[0]) <= WANT_NBYTES
        if not is_room or len(self._asked) >= _MOST_OPEN:
            return False
        self._asked[request_id] = parts = [
            _Part(want, set(self.ranks), want.stop) for want in wants
        ]
        self._part_of.update((part.want.number, part) for part in parts)
        self._put(wants[0])
        self._later.extend(wants[1:])
        return True

    def _parts(
        self, matcher: PrefixMatcher, hashes: Sequence[bytes], tokens: range, fixed: int
    ) -> Iterator[tuple[range, tuple[bytes, ...]]]:
        """Yield tokens and their hashes, each no more than a plan takes with *fixed* bytes."""
        size, align = matcher.layout.hash_block_tokens, matcher.layout.alignment_tokens
        room = WANT_NBYTES - _WANT - _NUMBER * len(self.ranks) - fixed
        longest = max(1, room // (_NUMBER + len(hashes[0]))) * size
        step = max(align, longest // align * align)
        for start in range(tokens.start, tokens.stop, step):
            some = range(start, min(start + step, tokens.stop))
            yield some, tuple(hashes[some.start // size : some.stop // size])

    def _put(self, want: PrefixWant) -> None:
        self._wants.append(want)
        self._nbytes += _nbytes(want)

    def forget(
        self, matcher: PrefixMatcher, hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Have blocks within so many tokens deleted; best effort, the oldest give way."""
        known = len(hashes) * matcher.layout.hash_block_tokens
        tokens = range(min(num_tokens, known))
        digest = matcher.stored_digest
        if self.ranks and tokens and digest:
            self._forgotten.extend(
                Forgotten(digest, self.ranks, some.start, some_hashes)
                for some, some_hashes in self._parts(matcher, hashes, tokens, 0)
            )

    def is_pending(self, request_id: str) -> bool:
        """Return whether a rank is still to answer."""
        return any(part.silent for part in self._asked.get(request_id, ()))

    def reach(
        self, request_id: str, keyspace_digest: bytes, computed_tokens: int
    ) -> int:
        """
        Return up to which token all have a prefix under these keys; 0: not known.

        That holds from the token on from which it was asked for. An engine that waits
        keeps nothing for its requests, and may have less by then.
        """
        parts = self._asked.get(request_id)
        if not parts or parts[0].want.start > computed_tokens:
            return 0
        reach = 0
        for part in parts:
            if part.silent or part.want.keyspace_digest != keyspace_digest:
                break
            reach = part.reach
            if reach < part.want.stop:
                break
        return reach

    def told(self, rank: int, reached: Mapping[int, int]) -> None:
        """Take what a rank has answered; of what was dropped, nobody asks any more."""
        for number, token in reached.items():
            part = self._part_of.get(number)
            if part is not None and rank in part.silent:
                part.silent.discard(rank)
                part.reach = min(part.reach, token)

    def drop(self, request_id: str) -> None:
        """Let what was fetched for a request go. Idempotent."""
        if (parts := self._asked.pop(request_id, None)) is None:
            return
        numbers = {part.want.number for part in parts}
        for number in numbers:
            del self._part_of[number]
        # Nobody has heard of those that are in no plan yet.
        untold = {each.number for each in (*self._wants, *self._later)}
        self._dropped += sorted(numbers - untold)
        if not numbers.isdisjoint(untold):
            self._wants = [one for one in self._wants if one.number not in numbers]
            later = (one for one in self._later if one.number not in numbers)
            self._later = deque(later)

    def awaits_plan(self) -> bool:
        """Return whether something is to go with a plan, even if nobody runs any more."""
        return bool(self._forgotten or self._dropped)

    def take(self) -> News:
        """Return what goes with the next plan, and forget that it is to go."""
        wants, dropped = tuple(self._wants), tuple(self._dropped[:_MOST_OPEN])
        del self._dropped[:_MOST_OPEN]
        forgotten = list[Forgotten]()
        while self._forgotten:
            nbytes = _nbytes(self._forgotten[0])
            if self._nbytes and self._nbytes + nbytes > WANT_NBYTES:
                break
            forgotten.append(self._forgotten.popleft())
            self._nbytes += nbytes
        self._wants.clear()
        self._nbytes = 0
        while self._later and (
            not self._nbytes or self._nbytes + _nbytes(self._later[0]) <= WANT_NBYTES
        ):
            self._put(self._later.popleft())
        return News(wants, dropped, tuple(forgotten))

    def __len__(self) -> int:
        return len(self._asked)


def _nbytes(told: PrefixWant | Forgotten) -> int:
    """Return what it costs in a plan at most."""
    nbytes = _WANT + _NUMBER * (len(told.ranks) + len(told.hashes))
    nbytes += sum(map(len, told.hashes))
    words = itertools.chain.from_iterable(getattr(told, "only", None) or ())
    return nbytes + sum(_NUMBER + len(word.encode()) for word in words)
