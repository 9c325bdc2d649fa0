# SPDX-License-Identifier: Apache-2.0
"""A store around a store; the base of everything that adds to one."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace, PackedKey
from ucm.fates import Fate, Told
from ucm.stores.abc import (
    Changes,
    Cursor,
    ReadLease,
    Store,
    StoreCapabilities,
    StoreGrowth,
    StoreStats,
    WriteLease,
)
from ucm.uses import Uses

__all__ = ["WrapperStore"]


class WrapperStore(Store):
    """
    Forwards every verb; subclasses override what they change.

    Args:
        inner: The store to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the inner store can do."""
        return self.inner.capabilities

    @property
    def buffers(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The inner store's."""
        return self.inner.buffers

    @property
    def directory(self) -> Path | None:
        """The inner store's."""
        return self.inner.directory

    def watch(self, tell: Callable[[StoreGrowth], None]) -> None:
        """Forward."""
        self.inner.watch(tell)

    def hash_on(self, most_threads: int) -> None:
        """Forward."""
        self.inner.hash_on(most_threads)

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Forward."""
        return self.inner.match(keys)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Forward."""
        return self.inner.contains(keys)

    def fates(self, keys: Sequence[PackedKey]) -> list[Told]:
        """Forward."""
        return self.inner.fates(keys)

    def everywhere(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Forward."""
        return self.inner.everywhere(keys)

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Forward."""
        self.inner.touch(keys, uses)

    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> WriteLease:
        """Forward."""
        return self.inner.reserve(keys, block_bytes, uses)

    def read(self, keys: Sequence[PackedKey]) -> ReadLease:
        """Forward."""
        return self.inner.read(keys)

    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """Forward."""
        return self.inner.forget(keys, fate)

    def clear(self, prefix: bytes) -> int:
        """Forward."""
        return self.inner.clear(prefix)

    def describe(self, keyspace: KeySpace) -> None:
        """Forward."""
        self.inner.describe(keyspace)

    def keyspaces(self) -> dict[bytes, KeySpace]:
        """Forward."""
        return self.inner.keyspaces()

    def changes(self, cursor: Cursor | None) -> Changes:
        """Forward."""
        return self.inner.changes(cursor)

    def stats(self) -> StoreStats:
        """Forward."""
        return self.inner.stats()

    def close(self) -> None:
        """Forward."""
        self.inner.close()
