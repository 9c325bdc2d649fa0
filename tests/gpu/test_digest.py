# SPDX-License-Identifier: Apache-2.0
"""Weights on a real GPU are read there."""

import time

import pytest
import torch

from tests.gpu.kit import marks
from ucm.integration.digest import read_weights

pytestmark = marks


def make_model(megabytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Return layers of 32 MB each, and one whose bytes do not end with a word."""
    side = 4096
    layers = [
        torch.nn.Linear(side, side, bias=False, dtype=dtype, device="cuda")
        for _ in range(megabytes // 32)
    ]
    odd = torch.nn.Linear(3, 7, bias=True, dtype=dtype, device="cuda")
    return torch.nn.ModuleList([*layers, odd])


def digest_of(model: torch.nn.Module) -> bytes:
    """Read all that there is."""
    reading = read_weights([model], lambda: False)
    assert reading is not None
    return reading.digest


@pytest.mark.parametrize("at", [0, -1])
def test_one_bit_shows_and_equal_weights_are_equal(at: int) -> None:
    """R-07, R-08: the first and the last weight count, by any bit."""
    model = make_model(64)
    before = digest_of(model)
    assert 16 == len(before)
    assert before == digest_of(model)
    weight = list(model.parameters())[at].data.view(torch.int16).view(-1)
    weight[-1] ^= 1
    assert before != digest_of(model)
    weight[-1] ^= 1
    assert before == digest_of(model)


def test_many_gigabytes_are_read_where_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Eight gigabytes are read, and the time it took is printed."""
    model = make_model(8192)
    digest_of(model)
    begun = time.perf_counter()
    digest_of(model)
    took = time.perf_counter() - begun
    with capsys.disabled():
        print(f"\n8 GB of weights: read in {took:.2f} s")  # noqa: T201
