# SPDX-License-Identifier: Apache-2.0
"""
Blocks that threads are putting, also where whoever asked for that has gone.

What lands behind its deletion is there again once it was told to be forgotten. So who deletes waits.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

from ucm.blocks import PackedKey

__all__ = ["Puts"]

_LOOK_S: Final = 0.1
"""Between looks whether who asked has gone."""
_PUT_S: Final = 60.0
"""So long a deletion waits for a put; a request may be given any time."""


class Puts:
    """Those of one backend; any thread."""

    def __init__(self) -> None:
        self._keys = Counter[PackedKey]()
        self._ended = threading.Condition()

    @contextlib.contextmanager
    def putting(self, keys: Collection[PackedKey]) -> Iterator[None]:
        """Have it known that blocks are being put."""
        with self._ended:
            self._keys.update(keys)
        try:
            yield
        finally:
            with self._ended:
                self._keys -= Counter(keys)
                self._ended.notify_all()

    def await_end(self, key: PackedKey, is_left: Callable[[], bool]) -> bool:
        """
        Wait until nobody puts a block, a request's time as a rule.

        Args:
            key: Of the block.
            is_left: Whether who asked has gone: it is waited for no more.

        Returns:
            Whether nobody does.
        """
        until = time.monotonic() + _PUT_S
        with self._ended:
            while key in self._keys and not is_left() and time.monotonic() < until:
                self._ended.wait(_LOOK_S)
            return key not in self._keys and not is_left()
