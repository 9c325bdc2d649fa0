# SPDX-License-Identifier: Apache-2.0
"""
Whether blocks may be found and saved, as the engine's weights may have changed.

Keys name the weights that an engine was started with. Weights can change in place, and
nobody tells the scheduler. It hears of three things that may mean so, each a *doubt*:
its cache is reset, the engine's own cache was emptied, or a rank saw its weights being
written. A doubt begins an *epoch*, whose number goes to the ranks with the next plan;
each reads a digest of its weights and answers::

    PROVEN ──doubt──▶ ASKED ──all answer──▶ PROVEN, under the same name or another
                        │
                        └──another name, and the engine's own cache was not emptied──▶ MIXED
    MIXED ──the own cache was emptied──▶ ASKED

Only in ``PROVEN`` is anything found or saved. In ``MIXED`` the engine's own cache holds
blocks of several weights, which would be saved under one name. It cannot while it is
*clean*: emptied, and no request was given blocks since.

Pure: facts in, state out.
"""

import enum
import hashlib
from collections.abc import Callable

from ucm.scheduler.messages import WeightsNews

__all__ = ["Weights", "WeightsState"]


class WeightsState(enum.Enum):
    """What is known."""

    PROVEN = "proven"
    ASKED = "asked"
    MIXED = "mixed"


class Weights:
    """
    The weights of an engine, as far as its ranks have told.

    Used on the scheduler's thread only.

    Args:
        num_ranks: Workers that each hold a part of the weights.
        make_token: Returns a text that nobody else has.
    """

    def __init__(self, num_ranks: int, make_token: Callable[[], str]) -> None:
        self._num_ranks = num_ranks
        self._make_token = make_token
        self._base: dict[int, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._is_clean = self._is_emptied = self._is_mixed = False
        self._is_sent = True
        self._asks_again = False
        self.state = WeightsState.PROVEN
        self.epoch = 0
        """Number of the latest doubt."""
        self.name = ""
        """Which weights; empty for those of the start, equal for equal weights."""
        self.is_unreadable = False
        """Whether some rank could not tell, the last time that all were asked."""

    def doubt(self, *, emptied: bool) -> None:
        """
        Take note that the weights may have changed.

        A reset that has emptied nothing, as those of a busy engine, and comes while the
        ranks read says nothing of what was before: they read once more behind that.

        Args:
            emptied: The engine's own cache was emptied, just now.
        """
        is_asked = self.state is WeightsState.ASKED and self._is_sent
        if is_asked and not emptied:
            self._asks_again = True
        else:
            self._begin(emptied=emptied)

    def _begin(self, *, emptied: bool) -> None:
        """Begin an epoch, unless the last one was not sent yet."""
        self._asks_again = False
        self._is_clean |= emptied
        if self._is_sent:
            # A question without an answer: what was in between, nobody knows.
            self._is_mixed |= self.state is WeightsState.ASKED
            self.epoch += 1
            self._answers.clear()
            self._is_emptied = self._is_sent = False
        self._is_emptied |= self._is_clean
        self._is_mixed &= not self._is_clean
        self.state = WeightsState.MIXED if self._is_mixed else WeightsState.ASKED

    def sent(self, *, in_use: bool) -> bool:
        """
        Take note that a plan carries the epoch to the ranks.

        Args:
            in_use: Some request has blocks.

        Returns:
            Whether it matters when the first one has, so that the next plan is to be told of.
        """
        self._is_sent = True
        self._is_clean &= not in_use
        return self._is_clean

    def told(self, rank: int, news: WeightsNews) -> bool:
        """
        Take note of what a rank tells.

        Returns:
            Whether ``state`` or ``name`` is to be looked at again.
        """
        if news.base:
            self._base.setdefault(rank, news.base)
        if news.epoch != self.epoch or not self._is_sent:
            return False  # what was before the latest doubt is of no use any more
        if news.is_written:
            self._begin(emptied=False)
            return True
        if news.digest is None or self.state is not WeightsState.ASKED:
            return False
        self._answers[rank] = news.digest
        self._is_mixed |= news.is_torn and not self._is_emptied
        if len(self._answers) < self._num_ranks:
            return False
        self._decide()
        return True

    def _decide(self) -> None:
        name = self._named()
        self._is_mixed |= name != self.name and not self._is_emptied
        if self._is_mixed:
            self.state = WeightsState.MIXED
        else:
            self.state, self.name = WeightsState.PROVEN, name
        if self._asks_again:
            self._begin(emptied=False)

    def _named(self) -> str:
        ranks = range(self._num_ranks)
        digests = [self._answers[rank] for rank in ranks]
        self.is_unreadable = not all(digests)
        if self.is_unreadable:
            return f"unknown-{self._make_token()}"
        if digests == [self._base.get(rank) for rank in ranks]:
            return ""
        whole = hashlib.sha256(b"".join(len(d).to_bytes(4) + d for d in digests))
        return f"parameters-{whole.hexdigest()[:32]}"
