# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.decode`` asks of an engine: prompts, and how long the answers are."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

__all__ = ["LIVES", "Turn", "found_at_best", "new_turns", "with_second_turns"]

LIVES = {
    "brief": (16, 96),
    "as traced": (1, 24, 100, 213, 291, 350, 399, 447, 504, 597, 900),
}
"""
Tokens of an answer, as quantiles at equal distances, between which lengths are equally
frequent. ``as traced``: deciles of the 12 031 answers of the public conversation trace of
Mooncake (arXiv:2407.00079), mean 343; the longest of 2000 is cut.
"""


@attrs.frozen
class Turn:
    """One request: what it asks and how many tokens it is given."""

    prompt: list[int]
    max_tokens: int


def new_turns(count: int, seed: int, lives: str = "brief") -> list[Turn]:
    """Return requests of which no two share a prefix."""
    drawn = random.Random(seed)
    lengths = list(pairwise(LIVES[lives]))
    return [
        Turn(
            [drawn.randrange(5, 500) for _ in range(drawn.randrange(40, 81))],
            drawn.randint(*drawn.choice(lengths)),
        )
        for _ in range(count)
    ]


def with_second_turns(
    turns: Sequence[Turn], before: Sequence[Turn], answers: Sequence[list[int]]
) -> Iterator[Turn]:
    """Put the conversation of before in front of every fourth request."""
    for at, turn in enumerate(turns):
        if at % 4:
            yield turn
        else:
            told = before[at].prompt + answers[at]
            yield attrs.evolve(turn, prompt=told + turn.prompt[:9])


def found_at_best(turns: Sequence[Turn], block_tokens: int) -> int:
    """
    Return how many tokens of the second turns could be found.

    The last token of an answer was never computed; a block is found whole.
    """
    return sum(
        (len(turn.prompt) - 9 - 1) // block_tokens * block_tokens for turn in turns[::4]
    )
