# SPDX-License-Identifier: Apache-2.0
"""Copies in host memory by native code: through the caches, and past them."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.devices.test_cpu import layout_of
from tests.native_kit import build
from ucm import native
from ucm.blocks import GroupId, RowId
from ucm.devices.cpu import CPUDevice
from ucm.plan import HostSlots

SIZES = np.array([1, 15, 16, 63, 64, 65, 127, 128, 129, 4097, (1 << 20) + 77])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("read_next", [False, True])
def test_bytes_of_any_length_lie_where_they_belong(
    tmp_path: Path, read_next: bool, across: bool
) -> None:
    """Wherever they begin and end: what is copied past the caches goes by lines of these, unless
    those of one side lie across those of the other, and all around stays as it was."""
    moves = build(tmp_path).moves
    dice = np.random.default_rng(3)
    room = 2 * int(SIZES.sum()) + 200 * len(SIZES)
    for _ in range(50):
        source = dice.integers(0, 256, room + 64, np.uint8)
        target = dice.integers(0, 256, room, np.uint8)
        gaps = dice.integers(0, 100, (2, len(SIZES)))
        if not across:
            source = source[(address(target) - address(source)) % 64 :]
            gaps[1] = gaps[0]
        starts = np.cumsum(gaps + SIZES, axis=1) - SIZES
        wanted = target.copy()
        for to, at, size in zip(*starts, SIZES, strict=True):
            wanted[to : to + size] = source[at : at + size]
        lists = (starts[0] + address(target), starts[1] + address(source), SIZES)
        moves(*map(address, lists), len(SIZES), read_next)
        np.testing.assert_array_equal(wanted, target)


def address(array: npt.NDArray[np.generic]) -> int:
    """Return where an array begins."""
    return native.address_of(array)


def test_what_is_saved_is_read_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-18: of a save checksums are computed, of what lies in the caches; a load leaves these to the
    engine."""
    library, told = build(tmp_path), []
    monkeypatch.setattr(library, "moves", lambda *lists: told.append(lists[-1]))
    monkeypatch.setattr(native, "LIBRARY", library)
    device, memory = CPUDevice(), torch.zeros(8, 1 << 18, dtype=torch.uint8)
    device.register(layout_of({"a": 1 << 18}), {"a": memory})
    slots = HostSlots(np.zeros((8, 1 << 18), np.uint8), np.arange(8), 1 << 18)
    copied = GroupId(0), [RowId(0)]
    device.gather(*copied, list(range(8)), slots)
    device.scatter(*copied, slots, list(range(8)))
    assert [True, False] == told
