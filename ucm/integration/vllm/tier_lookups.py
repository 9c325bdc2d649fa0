# SPDX-License-Identifier: Apache-2.0
"""
What a store has of the keys that requests ask for, without waiting for it.

The engine asks key by key, and again in each step until it has an answer. What is new in a
step is asked together at its end, one question at a time. All of a step sees the same
answers: the engine fetches what lies behind a block that is not known yet, in vain if
that one turns out to be missing. An answer stays as long as a request that asked for
the key: a block whose load failed is *missed* by all of them, or
the engine would try it for ever.

Threading: the engine's scheduler thread alone.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

from ucm.cache.sync import Answer
from ucm.errors import UCMError

__all__ = ["Lookups"]


class Lookups:
    """
    Answers for the requests that are there.

    Args:
        ask: Begins a question to the store; raises ``UCMError`` if it cannot.
        clock: In seconds.
    """

    def __init__(
        self, ask: Callable[[list[bytes]], Answer], clock: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._found: dict[bytes, bool | None] = {}  # None: not known yet
        self._users: dict[bytes, int] = {}
        self._keys: dict[str, set[bytes]] = {}  # by request
        self._new: dict[bytes, None] = {}
        self._asked: tuple[list[bytes], Answer] | None = None
        self._has_looked = False  # for an answer, in this step
        self._quiet_until = 0.0

    def __len__(self) -> int:
        """Keys of which something is kept."""
        return len(self._found)

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Return whether a block is stored; None while that is not known."""
        keys = self._keys.setdefault(request_id, set())
        if key not in keys:
            keys.add(key)
            self._users[key] = self._users.get(key, 0) + 1
            if key not in self._found:
                self._found[key] = None
                self._new[key] = None
        if self._found[key] is None and not self._has_looked:
            self._has_looked = True
            self._take_answer()
        return self._found[key]

    def end_step(self) -> None:
        """Ask what is new, unless a question is open."""
        self._has_looked = False
        self._take_answer()
        if self._asked is not None:
            return
        keys = [key for key in self._new if key in self._found]
        self._new.clear()
        if not keys:
            return
        if self._clock() >= self._quiet_until:
            with suppress(UCMError):  # it is closed
                self._asked = keys, self._ask(keys)
                return
        self._note(keys, [False] * len(keys))

    def missed(self, keys: Iterable[bytes]) -> None:
        """Say that blocks could not be had, whatever was found before."""
        self._found.update((key, False) for key in keys if key in self._found)

    def rest(self, seconds: float) -> None:
        """Ask nothing for a while; what is new is not found."""
        self._quiet_until = self._clock() + seconds

    def release(self, request_id: str) -> None:
        """Take note that a request has ended."""
        for key in self._keys.pop(request_id, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._found[key]

    def _take_answer(self) -> None:
        if self._asked is None:
            return
        keys, answer = self._asked
        if not answer.is_over:
            return
        self._asked = None
        failed = answer.error is not None  # whatever a store may raise
        self._note(keys, [False] * len(keys) if failed else answer.result())

    def _note(self, keys: list[bytes], found: list[bool]) -> None:
        for key, is_there in zip(keys, found, strict=True):
            if self._found.get(key, False) is None:
                self._found[key] = is_there
