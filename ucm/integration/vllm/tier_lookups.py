# SPDX-License-Identifier: Apache-2.0
"""
What a store has of the keys that requests ask for, without waiting for it.

The engine asks key by key, and again in each step until it has an answer. What is new in a
step is asked together at its end, one question at a time. All of a step sees the same
answers: the engine fetches what lies behind a block that is not known yet, in vain if
that one turns out to be missing. An answer stays as long as a request that asked for
the key and does not run yet: a block whose load failed is *missed* by all of them, or
the engine would try it for ever. Beyond that what was missing may have been stored.

Where there are tiers below the store, they are asked for what a request has not found in it,
from the start of its prompt on. Until they have answered nothing is known of the first
missing block and those behind it.

Threading: the engine's scheduler thread alone.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import attrs

from ucm.cache.sync import Answer, Fetching
from ucm.errors import UCMError

__all__ = ["Lookups"]


@attrs.frozen(eq=False)
class _Question:
    """
    What the store was asked.

    Args:
        askers: Of each key one request that asked for it.
        answer: To come.
        since: When it was asked.
    """

    askers: Mapping[bytes, str]
    answer: Answer
    since: float


@attrs.frozen(eq=False)
class _Coming:
    """
    What tiers were asked for.

    Args:
        request_id: For whom.
        stored: Its keys in order, and whether the store has them.
        fetching: What is under way.
    """

    request_id: str
    stored: Mapping[bytes, bool]
    fetching: Fetching


class Lookups:
    """
    Answers for the requests that are there.

    Args:
        ask: Begins a question to the store; raises ``UCMError`` if it cannot.
        clock: In seconds.
        fetch: Has tiers asked for keys in order, for a request that began to ask at a
            moment; raises ``UCMError`` if it cannot. None: there are no tiers.
    """

    def __init__(
        self,
        ask: Callable[[list[bytes]], Answer],
        clock: Callable[[], float],
        fetch: Callable[[list[bytes], float], Fetching] | None = None,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._fetch = fetch
        self._found: dict[bytes, bool | None] = {}  # None: not known yet
        self._users: dict[bytes, int] = {}
        self._keys: dict[str, dict[bytes, int]] = {}  # by request, with their places
        self._new: dict[bytes, str] = {}
        self._asked: _Question | None = None
        self._coming: list[_Coming] = []
        self._has_looked = False  # for answers, in this step
        self._quiet_until = 0.0

    def __len__(self) -> int:
        """Keys of which something is kept."""
        return len(self._found)

    def find(
        self,
        key: bytes,
        request_id: str,
        place_of: Callable[[bytes], int | None] = lambda _: 0,
    ) -> bool | None:
        """
        Return whether a block is stored; None while that is not known.

        Args:
            key: Of the block.
            request_id: Who asks.
            place_of: Where in the request's prompt a block ends.
        """
        keys = self._keys.setdefault(request_id, {})
        if key not in keys:
            keys[key] = place_of(key) or 0
            self._users[key] = self._users.get(key, 0) + 1
            if key not in self._found:
                self._found[key] = None
                self._new[key] = request_id
        if self._found[key] is None and not self._has_looked:
            self._has_looked = True
            self._take_answers()
        return self._found[key]

    def end_step(self) -> None:
        """Ask what is new, unless a question is open."""
        self._has_looked = False
        self._take_answers()
        if self._asked is not None:
            return
        new = {key: name for key, name in self._new.items() if key in self._found}
        self._new.clear()
        if not new:
            return
        now = self._clock()
        if now >= self._quiet_until:
            with suppress(UCMError):  # it is closed
                self._asked = _Question(new, self._ask(list(new)), now)
                return
        self._note(dict.fromkeys(new, False))

    def missed(self, keys: Iterable[bytes]) -> None:
        """Say that blocks could not be had, whatever was found before."""
        self._found.update((key, False) for key in keys if key in self._found)

    def rest(self, seconds: float) -> None:
        """Ask nothing for a while; what is new is not found."""
        self._quiet_until = self._clock() + seconds

    def release(self, request_id: str) -> None:
        """Take note that a request runs or has ended; what is fetched for it alone is given up."""
        for key in self._keys.pop(request_id, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._found[key]
        gone = [each for each in self._coming if each.request_id == request_id]
        for coming in gone:
            self._coming.remove(coming)
            coming.fetching.give_up()
            heir = request_id
            for key in coming.stored:
                if self._found.get(key, 0) is None:
                    heir = self._new[key] = self._asker(key, heir)

    def close(self) -> None:
        """Want nothing any more."""
        for name in list(self._keys):
            self.release(name)

    def _asker(self, key: bytes, name: str) -> str:
        """
        Return a request that asks for a key which somebody does: that one, if it does.

        Others are looked through: of keys in a row, try who asks for the one before.
        """
        if key in self._keys.get(name, ()):
            return name
        return next(each for each, keys in self._keys.items() if key in keys)

    def _take_answers(self) -> None:
        question = self._asked
        if question is not None and question.answer.is_over:
            self._asked = None
            self._take(question)
        over = [each for each in self._coming if each.fetching.is_over]
        for coming in over:
            self._coming.remove(coming)
            found = 0
            with suppress(UCMError):  # it was closed
                found = coming.fetching.result().found
            stored = enumerate(coming.stored.items())
            self._note({key: at < found or was for at, (key, was) in stored})

    def _take(self, question: _Question) -> None:
        """Note what the store has, and have tiers asked for the rest."""
        askers, answer = question.askers, question.answer
        if answer.error is not None:  # whatever a store may raise
            self._note(dict.fromkeys(askers, False))
            return
        stored = dict(zip(askers, answer.result(), strict=True))
        if self._fetch is None or self._clock() < self._quiet_until:
            self._note(stored)
            return
        requests: dict[str, list[bytes]] = {}
        heirs: dict[str, str] = {}
        for key, name in askers.items():
            if key in self._found:
                heir = heirs[name] = self._asker(key, heirs.get(name, name))
                requests.setdefault(heir, []).append(key)
        for name, keys in requests.items():
            keys.sort(key=self._keys[name].__getitem__)
            missing = next((at for at, key in enumerate(keys) if not stored[key]), None)
            self._note(dict.fromkeys(keys[:missing], True))
            if missing is not None:
                own = {key: stored[key] for key in keys}
                try:
                    fetching = self._fetch(keys, question.since)
                except UCMError:  # it is closed
                    self._note(own)
                    continue
                self._coming.append(_Coming(name, own, fetching))

    def _note(self, found: Mapping[bytes, bool]) -> None:
        for key, is_there in found.items():
            if self._found.get(key, False) is None:
                self._found[key] = is_there
