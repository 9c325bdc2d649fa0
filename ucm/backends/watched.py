# SPDX-License-Identifier: Apache-2.0
"""A backend that is watched: of which blocks it is told that they come, and that they go."""

from collections.abc import Callable, Sequence

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
    answer it is told, so that nobody counts on the block.

    Args:
        inner: The backend to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._tell: Callable[[PackedKey, bool], None] | None = None

    def watch(self, tell: Callable[[PackedKey, bool], None]) -> Sequence[PackedKey]:
        """Tell from now on; return what is there, as far as that is known."""
        found = self.inner.watch(tell)
        if found is None:
            self._tell = tell
            return ()
        return found

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Forward, and tell."""
        told = await self.inner.exists(keys)
        self._conclude(keys, [_IS_THERE.get(each) for each in told])
        return told

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Forward, and tell."""
        told = await self.inner.get(keys, targets)
        self._conclude(keys, [_IS_THERE.get(each.verdict) for each in told])
        return told

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Forward, and tell."""
        told = await self.inner.put(blocks)
        keys = [block.key for block in blocks]
        self._conclude(keys, [_IS_THERE.get(each) for each in told])
        return told

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Forward, and tell before that: whoever is asked to remove may do it any time."""
        self._conclude(keys, [False] * len(keys))
        return await self.inner.delete(keys)

    def _conclude(
        self, keys: Sequence[PackedKey], are_there: Sequence[bool | None]
    ) -> None:
        if self._tell is None:
            return
        for key, is_there in zip(keys, are_there, strict=True):
            if is_there is not None:
                self._tell(key, is_there)
