# SPDX-License-Identifier: Apache-2.0
"""Where a fake host takes every decision from that an engine or its users could take."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["Choices", "SeededChoices"]

_T = TypeVar("_T")


class Choices(Protocol):
    """A source of decisions; the same answers give the same run."""

    def chance(self, what: str, probability: float) -> bool:
        """Decide whether *what* happens."""
        ...

    def below(self, what: str, stop: int) -> int:
        """Choose a number from 0 up to, without, *stop*."""
        ...

    def pick(self, what: str, options: Sequence[_T]) -> _T:
        """Choose one of *options*, of which there is at least one."""
        ...


class SeededChoices:
    """
    Decisions from a seeded generator.

    Args:
        source: A seed, or a generator that others draw from as well.
    """

    def __init__(self, source: int | random.Random) -> None:
        dice = random.Random(source) if isinstance(source, int) else source
        self._random = dice.random

    def chance(self, what: str, probability: float) -> bool:
        """Decide whether *what* happens."""
        return self._random() < probability

    def below(self, what: str, stop: int) -> int:
        """Choose a number from 0 up to, without, *stop*."""
        return int(self._random() * stop)

    def pick(self, what: str, options: Sequence[_T]) -> _T:
        """Choose one of *options*."""
        return options[int(self._random() * len(options))]
