# SPDX-License-Identifier: Apache-2.0
"""Blocks come into a slab beside those who save to it."""

import contextlib
import io

import pytest

from tests.stores.slab_kit import open_slab
from ucm.stores import moving
from ucm.stores.exports import ExportReader, ExportWriter, Section, Start
from ucm.stores.moving import Incoming, Moved
from ucm.testing.store_blocks import BLOCK_BYTES, fill, load, make_keys, payload

KEYS = make_keys(6)


def bring(path, *, evicts):
    """Bring all blocks into a slab; return what became of them."""
    made = io.BytesIO()
    section = Section(KEYS[0][1:17].hex(), BLOCK_BYTES)
    writer = ExportWriter(made, Start(len(KEYS), len(KEYS) * BLOCK_BYTES, [section]))
    for key in KEYS:
        writer.add(key, memoryview(payload(key)), 0, 0)
    writer.finish()
    reader = ExportReader(io.BytesIO(made.getvalue()), "it")
    with contextlib.ExitStack() as stack:
        most = 1 << 30
        incoming = Incoming(reader, path, stack, most_bytes=most, evicts=evicts)
        return incoming.run(lambda _: None)


def told(moved: Moved) -> tuple[int, int, int]:
    """Return how many blocks were stored, were there, and found no room."""
    return moved.blocks, moved.present, moved.no_room


@pytest.mark.parametrize("evicts", [True, False])
def test_block_that_an_engine_is_writing_ends_no_import(
    memory_path, monkeypatch, evicts
):
    """It finds no slot and needs none: those behind it come all the same."""
    monkeypatch.setattr(moving, "_MOST_BATCH", 2)
    with open_slab(memory_path) as engine, engine.reserve(KEYS[1:2], BLOCK_BYTES) as it:
        assert (5, 1, 0) == told(bring(memory_path, evicts=evicts))
        fill(it)
        assert 1 == it.commit()
        assert [payload(key) for key in KEYS] == load(engine, KEYS)


def test_block_that_an_engine_is_writing_is_not_said_to_lack_room(memory_path):
    """Of six blocks for four slots two have none; the one that is coming has its slot."""
    with open_slab(memory_path, 4) as engine, engine.reserve(KEYS[1:2], BLOCK_BYTES):
        assert (3, 1, 2) == told(bring(memory_path, evicts=False))
