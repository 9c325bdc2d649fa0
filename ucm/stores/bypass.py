# SPDX-License-Identifier: Apache-2.0
"""
A store that is not asked for a while after it has not answered, or not in time.

Look-ups run on the engine's scheduler thread, for each request that waits, again in each
step. A store whose look-ups fail only after a wait, or are slow, would hold up every
step. After three bad answers among the last eight it is *bypassed*: look-ups fail at
once, which is a miss. When the time is up a single look-up tries again; if it is bad too,
the next time is twice as long.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.metrics import Counters
from ucm.reasons import Reason
from ucm.stores.abc import Store
from ucm.stores.wrap import WrapperStore
from ucm.threads import SYSTEM
from ucm.tracing import STORE_ANSWERS, STORE_BYPASSED, Log

__all__ = ["BypassStore"]

_LAST, _MOST_BAD = 8, 3
_SLOW_S = 0.05
_SLOW_PER_KEY_S = 2e-6
"""Beyond the former; twice what an index needs that is well."""
_FIRST_S, _LONGEST_S = 1.0, 30.0

_T = TypeVar("_T")


class BypassStore(WrapperStore):
    """
    Asks a store's index only while it answers.

    Threading: for one thread, the one that looks up.

    Args:
        inner: The store; closed with this one.
        counters: Where bad answers and look-ups that were not made are counted.
        log: Told when the store is bypassed and when it answers again.
        clock: In seconds.
    """

    def __init__(
        self,
        inner: Store,
        *,
        counters: Counters,
        log: Log,
        clock: Callable[[], float] = SYSTEM.monotonic,
    ) -> None:
        super().__init__(inner)
        self._counters = counters
        self._log = log
        self._clock = clock
        self._bad: deque[bool] = deque(maxlen=_LAST)
        self._until = 0.0
        self._bypassed_s = 0.0
        """How long the last time was; 0 while the store answers."""

    @property
    def is_bypassed(self) -> bool:
        """Whether the store has not answered well since it was bypassed."""
        return self._bypassed_s > 0

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Ask, unless the store is bypassed; StoreUnavailableError then."""
        return self._ask(super().match, keys)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Ask, unless the store is bypassed; StoreUnavailableError then."""
        return self._ask(super().contains, keys)

    def touch(self, keys: Sequence[PackedKey]) -> None:
        """Mark, unless the store is bypassed; StoreUnavailableError then."""
        self._ask(super().touch, keys)

    def _ask(
        self, look: Callable[[Sequence[PackedKey]], _T], keys: Sequence[PackedKey]
    ) -> _T:
        started = self._clock()
        if started < self._until:
            self._counters.add("ucm_bypassed_lookups_total", 1)
            raise StoreUnavailableError(
                f"the store is not asked for another {self._until - started:.1f} s"
            )
        try:
            answer = look(keys)
        except StoreUnavailableError as exc:
            self._judge(Reason.UNAVAILABLE, str(exc))
            raise
        took = self._clock() - started
        is_slow = took > _SLOW_S + _SLOW_PER_KEY_S * len(keys)
        self._judge(
            Reason.SLOW if is_slow else Reason.NONE,
            f"{len(keys)} keys took {took:.3f} s",
        )
        return answer

    def _judge(self, trouble: Reason, text: str) -> None:
        """Take note of an answer, and of what was wrong with it."""
        self._bad.append(bool(trouble))
        if not trouble:
            if self._bypassed_s:
                self._bypassed_s = 0.0
                self._log.info(STORE_ANSWERS)
            return
        self._counters.add("ucm_failed_lookups_total", 1, reason=trouble)
        if self._bypassed_s or sum(self._bad) >= _MOST_BAD:
            self._bypassed_s = min(max(2 * self._bypassed_s, _FIRST_S), _LONGEST_S)
            self._until = self._clock() + self._bypassed_s
            self._bad.clear()
            self._log.warning(
                STORE_BYPASSED, reason=trouble, error=text, seconds=self._bypassed_s
            )
