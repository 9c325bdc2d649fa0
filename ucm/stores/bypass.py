# SPDX-License-Identifier: Apache-2.0
"""
A store that is not asked for a while after it has not answered, or not in time.

Look-ups run on the engine's scheduler thread, for each request that waits, again in each
step. A store whose look-ups fail only after a wait, or are slow, would hold up every
step. After three bad answers among the last eight it is *bypassed*: look-ups fail at
once, which is a miss. When the time is up a single look-up tries again; if it is bad too,
the next time is twice as long.

A store may answer look-ups and still not give its blocks: then each hit costs a request
the whole deadline of its load. So loads count as well, by rank, as their ends are told.
After three among a rank's last eight that the store kept waiting or did not answer, it
is bypassed in the same way. Behind that time the first request that hits tries it; until
its load has ended on all ranks that had trouble, the others are misses.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from ucm.blocks import PackedKey
from ucm.errors import StoreBypassedError, StoreError, StoreUnavailableError, text_of
from ucm.metrics import Counters
from ucm.reasons import Reason
from ucm.stores.abc import Store
from ucm.stores.leases import told_count, told_each
from ucm.stores.wrap import WrapperStore
from ucm.threads import SYSTEM
from ucm.tracing import STORE_ANSWERS, STORE_BYPASSED, Log

__all__ = ["BypassStore"]

_LAST, _MOST_BAD = 8, 3
_SLOW_S = 0.05
_SLOW_PER_KEY_S = 2e-6
"""Beyond the former; twice what an index needs that is well."""
_FIRST_S, _LONGEST_S = 1.0, 30.0

_KEPT_WAITING: Final = (Reason.DEADLINE, Reason.UNAVAILABLE, Reason.STORE_HUNG)
"""Ends of loads for which the store is to blame, and no single block."""
_ANSWERED: Final = (Reason.NONE, Reason.EVICTED, Reason.CORRUPT)
"""Ends of loads for which the store gave what it had; others say nothing about it."""


@attrs.define
class _Pause:
    """
    How long nobody asks.

    Args:
        until: On the clock.
        seconds: How long the last time was; 0 while all is well.
    """

    until: float = 0.0
    seconds: float = 0.0

    def begin(self, now: float) -> None:
        """Pause, twice as long as the last time if nothing was well since."""
        self.seconds = min(max(2 * self.seconds, _FIRST_S), _LONGEST_S)
        self.until = now + self.seconds


def _asks(verb: str) -> Callable[..., Any]:
    """Return what asks the inner store, in one call: it costs each new request one."""
    counts, tells_each = verb == "match", verb == "contains"

    def ask(self: "BypassStore", keys: Sequence[PackedKey], *more: object) -> Any:  # noqa: ANN401 - the verb's answer
        """Ask, unless the store is bypassed; StoreBypassedError then."""
        num_keys, started = len(keys), self._clock()
        if started < self._lookups.until or started < self._loads.until:
            until = max(self._lookups.until, self._loads.until)
            self._counters.add("ucm_bypassed_lookups_total", 1)
            raise StoreBypassedError(
                f"the store is not asked for another {until - started:.1f} s"
            )
        try:
            answer = getattr(self.inner, verb)(keys, *more)
            is_plain = type(answer) is (int if counts else list)  # a call less
            if counts and not (is_plain and 0 <= answer <= num_keys):
                answer = told_count(verb, answer, num_keys)
            elif tells_each and not (is_plain and len(answer) == num_keys):
                answer = told_each(verb, answer, num_keys)
        except (KeyboardInterrupt, SystemExit):  # the engine's own, by a signal
            raise
        except BaseException as exc:  # it would end the engine
            is_ours = type(exc) is StoreUnavailableError
            told = str(exc) if is_ours else text_of(exc)
            self._judge(Reason.UNAVAILABLE, told)
            if isinstance(exc, StoreUnavailableError):
                raise
            raise StoreUnavailableError(told) from exc
        took = self._clock() - started
        if took > _SLOW_S + _SLOW_PER_KEY_S * num_keys:
            self._judge(Reason.SLOW, f"{num_keys} keys took {took:.3f} s")
            return answer
        self._bad.append(False)
        if self._lookups.seconds:
            self._end(self._lookups)
        return answer

    return ask


def _has(verb: str) -> Callable[..., Any]:
    """Return what has the inner store do what nobody waits for, bypassed or not."""

    def have(self: "BypassStore", *given: object) -> Any:  # noqa: ANN401 - the verb's answer
        """Have it done; StoreUnavailableError for whatever a store of others raises."""
        try:
            return getattr(self.inner, verb)(*given)
        except (KeyboardInterrupt, SystemExit, StoreError):
            raise
        except BaseException as exc:  # it would end the engine, or a thread of it
            raise StoreUnavailableError(text_of(exc)) from exc

    return have


class BypassStore(WrapperStore):
    """
    Asks a store's index only while it answers, and loads from it do not hang.

    Threading: for one thread, the one that looks up and hears of loads; what neither asks nor
    hears is forwarded on any.

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
        self.fates = inner.fates  # type: ignore[method-assign]  # no call more: asked in each life
        self._counters = counters
        self._log = log
        self._clock = clock
        self._bad: deque[bool] = deque(maxlen=_LAST)
        self._lookups = _Pause()
        self._bad_loads: dict[int, deque[bool]] = {}
        self._loads = _Pause()
        self._is_tried = False
        """Behind a pause of loads, one was begun."""
        self._troubled: set[int] = set()
        """Ranks whose loads have not ended well since they did not."""
        self._failed: set[tuple[int, int]] = set()
        """Rank and number of loads that failed and are not done."""

    @property
    def is_bypassed(self) -> bool:
        """Whether the store has not answered well since it was bypassed."""
        return self._lookups.seconds + self._loads.seconds > 0

    match = _asks("match")
    contains = _asks("contains")
    touch = _asks("touch")
    describe, keyspaces = _has("describe"), _has("keyspaces")
    forget = _has("forget")

    def _judge(self, trouble: Reason, text: str) -> None:
        """Take note of a bad answer, and of what was wrong with it."""
        self._bad.append(True)
        self._counters.add("ucm_failed_lookups_total", 1, reason=trouble)
        if self._lookups.seconds or sum(self._bad) >= _MOST_BAD:
            self._bad.clear()
            self._begin(self._lookups, trouble, text)

    # Loads.

    def load_begun(self) -> None:
        """Take note that a load was ordered: behind a pause no other one is tried."""
        now = self._clock()
        if self._loads.seconds and now >= self._loads.until:
            self._is_tried = True
            self._loads.until = now + _LONGEST_S  # should its end not be told

    def loads_ended(
        self, rank: int, failures: Mapping[int, Reason], done: Iterable[int]
    ) -> None:
        """
        Take note of what became of loads on one rank.

        Args:
            rank: Which.
            failures: Why loads failed, by number; each is told once.
            done: Numbers of loads that are through, failed ones included.
        """
        for number, reason in failures.items():
            self._failed.add((rank, number))
            self._judge_load(rank, reason)
        for number in done:
            if (rank, number) in self._failed:
                self._failed.remove((rank, number))
            else:
                self._judge_load(rank, Reason.NONE)

    def _judge_load(self, rank: int, reason: Reason) -> None:
        is_bad, now = reason in _KEPT_WAITING, self._clock()
        if is_bad:
            self._troubled.add(rank)
        if now < self._loads.until and not self._is_tried:
            return  # it was begun before the pause
        if not (is_bad or reason in _ANSWERED):
            self._is_tried = False
            self._loads.until = min(self._loads.until, now)  # another one is to try
            return
        bad = self._bad_loads.setdefault(rank, deque(maxlen=_LAST))
        bad.append(is_bad)
        if not is_bad:
            self._troubled.discard(rank)
            if not self._troubled:
                self._is_tried = False
                if self._loads.seconds:
                    self._end(self._loads)
        elif self._loads.seconds or sum(bad) >= _MOST_BAD:
            self._bad_loads.clear()
            self._is_tried = False
            self._begin(self._loads, reason, f"loads of rank {rank} fail")

    def _begin(self, pause: _Pause, reason: str, text: str) -> None:
        pause.begin(self._clock())
        self._log.warning(
            STORE_BYPASSED, reason=reason, error=text, seconds=pause.seconds
        )

    def _end(self, pause: _Pause) -> None:
        pause.seconds = pause.until = 0.0
        self._log.info(STORE_ANSWERS)
