# SPDX-License-Identifier: Apache-2.0
"""A drive whose directory somebody removes under a tier that lives."""

import shutil
from pathlib import Path

import pytest

from tests.backends.disk_kit import open_disk
from ucm.backends.abc import Verdict
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(4)


@pytest.mark.asyncio
async def test_blocks_that_nobody_would_find_again_are_not_taken(
    tmp_path: Path,
) -> None:
    """R-51: they were told as spilled, into a file without a name, and gone with the agent; what
    is there is of use until then, and it is said what is to be done."""
    root = tmp_path / "tier"
    backend = await open_disk(root)
    assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
    assert "" == backend.trouble
    shutil.rmtree(root)
    assert [Verdict.UNAVAILABLE] * 2 == await backend.put([*map(seal, KEYS[1:3])])
    assert [True, False, False] == await fetch_sound(backend, KEYS[:3])
    assert backend.trouble.startswith(f"{root / 'blocks'} was removed: end the agent")
    await backend.aclose()
    backend = await open_disk(root)
    assert [Verdict.DONE] == await backend.put([seal(KEYS[3])])
    assert "" == backend.trouble
    await backend.aclose()
