# SPDX-License-Identifier: Apache-2.0
"""A backend that is watched: of which blocks it is told that they come, and that they go."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ucm.backends.abc import Backend, Fetched, Presence, Sealed, Verdict
from ucm.backends.wrap import WrapperBackend
from ucm.blocks import PackedKey

__all__ = ["WatchedBackend"]

_IS_THERE = {
    Presence.PRESENT: True,
    Presence.ABSENT: False,
    Verdict.DONE: True,
    Verdict.PRESENT: True,
    Verdict.ABSENT: False,
    Verdict.GARBAGE: False,
}
"""What an answer says of a block; others say nothing."""


class WatchedBackend(WrapperBackend):
    """
    Tells of blocks as its inner backend does, or else by its answers.

    What others put and remove is seen when somebody asks for it. Of a removal that got no
    answer it is told, so that nobody counts on the block; nor is an answer believed that may
    be older than it.

    Args:
        inner: The backend to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._tell: Callable[[PackedKey, bool], None] | None = None
        self._removed: list[set[PackedKey]] = []
        """Of each call under way, what was removed since it began."""

    def watch(self, tell: Callable[[PackedKey, bool], None]) -> Sequence[PackedKey]:
        """Tell from now on; return what is there, as far as that is known."""
        found = self.inner.watch(tell)
        if found is None:
            self._tell = tell
            return ()
        return found

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Forward, and tell."""
        with self._asking() as removed:
            told = await self.inner.exists(keys)
        self._conclude(keys, [_IS_THERE.get(each) for each in told], removed)
        return told

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Forward, and tell."""
        with self._asking() as removed:
            told = await self.inner.get(keys, targets)
        self._conclude(keys, [_IS_THERE.get(each.verdict) for each in told], removed)
        return told

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Forward, and tell."""
        with self._asking() as removed:
            told = await self.inner.put(blocks)
        keys = [block.key for block in blocks]
        self._conclude(keys, [_IS_THERE.get(each) for each in told], removed)
        return told

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Forward, and tell before that: whoever is asked to remove may do it any time."""
        for removed in self._removed:
            removed.update(keys)
        self._conclude(keys, [False] * len(keys), set())
        return await self.inner.delete(keys)

    @contextmanager
    def _asking(self) -> Iterator[set[PackedKey]]:
        """Gather what is removed while a call is under way."""
        removed: set[PackedKey] = set()
        self._removed.append(removed)
        try:
            yield removed
        finally:
            self._removed = [each for each in self._removed if each is not removed]

    def _conclude(
        self,
        keys: Sequence[PackedKey],
        are_there: Sequence[bool | None],
        removed: set[PackedKey],
    ) -> None:
        if self._tell is None:
            return
        for key, is_there in zip(keys, are_there, strict=True):
            if is_there is not None and not (is_there and key in removed):
                self._tell(key, is_there)
