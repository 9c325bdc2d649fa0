# SPDX-License-Identifier: Apache-2.0
"""A backend that is watched: of which blocks it is told that they come, and that they go."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ucm.backends.abc import Backend, Fetched, Presence, Sealed, Verdict
from ucm.backends.wrap import WrapperBackend
from ucm.blocks import PackedKey

__all__ = ["WatchedBackend"]

_IS_THERE: dict[Presence | Verdict, bool] = {
    Presence.PRESENT: True,
    Presence.ABSENT: False,
    Verdict.DONE: True,
    Verdict.PRESENT: True,
    Verdict.ABSENT: False,
    Verdict.GARBAGE: False,
}
"""What an answer says of a block; others say nothing."""


class _Meanwhile(NamedTuple):
    """What has become of blocks since a call began: its answer may be older than that."""

    removed: set[PackedKey]
    put: set[PackedKey]


class WatchedBackend(WrapperBackend):
    """
    Tells of blocks as its inner backend does, or else by its answers.

    What others put and remove is seen when somebody asks for it. Of a removal that got no
    answer it is told, so that nobody counts on the block. An answer that may be older than a
    removal is no word that the block is there; one that may be older than the end of a put is
    none that it is not.

    Args:
        inner: The backend to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._tell: Callable[[PackedKey, bool], None] | None = None
        self._under_way: list[_Meanwhile] = []
        """One for each call."""

    def watch(self, tell: Callable[[PackedKey, bool], None]) -> Sequence[PackedKey]:
        """Tell from now on; return what is there, as far as that is known."""
        found = self.inner.watch(tell)
        if found is None:
            self._tell = tell
            return ()
        return found

    @property
    def is_told(self) -> bool:
        """Whether its inner backend tells of all that comes and goes, once it is watched."""
        return self._tell is None

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Forward, and tell."""
        with self._asking() as meanwhile:
            told = await self.inner.exists(keys)
        self._conclude(keys, told, meanwhile)
        return told

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Forward, and tell."""
        with self._asking() as meanwhile:
            told = await self.inner.get(keys, targets)
        self._conclude(keys, [each.verdict for each in told], meanwhile)
        return told

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Forward, and tell."""
        with self._asking() as meanwhile:
            told = await self.inner.put(blocks)
        keys = [block.key for block in blocks]
        are_there = map(_IS_THERE.get, told)
        stored = set(itertools.compress(keys, are_there))
        for _, put in self._under_way:
            put.update(stored)
        self._conclude(keys, told, meanwhile)
        return told

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Forward, and tell before that: whoever is asked to remove may do it any time."""
        for removed, _ in self._under_way:
            removed.update(keys)
        gone = [Presence.ABSENT] * len(keys)
        self._conclude(keys, gone, _Meanwhile(set(), set()))
        return await self.inner.delete(keys)

    @contextmanager
    def _asking(self) -> Iterator[_Meanwhile]:
        """Gather what is put and removed while a call is under way."""
        meanwhile = _Meanwhile(set(), set())
        self._under_way.append(meanwhile)
        try:
            yield meanwhile
        finally:
            self._under_way = [
                each for each in self._under_way if each is not meanwhile
            ]

    def _conclude(
        self,
        keys: Sequence[PackedKey],
        told: Sequence[Presence | Verdict],
        meanwhile: _Meanwhile,
    ) -> None:
        if self._tell is None:
            return
        for key, is_there in zip(keys, map(_IS_THERE.get, told), strict=True):
            is_old = key in (meanwhile.removed if is_there else meanwhile.put)
            if is_there is not None and not is_old:
                self._tell(key, is_there)
