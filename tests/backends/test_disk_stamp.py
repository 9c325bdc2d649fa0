# SPDX-License-Identifier: Apache-2.0
"""What is on a drive, byte by byte."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.backends.disk._stamp import (
    PAGE,
    Geometry,
    Mark,
    Stamp,
    pages_of,
    stamps_of,
)
from ucm.backends.envelope import Envelope

STAMP = Stamp(Envelope(b"key", 5000, 7), serial=3, place=8192, sequence=9, first=11)
(STAMPED,) = stamps_of([STAMP.envelope.encode()], 3, [8192], [9], [11])
MARK = Mark(3, 2)
GEOMETRY = Geometry.fit(1 << 20)


class TestMarks:
    def test_bytes_stay_what_they_are(self):
        """Golden vectors: another release reads what this one wrote."""
        text = "55434d5801000000" + "0" * 15 + "3" + "0" * 15 + "2" + "93f2bbe274203c3d"
        assert text == MARK.encode()[:32].hex()
        assert bytes(PAGE - 32) == MARK.encode()[32:]
        tail = STAMPED[128:].hex()
        words = "".join(f"{number:016x}" for number in (3, 8192, 9, 11))
        assert "55434d53" + words + "35b7c6e066a1304b" == tail

    @given(st.binary(max_size=200))
    def test_garbage_is_told(self, page):
        """No page but ours is taken, and none raises."""
        page = page.ljust(PAGE, b"\0")
        assert None is Mark.decode(memoryview(page), GEOMETRY)
        assert None is Stamp.decode(memoryview(page))

    @pytest.mark.parametrize("at", range(172))
    def test_each_byte_counts(self, at):
        """A changed byte of a mark or a stamp makes it nobody's."""
        stamp = bytearray(STAMPED.ljust(PAGE, b"\0"))
        assert STAMP == Stamp.decode(memoryview(stamp))
        stamp[at] ^= 1
        assert None is Stamp.decode(memoryview(stamp))
        if at < 32:
            mark = bytearray(MARK.encode())
            assert MARK == Mark.decode(memoryview(mark), GEOMETRY)
            mark[at] ^= 1
            assert None is Mark.decode(memoryview(mark), GEOMETRY)

    @pytest.mark.parametrize("pages", [0, 10**6])
    def test_mark_of_slots_that_do_not_fit_is_garbage(self, pages):
        """An extent holds at least one slot."""
        page = memoryview(Mark(3, pages).encode())
        assert None is Mark.decode(page, GEOMETRY)

    @pytest.mark.parametrize(
        "change",
        [{"serial": 4}, {"place": 4096}, {"envelope": Envelope(b"key", 4096, 7)}],
    )
    def test_stamp_of_somewhere_else_does_not_belong(self, change):
        """Of an extent before it was taken, of another slot, of another size."""
        assert STAMP.belongs(MARK, 8192)
        assert not attrs.evolve(STAMP, **change).belongs(MARK, 8192)


class TestGeometry:
    @given(st.integers(16 * 3 * PAGE, 1 << 44), st.integers(1, 1 << 26))
    def test_slots_do_not_overlap(self, capacity, nbytes):
        """Each lies within its extent, behind the mark, and behind the one before it."""
        geometry = Geometry.fit(capacity)
        assert 0 <= capacity - geometry.nbytes < geometry.extent_bytes
        assert geometry.max_block_bytes >= PAGE
        pages = pages_of(nbytes)
        count = geometry.num_slots(pages)
        assert (count > 0) == (nbytes <= geometry.max_block_bytes)
        if count:
            first, last = (
                geometry.place(5, pages, 0),
                geometry.place(5, pages, count - 1),
            )
            assert 5 * geometry.extent_bytes + PAGE == first
            assert last + (pages + 1) * PAGE <= 6 * geometry.extent_bytes
            assert (pages + 1) * PAGE == geometry.place(5, pages, 1) - first
