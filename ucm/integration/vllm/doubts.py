# SPDX-License-Identifier: Apache-2.0
"""
What the scheduler's half does when the engine's weights may have changed.

``ucm.scheduler.weights`` says what is known; here the engine is watched, requests are
kept waiting for a moment, and people are told.

Threading: all of it runs on the engine's scheduler thread, and nothing waits.
"""

import functools
import secrets
from collections.abc import Callable

from ucm.metrics import Counters
from ucm.scheduler.messages import WeightsNews
from ucm.scheduler.weights import Weights, WeightsState
from ucm.tracing import (
    WEIGHTS_DOUBTED,
    WEIGHTS_MIXED,
    WEIGHTS_PROVEN,
    WEIGHTS_UNREADABLE,
    Log,
)

__all__ = ["Doubts", "OwnCache"]

_ASK_AGAIN_S = 0.2
"""How long requests wait for the weights to be read; small models need one step."""
_MIXED = (
    "The weights changed, or may have before they were read, and the engine's own cache "
    "still has blocks of before: nothing is found or saved until reset_prefix_cache() "
    "succeeds, as it does when no request runs."
)
_UNREADABLE = (
    "A rank cannot read its weights, so nothing proves that they are what they were: "
    "what was stored before is not found. See docs/weights.md."
)


class OwnCache:
    """
    The engine's own prefix cache, of which is seen whether it was emptied.

    No release tells a connector. All of them put a new, empty map in the place of
    ``cached_block_hash_to_block`` when the cache is reset, and only then.

    Args:
        block_pool: vLLM's BlockPool; None where there is none.
    """

    def __init__(self, block_pool: object) -> None:
        self._pool = block_pool
        self._seen: object = None
        self.was_emptied()

    def was_emptied(self) -> bool:
        """Return whether it was emptied since the last call."""
        before = self._seen
        self._seen = getattr(self._pool, "cached_block_hash_to_block", None)
        return self._seen is not before


class Doubts:
    """
    Decides whether blocks may be found and saved, and under which name of weights.

    Args:
        num_ranks: Workers that each hold a part of the weights.
        clock: In seconds.
        counters: Told what there is.
        log: Told of every doubt and of its end.
        on_doubt: Stops finding and saving; called with the number of the doubt, which
            every further plan has to carry.
        on_proof: Goes on; called with the name of the weights, which is empty while
            they are those of the start.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        clock: Callable[[], float],
        counters: Counters,
        log: Log,
        on_doubt: Callable[[int], None],
        on_proof: Callable[[str], None],
    ) -> None:
        self._weights = Weights(num_ranks, functools.partial(secrets.token_hex, 8))
        self._clock = clock
        self._counters = counters
        self._log = log
        self._on_doubt = on_doubt
        self._on_proof = on_proof
        self._own_cache = OwnCache(None)
        self._asked_at: float | None = None
        self.awaits_plan = True
        """Whether ``sent`` has anything to take note of."""
        counters.set("ucm_weights_proven", 1)

    @property
    def name(self) -> str | None:
        """Name of the weights, empty for those of the start; None while in doubt."""
        if self._weights.state is WeightsState.PROVEN:
            return self._weights.name
        return None

    @property
    def may_end_soon(self) -> bool:
        """Whether a request had better ask again than be computed."""
        if self._weights.state is not WeightsState.ASKED:
            return False
        asked_at = self._asked_at  # an idle engine asks with its next step
        return asked_at is None or self._clock() - asked_at < _ASK_AGAIN_S

    def watch(self, block_pool: object) -> None:
        """Take the engine's block pool, which shows when its cache was emptied."""
        self._own_cache = OwnCache(block_pool)

    def look(self) -> bool:
        """
        Notice that the engine's own cache was emptied, as it is after new weights.

        Returns:
            Whether it is about to be known what they are, see ``may_end_soon``.
        """
        if self._own_cache.was_emptied():
            self._doubt("own cache emptied", emptied=True)
        return self._weights.state is WeightsState.ASKED and self.may_end_soon

    def reset(self) -> None:
        """Take note that the engine has its connector reset, for whatever reason."""
        self._doubt("reset", emptied=self._own_cache.was_emptied())

    def sent(self, *, in_use: bool) -> None:
        """
        Take note that a plan with the latest number went out.

        Args:
            in_use: Requests have blocks, which the engine's own cache may have as well.
        """
        self.awaits_plan = self._weights.sent(in_use=in_use)
        if self._asked_at is None:
            self._asked_at = self._clock()

    def told(self, rank: int, news: WeightsNews) -> None:
        """Take note of what a rank knows of its weights."""
        if not self._weights.told(rank, news):
            return
        if self._weights.state is not WeightsState.PROVEN:
            self._stop(f"rank {rank}")
            return
        log = self._log.bind(epoch=self._weights.epoch)
        if self._weights.is_unreadable:
            log.warning(WEIGHTS_UNREADABLE, remedy=_UNREADABLE)
        log.info(WEIGHTS_PROVEN, weights=self._weights.name or "as at the start")
        self._counters.set("ucm_weights_proven", 1)
        self._on_proof(self._weights.name)

    def _doubt(self, reason: str, *, emptied: bool) -> None:
        self._weights.doubt(emptied=emptied)
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        log = self._log.bind(epoch=self._weights.epoch)
        if self._weights.state is WeightsState.MIXED:
            log.warning(WEIGHTS_MIXED, remedy=_MIXED)
        else:
            log.info(WEIGHTS_DOUBTED, reason=reason)
        self._asked_at, self.awaits_plan = None, True
        self._counters.set("ucm_weights_proven", 0)
        self._counters.reach("ucm_weights_doubted_total", self._weights.epoch)
        self._on_doubt(self._weights.epoch)
