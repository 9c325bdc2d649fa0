# SPDX-License-Identifier: Apache-2.0
"""
When requests are to be looked at again. Pure.

Beside the number of each request stands one that holds for all of them: a step that lets
none advance as far needs no look at any. Most steps of an engine that decodes are such.

A look at one request costs a step five times what it adds to a look at others. So where blocks stay
where they are, and wait for company anyway (``ucm.scheduler.company``), who is due waits a few tokens
for others, and all who are due by then are looked at together. That costs a block where a request is
preempted within these tokens, and a session that its client leaves idle within them keeps one to itself until
it goes on or ends.
"""

from collections.abc import Iterable
from typing import Final

from ucm.layout import GroupKind, KVLayout

__all__ = ["Due", "patience_of"]

_PATIENCE: Final = 4


def patience_of(layout: KVLayout, *, waits: bool) -> int:
    """Return how many tokens late a look may be, where saves wait or not."""
    stay = all(group.kind is GroupKind.FULL for group in layout.groups)
    return _PATIENCE if waits and stay else 0


class Due(dict[str, int]):
    """
    By request, from how many tokens on a step must tell of it; of others, always.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_quiet", "patience")

    def __init__(self) -> None:
        super().__init__()
        self.patience = 0
        """A look may be so many tokens late."""
        self._quiet = 0
        """By so many tokens, at the least, all are short of a look that may not be later."""

    def put(self, looks: Iterable[tuple[str, int, int]]) -> None:
        """Take note of when requests are due, each of which has so many tokens now."""
        for request_id, due, tokens in looks:
            self[request_id] = due
            self._quiet = min(self._quiet, due - tokens + self.patience)

    def at_once(self, request_id: str) -> None:
        """Let a request be due in the next step in which it runs."""
        self[request_id] = self._quiet = 0

    def clear(self) -> None:
        """Let all requests be due in the next step in which they run."""
        for request_id in self:
            self[request_id] = 0
        self._quiet = 0

    def is_nobody(self, most: int) -> bool:
        """Return whether nobody needs a look in a step that lets none advance by more."""
        self._quiet -= most
        return self._quiet > 0

    def are_short_by(self, tokens: int, num_known: int) -> bool:
        """
        Return whether requests that were looked through need no look yet.

        Args:
            tokens: By so many, at the least, they are short of being due.
            num_known: How many of them are known here; of the others nothing was seen.
        """
        quiet = tokens + self.patience
        if quiet > 0:
            self._quiet = quiet if num_known == len(self) else 0
        return quiet > 0
