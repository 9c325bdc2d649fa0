# SPDX-License-Identifier: Apache-2.0
"""
Whether a tier takes a block: all, or what has come again. Pure.

Of ``again`` a block that is stored in the slab for the first time is remembered by its key, and
taken when it is stored anew after it was evicted there. That costs its second use a
computation, and spares a drive the writing of what never comes back (``docs/tiers.md`` has what
either gives). What is listed anew, because a reader was left behind, has not come again.
"""

import enum
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, cast

from ucm.blocks import PackedKey
from ucm.settings import read_enum

__all__ = ["Admission", "Admitter", "admission_of"]

_MOST_KEYS: Final = 1 << 18
"""Remembered; beyond it the oldest is forgotten, and is new again."""


class Admission(enum.Enum):
    """What a tier takes."""

    ALL = "all"
    AGAIN = "again"
    """What was stored before, as far as is remembered."""


def admission_of(settings: Mapping[str, object], key: str) -> Admission:
    """
    Return what a tier is set to take.

    Args:
        settings: Of the tier.
        key: What they are called in messages, such as ``tiers.0``.

    Raises:
        ConfigError: It is none of the words.
    """
    given = settings.get("admission", Admission.ALL.value)
    return cast(Admission, read_enum(f"{key}.admission", given, Admission))


class Admitter:
    """
    Decides for one tier.

    Args:
        rule: What it takes.
        most_keys: Remembered.
    """

    def __init__(self, rule: Admission, most_keys: int = _MOST_KEYS) -> None:
        self.takes_all = rule is Admission.ALL
        """Nothing is ever refused, and nobody need ask of any block."""
        self._most_keys = most_keys
        self._is_gone: OrderedDict[PackedKey, bool] = OrderedDict()
        """By block that was not taken, whether the slab has lost it since; a dict would look for
        its oldest one behind all that are gone."""

    def admits(self, key: PackedKey) -> bool:
        """Return whether a block that is stored is taken; one that is not is remembered."""
        if self.takes_all:
            return True
        if self._is_gone.get(key, False):
            del self._is_gone[key]
            return True
        self._is_gone[key] = False
        if len(self._is_gone) > self._most_keys:
            self._is_gone.popitem(last=False)
        return False

    def removed(self, key: PackedKey) -> None:
        """Take note that the slab has lost a block."""
        if key in self._is_gone:
            self._is_gone[key] = True

    def refused(self, key: PackedKey) -> bool:
        """Return whether a block was not taken, as far as is remembered."""
        return key in self._is_gone
