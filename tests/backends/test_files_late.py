# SPDX-License-Identifier: Apache-2.0
"""What is put on a mount behind the end of the call that put it."""

import anyio
import pytest

from tests.backends.test_files import open_files, put
from tests.backends.test_files_ledger import WHOLE, files_of, open_ledger
from tests.native_kit import by_python  # noqa: F401  a fixture
from ucm.backends.abc import Presence, Verdict
from ucm.backends.files import _writing
from ucm.backends.wrap import DeadlineBackend
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(6)


@pytest.mark.usefixtures("by_python")
@pytest.mark.asyncio
async def test_block_that_is_put_when_its_caller_is_gone_is_counted(
    tmp_path, monkeypatch
):
    """R-63: a call that is given up amid the last step of a put has put it all the same; until the next
    count all took it for room that there was."""
    backend = await open_files(tmp_path / "share", capacity=64 * WHOLE)
    assert [Verdict.DONE] == await put(backend, KEYS[0])
    gate, publish = Gate(), backend._share._writer._publish

    def hang(*args):
        told = publish(*args)
        gate()
        return told

    monkeypatch.setattr(backend._share._writer, "_publish", hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, backend, KEYS[1])
        await anyio.to_thread.run_sync(gate.wait_reached)
        tasks.cancel_scope.cancel()
    gate.open()
    while backend._crew.num_hung:
        await anyio.lowlevel.checkpoint()
    assert [Verdict.DONE] == await put(backend, KEYS[2])
    stats, seen = await backend.stats(), open_ledger(tmp_path / "share").look()
    assert 3 == files_of(tmp_path / "share")
    assert (3, 3 * WHOLE) == (stats.blocks, stats.nbytes)
    assert (3, 3 * WHOLE) == (seen.blocks, seen.nbytes)
    await backend.aclose()


@pytest.mark.usefixtures("by_python")
@pytest.mark.asyncio
async def test_deletion_is_behind_a_put_whose_caller_is_gone(tmp_path, monkeypatch):
    """R-55: what gets its name too late is deleted behind that; until then it is not known to be absent.
    Else it would be there again once it was told to be forgotten."""
    backend = await open_files(tmp_path / "share")
    gate, give_name = Gate(), _writing.give_name

    def hang(*args):
        gate()
        return give_name(*args)

    monkeypatch.setattr(_writing, "give_name", hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, backend, KEYS[0])
        await anyio.to_thread.run_sync(gate.wait_reached)
        tasks.cancel_scope.cancel()
    late = DeadlineBackend(backend, 0.05)
    assert [Verdict.UNAVAILABLE] == await late.delete(KEYS[:1])
    gate.open()
    assert [Verdict.DONE] == await backend.delete(KEYS[:1])
    assert [Presence.ABSENT] == await backend.exists(KEYS[:1])
    await backend.aclose()
