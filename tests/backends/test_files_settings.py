# SPDX-License-Identifier: Apache-2.0
"""Settings of a share that cannot be, and directories that are not ours."""

import os

import pytest

from tests.backends.test_files import KEYS, open_files, put
from ucm.backends.abc import Verdict
from ucm.backends.files import FilesBackend, _share
from ucm.blocks import PackedKey
from ucm.errors import ConfigError


@pytest.fixture
def root(tmp_path):
    """Return where the share is."""
    return tmp_path / "share"


@pytest.mark.asyncio
class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"path": ""}, "path"),
            ({"path": ["/a"]}, "path"),
            ({"path": "/mnt/a\0b"}, "path"),
            ({"path": "/mnt/\ud800"}, "path"),
            ({"capacity": 128}, "capacity"),
            ({"durability": "node"}, "durability"),
            ({"threads": 1}, "threads"),
            ({"mode": 1}, "mode"),
        ],
    )
    async def test_wrong_setting_is_named(self, root, settings, key):
        """Refused at start, by its dotted key."""
        with pytest.raises(ConfigError) as caught:
            await open_files(root, **settings)
        assert f"tiers.0.{key}" == caught.value.key

    async def test_path_is_needed(self):
        """There is no directory of its own."""
        with pytest.raises(ConfigError, match="missing"):
            await FilesBackend.open_configured({}, "tiers.0")

    async def test_path_is_short_enough_for_the_names_behind_it(self, tmp_path):
        """R-63: a tier that would take no block is refused at start; the longest one takes those of
        the longest keys."""
        longest = str(tmp_path)
        while (left := 3584 - len(longest)) > 202:
            longest += "/" + "d" * 100
        longest += "/" + "d" * (left - 1)
        backend = await open_files(longest)
        assert [Verdict.DONE] == await put(backend, PackedKey(bytes(96)))
        await backend.aclose()
        with pytest.raises(ConfigError, match="at most 3584 bytes") as caught:
            await open_files(longest + "d")
        assert "tiers.0.path" == caught.value.key

    async def test_directory_of_somebody_else_is_left_alone(self, tmp_path):
        """R-24: nothing is changed where there is something and no mark of ours."""
        (tmp_path / "thesis.txt").write_text("all of it")
        with pytest.raises(ConfigError, match="nothing in it was changed"):
            await open_files(tmp_path)
        assert ["thesis.txt"] == os.listdir(tmp_path)

    async def test_path_that_is_a_file_is_refused(self, tmp_path):
        """Told at start, with the error of the system."""
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="cannot be used"):
            await open_files(tmp_path / "file")

    @pytest.mark.parametrize("durability", ["process", "power"])
    async def test_durability_is_what_was_asked_for(
        self, root, monkeypatch, durability
    ):
        """For power, file and directory are flushed before a block is done."""
        flushed = []
        backend = await open_files(root, durability=durability)
        monkeypatch.setattr(_share.os, "fsync", flushed.append)
        await put(backend, KEYS[0])
        assert durability == backend.capabilities.durable
        assert {"process": 0, "power": 2}[durability] == len(flushed)
        await backend.aclose()
