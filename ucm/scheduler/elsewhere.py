# SPDX-License-Identifier: Apache-2.0
"""
What ranks on other machines have of requests' prefixes, as far as they have said.

The scheduler sees its own machine's store only. Of each rank elsewhere it asks with a plan
that its part of a prefix be fetched and kept, and hears with a report up to which token its
machine has it. What counts is the least of all; who has not answered has nothing.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ucm.scheduler.budget import WANT_NBYTES
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import PrefixWant
from ucm.scheduler.requests import Wishes

__all__ = ["Elsewhere"]

_MOST_OPEN: Final = 1024
"""Wants at a time, as many as an agent takes; who asks beyond finds nothing."""
_WANT: Final = 512
"""Bytes of a want without its hashes and ranks."""
_NUMBER: Final = 9


@attrs.define
class _Asked:
    """
    A want that is not dropped.

    Args:
        number: Of the want.
        keyspace_digest: Of its keys.
        start: From which token on.
        silent: Ranks that have not answered.
        reach: The least of what was answered, in tokens.
    """

    number: int
    keyspace_digest: bytes
    start: int
    silent: set[int]
    reach: int


class Elsewhere:
    """Asks ranks on other machines, with plans, and takes their answers from reports."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """Who is elsewhere; nobody: all this is of no concern."""
        self._numbers = itertools.count(1)
        self._asked: dict[str, _Asked] = {}
        self._request_of: dict[int, str] = {}
        self._wants: list[PrefixWant] = []
        self._dropped: list[int] = []
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
        Ask for some tokens of a request with the next plan.

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
        size, digest = matcher.layout.hash_block_tokens, matcher.keyspace_digest
        wanted = tuple(hashes[tokens.start // size : tokens.stop // size])
        nbytes = _WANT + _NUMBER * len(self.ranks)
        nbytes += sum(map(len, wanted)) + _NUMBER * len(wanted)
        words = itertools.chain.from_iterable(wishes.tiers or ())
        nbytes += sum(_NUMBER + len(word.encode()) for word in words)
        if self._nbytes and self._nbytes + nbytes > WANT_NBYTES:
            return False
        if nbytes > WANT_NBYTES or len(self._asked) >= _MOST_OPEN:
            return False
        self._nbytes += nbytes
        number = next(self._numbers)
        self._asked[request_id] = _Asked(
            number, digest, tokens.start, set(self.ranks), tokens.stop
        )
        self._request_of[number] = request_id
        seconds, hold_s, compute_s = times
        self._wants.append(
            PrefixWant(
                number=number,
                keyspace_digest=digest,
                ranks=self.ranks,
                start=tokens.start,
                stop=tokens.stop,
                hashes=wanted,
                seconds=seconds,
                hold_s=hold_s,
                compute_s=compute_s,
                only=wishes.tiers,
                priority=wishes.priority,
            )
        )
        return True

    def is_pending(self, request_id: str) -> bool:
        """Return whether a rank is still to answer."""
        asked = self._asked.get(request_id)
        return asked is not None and bool(asked.silent)

    def reach(
        self, request_id: str, keyspace_digest: bytes, computed_tokens: int
    ) -> int:
        """
        Return up to which token all have a prefix under these keys; 0: not known.

        That holds from the token on from which it was asked for. An engine that waits
        keeps nothing for its requests, and may have less by then.
        """
        asked = self._asked.get(request_id)
        if asked is None or asked.silent or asked.keyspace_digest != keyspace_digest:
            return 0
        return asked.reach if asked.start <= computed_tokens else 0

    def told(self, rank: int, reached: Mapping[int, int]) -> None:
        """Take what a rank has answered; of what was dropped, nobody asks any more."""
        for number, token in reached.items():
            asked = self._asked.get(self._request_of.get(number, ""))
            if asked is not None and rank in asked.silent:
                asked.silent.discard(rank)
                asked.reach = min(asked.reach, token)

    def drop(self, request_id: str) -> None:
        """Let what was fetched for a request go. Idempotent."""
        if (asked := self._asked.pop(request_id, None)) is not None:
            del self._request_of[asked.number]
            told = [want for want in self._wants if want.number != asked.number]
            if len(told) == len(self._wants):
                self._dropped.append(asked.number)
            self._wants = told  # nobody has heard of one that is in no plan yet

    def take(self) -> tuple[tuple[PrefixWant, ...], tuple[int, ...]]:
        """Return the wants and drops for the next plan, and forget that they are to go."""
        wants, dropped = tuple(self._wants), tuple(self._dropped[:_MOST_OPEN])
        self._wants.clear()
        del self._dropped[:_MOST_OPEN]
        self._nbytes = 0
        return wants, dropped

    def __len__(self) -> int:
        return len(self._asked)
