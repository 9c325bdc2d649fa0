# SPDX-License-Identifier: Apache-2.0
"""
When requests are to be looked at again. Pure.

Beside the number of each request stands one that holds for all of them: a step that lets
none advance as far needs no look at any. Most steps of an engine that decodes are such.
"""

__all__ = ["Due"]


class Due(dict[str, int]):
    """
    By request, from how many tokens on a step must tell of it; of others, always.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_quiet",)

    def __init__(self) -> None:
        super().__init__()
        self._quiet = 0
        """By so many tokens, at the least, all are short of being due."""

    def put(self, request_id: str, due: int, tokens: int) -> None:
        """Take note of when a request is due that has so many tokens now."""
        self[request_id] = due
        self._quiet = min(self._quiet, due - tokens)

    def at_once(self, request_id: str) -> None:
        """Let a request be due in the next step in which it runs."""
        self.put(request_id, 0, 0)

    def clear(self) -> None:
        """Let all requests be due in the next step in which they run."""
        for request_id in self:
            self[request_id] = 0
        self._quiet = 0

    def is_nobody(self, most: int) -> bool:
        """Return whether nobody is due in a step that lets none advance by more."""
        self._quiet -= most
        return self._quiet > 0

    def all_short_by(self, tokens: int, num_known: int) -> None:
        """
        Take note that requests that were looked through are short of being due.

        Args:
            tokens: By so many, at the least.
            num_known: How many of them are known here; of the others nothing was seen.
        """
        self._quiet = tokens if num_known == len(self) else 0
