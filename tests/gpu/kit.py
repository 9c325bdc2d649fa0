# SPDX-License-Identifier: Apache-2.0
"""What tests on a real GPU share."""

import mmap
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

__all__ = ["make_host_memory", "marks", "stall", "until"]

marks = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
"""Of every module here; the first use of a GPU alone takes seconds."""
_CYCLES_PER_S = 2_000_000_000
"""Cycles that last a second at least: no GPU of today runs faster than 2 GHz."""
_PATIENCE_S = 60.0


def stall(seconds: float) -> None:
    """Keep the current stream busy for *seconds* or longer."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


def until(is_so: Callable[[], bool]) -> None:
    """Ask until the answer is yes."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"


def make_host_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory in pages that nobody else has, so that it can be pinned."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
