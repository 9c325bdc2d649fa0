# SPDX-License-Identifier: Apache-2.0
"""A table of fixed size remembers what became of keys, or nothing, and never lies."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.fates import ENTRY_BYTES, Sketch

WORDS = st.integers(0, 2**64 - 1)


def make(entries: int) -> tuple[Sketch, np.ndarray]:
    """Return an empty sketch and its memory."""
    words = np.zeros((2, entries), dtype=np.uint64)
    return Sketch(words), words


def prints(*values: int) -> np.ndarray:
    """Return fingerprints as the sketch takes them."""
    return np.array(values, dtype=np.uint64)


class TestSketch:
    @given(fingerprint=WORDS, other=WORDS, code=st.integers(1, 255))
    def test_what_was_put_down_is_told_and_nothing_of_others(
        self, fingerprint: int, other: int, code: int
    ) -> None:
        """A key gets its own word back, whatever its fingerprint, and others none."""
        sketch, _ = make(64)
        assert sketch.get(fingerprint) is None
        sketch.put(prints(fingerprint), code, 1234567)
        assert (code, 1234567) == sketch.get(fingerprint)
        assert other == fingerprint or sketch.get(other) is None

    @given(fingerprint=WORDS, row=st.integers(0, 1), damage=st.integers(1, 2**64 - 1))
    def test_entry_that_does_not_hold_together_says_nothing(
        self, fingerprint: int, row: int, damage: int
    ) -> None:
        """What was half written by somebody, or is not ours, is as if it were not there."""
        sketch, words = make(16)
        sketch.put(prints(fingerprint), 1, 99)
        words[row, fingerprint % 16] ^= np.uint64(damage)
        assert sketch.get(fingerprint) is None

    def test_later_word_takes_the_place_of_an_earlier_one(self) -> None:
        """Of one key the last word counts; of two in one place the last key's."""
        sketch, _ = make(16)
        sketch.put(prints(5, 21 + 16), 1, 10)
        sketch.put(prints(5), 2, 20)
        assert [(2, 20), None] == [sketch.get(each) for each in (5, 21)]
        sketch.put(prints(21), 3, 30)
        assert [None, (3, 30)] == [sketch.get(each) for each in (5, 21)]

    @pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
    def test_what_is_forgotten_is_as_much_as_is_said(self, share: float) -> None:
        """After n others the share of exp(-n / entries) is known, within a hundredth."""
        entries = 1 << 14
        sketch, words = make(entries)
        random = np.random.default_rng(7)
        every = random.integers(0, 2**64, 3 * entries, dtype=np.uint64)
        mine, others = every[: entries // 8], every[entries:][: int(share * entries)]
        sketch.put(mine, 1, 0)
        sketch.put(others, 2, 0)
        known = [sketch.get(each) == (1, 0) for each in mine.tolist()]
        expected = math.exp(
            -share - 1 / 16
        )  # among themselves, half of them come later
        assert expected == pytest.approx(sum(known) / len(mine), abs=0.03)
        assert entries * ENTRY_BYTES == words.nbytes

    @pytest.mark.parametrize("code", [0, 256])
    def test_code_that_has_no_place_is_refused(self, code: int) -> None:
        """Nothing stands for no entry, and no code spoils the moment."""
        sketch, _ = make(16)
        with pytest.raises(ValueError, match=f"code {code} is not in 1..255"):
            sketch.put(prints(1), code, 0)
