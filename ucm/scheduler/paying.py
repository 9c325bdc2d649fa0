# SPDX-License-Identifier: Apache-2.0
"""
Whether a hit of the slab is loaded, or computed as if it were none. Pure: facts and the time in.

Held against each other are how long a request would wait for its load and for its prompt, each
behind what the engine has taken on before: loads that are on their way, and prompts of the last
plan. How long loads take is learnt from loads, from their order to the last plan at which they were
not over: whatever a request waits for in between counts, on whichever rank. What is over with the
next step may have been so as it began; that step ran anyway, and steps of a busy engine are long.
Loads that were on their way together are told apart by what ended with each look: what one waited
for the ones before it is theirs.

A few tokens are computed, whatever loads take, once it is known how fast prompts are. A step computes
the last token in any case, and some more in the same time; who waits for a load misses that step. Such is the
last block of a prompt of which the engine has all others.

Of what nothing is known, and that it is tried again, is ``ucm.worth``'s.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from ucm.layout import KVLayout
from ucm.scheduler.prompts import PromptSpeed
from ucm.worth import Choice

__all__ = ["Paying"]

_FEW_TOKENS: Final = 64
"""A step that reads all weights computes so many in the time of one: an H100 some 300, before its
arithmetic is the limit. Two cores, which compute 64 in 10 ms, lost 10 to 40 by a missed step."""


class _Ordered(msgspec.Struct, frozen=True):
    """A load that is on its way: of how many bytes, and since when."""

    nbytes: int
    at: float


class Paying:
    """
    Decides on hits, and learns from loads.

    Used on the scheduler's thread only.

    Args:
        layout: The engine's groups.
        predicts: Whether anything is ever computed that could be loaded.
        batches: Steps that the engine plans before it waits for the first of them.
    """

    def __init__(self, layout: KVLayout, *, predicts: bool, batches: int = 2) -> None:
        self.prompts = PromptSpeed(batches)
        """How fast the engine computes them."""
        self._layout = layout
        self._predicts = predicts
        self._choice = Choice()
        self.on_way: dict[str, _Ordered] = {}
        """Loads, by request."""
        self._ahead = self._nbytes_ahead = 0
        self._heard_at = self._planned_at = 0.0

    def __len__(self) -> int:
        """Return how many loads are on their way."""
        return len(self.on_way)

    def planned(self, tokens: int, now: float) -> None:
        """Take note of a plan that computes about so many *tokens* of prompts."""
        self._ahead, self._planned_at = tokens, now
        self.prompts.planned(tokens, now)

    def declines(self, loaded: range, now: float) -> bool:
        """
        Decide whether tokens are computed though they could be loaded, and take note of it.

        To be asked once of each hit.
        """
        if not self._predicts:
            return False
        compute_s = self.prompts.seconds_of(self._ahead + len(loaded))
        if compute_s and len(loaded) <= _FEW_TOKENS:
            self._ahead += len(loaded)
            return True
        one = self._nbytes_of(loaded)
        nbytes = self._nbytes_ahead + one
        if not self._choice.declines(nbytes, compute_s, now, one=one):
            return False
        self._ahead += len(loaded)
        return True

    def ordered(self, request_id: str, loaded: range, now: float) -> None:
        """Take note that the load of these tokens is on its way."""
        self.forget(request_id)
        self.on_way[request_id] = _Ordered(self._nbytes_of(loaded), now)
        self._nbytes_ahead += self.on_way[request_id].nbytes

    def over(self, request_ids: Iterable[str], now: float) -> None:
        """Learn from loads of which the engine has heard that they are over."""
        began, sizes = now, []
        for request_id in request_ids:
            if (ordered := self.forget(request_id)) is not None:
                began = min(began, ordered.at)
                sizes.append(ordered.nbytes)
        if sizes:
            took = max(0.0, self._planned_at - max(self._heard_at, began))
            self._choice.saw(sum(sizes), took, now, one=max(sizes))
            self._heard_at = now

    def forget(self, request_id: str) -> _Ordered | None:
        """Learn nothing of a load that has failed, or whose request is over; return it."""
        ordered = self.on_way.pop(request_id, None)
        if ordered is not None:
            self._nbytes_ahead -= ordered.nbytes
        return ordered

    def _nbytes_of(self, loaded: range) -> int:
        """Return about how much a hit of these tokens brings, on a rank."""
        nbytes = 0
        for group in self._layout.groups:
            needed = group.window_blocks(loaded.stop)
            first = max(needed.start, loaded.start // group.block_tokens)
            nbytes += group.block_bytes * max(0, needed.stop - first)
        return nbytes
