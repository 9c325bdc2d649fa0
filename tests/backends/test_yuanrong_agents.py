# SPDX-License-Identifier: Apache-2.0
"""Two machines and a worker of yuanrong's data system between them."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.agent.test_process import Place, until
from tests.backends.yuanrong_kit import Looker, why_not, worker
from tests.stores.slab_kit import open_slab
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save

KEYS = make_keys(3)
PATIENT = {"tier": 60.0}
"""Its client is a process of its own, which starts with the first call."""


def machine(folder, shm):
    """Return where a machine has its slab."""
    folder.mkdir()
    place = Place(folder, Path(shm))
    place.env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    return place


@pytest.mark.slow
def test_one_agent_spills_and_another_fetches(tmp_path, monkeypatch):
    """R-51, R-53: each block comes exact to another machine's slab; one that was damaged on
    its way does not, and is told with its reason."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("DATASYSTEM_CLIENT_LOG_DIR", str(tmp_path))
    with worker() as (_, address), tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        tier = {"type": "yuanrong", "worker": address, "timeout": 60.0}
        first, second = Path(shm, "1"), Path(shm, "2")
        first.mkdir()
        second.mkdir()
        place = machine(tmp_path / "1", first)
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1", tiers=[tier], timeout=PATIENT) as agent,
            place.client(agent=agent),
        ):
            save(slab, KEYS)
            until(lambda: spilled(place) == len(KEYS))
        looker = Looker(address)
        name = f"ucm:{KEYS[-1].hex()}"
        raw = looker.get(name)
        looker.replace(name, raw[:-1] + bytes([raw[-1] ^ 1]))
        looker.close()
        other = machine(tmp_path / "2", second)
        with (
            open_slab(other.slab, 64) as slab,
            other.agent("--linger", "-1", tiers=[tier], timeout=PATIENT) as agent,
            other.client(agent=agent) as client,
        ):
            sizes = [BLOCK_BYTES] * len(KEYS)
            assert client.want("a", KEYS, sizes, seconds=60.0, hold_s=5.0)
            until(lambda: not client.is_pending("a"))
            assert (2, "corrupt", b"\1\1", 0) == client.answer("a")
            assert [payload(key) for key in KEYS[:2]] == load(slab, KEYS[:2])


def spilled(place):
    """Return how many blocks are in the tier, as the agent says."""
    return place.status()["slots"]["4096"]["spilled"][0]["spilled"]
