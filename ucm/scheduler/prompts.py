# SPDX-License-Identifier: Apache-2.0
"""
How fast the engine computes prompts, from its own steps. Pure: facts in.

Counted are runs of steps that compute many tokens of prompts. A run is over with the second
plan behind its last one, or with as many as the engine has steps under way: its last step has
ended then. What an
engine does between two steps, or that it had nothing to do, makes a run look slower than it
was, never faster; so a fast one is believed at once, and a slow one bit by bit.
"""

from typing import Final

__all__ = ["PromptSpeed"]

_LEAST_TOKENS: Final = 512
"""Of prompts, in a step that says something about them."""
_MOST_STEPS: Final = 8
_LEAST_RUNS: Final = 4
_BELIEF: Final = 0.1


class PromptSpeed:
    """
    Tokens of prompts in a second.

    Args:
        batches: Steps that the engine plans before it waits for the first of them.
    """

    def __init__(self, batches: int = 2) -> None:
        self._batches = batches
        self._rate = 0.0
        self._num_runs = 0
        self._began = 0.0
        self._tokens = self._steps = self._behind = 0

    def planned(self, tokens: int, now: float) -> None:
        """
        Take note of a step's plan.

        Args:
            tokens: Of prompts, about.
            now: When it was made, in seconds.
        """
        if tokens >= _LEAST_TOKENS and not self._behind and self._steps < _MOST_STEPS:
            if not self._steps:
                self._began = now
            self._steps += 1
            self._tokens += tokens
        elif self._steps:
            self._behind += 1
            if self._behind == self._batches:
                self._saw(self._tokens / max(now - self._began, 1e-9))
                self._tokens = self._steps = self._behind = 0

    def _saw(self, rate: float) -> None:
        self._num_runs += 1
        slower = self._rate + _BELIEF * (rate - self._rate)
        self._rate = max(rate, slower)

    def seconds_of(self, tokens: int) -> float:
        """Return how long so many tokens are likely to take; 0: not known."""
        return tokens / self._rate if self._num_runs >= _LEAST_RUNS else 0.0
