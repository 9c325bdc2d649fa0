# SPDX-License-Identifier: Apache-2.0
"""The model of a backend: the contract, over shelves that stand for the other side."""

import pytest

from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.opening import open_backend
from ucm.errors import ConfigError
from ucm.testing.backend_contract import BLOCK, BackendContract, fetch_sound, seal
from ucm.testing.store_blocks import make_keys


class TestMemoryBackend(BackendContract):
    """One shelf for each place."""

    @pytest.fixture(autouse=True)
    def _shelves(self):
        self.shelves = {}

    async def open(self, place):
        """Open one on the place's shelf."""
        return MemoryBackend(self.shelves.setdefault(place, Shelf(1 << 20)))

    async def open_small(self, place):
        """Open one on a shelf for nine blocks."""
        return MemoryBackend(self.shelves.setdefault(place, Shelf(10 * BLOCK)))

    def get_raw(self, place, key):
        """Look at the shelf."""
        return self.shelves[place].values.get(key)

    def put_raw(self, place, key, raw):
        """Change what is on the shelf."""
        self.shelves[place].values[key] = raw


@pytest.mark.asyncio
class TestShelf:
    async def test_machines_share_a_shelf(self):
        """What one has put the other finds."""
        shelf, keys = Shelf(1 << 20), make_keys(2)
        await MemoryBackend(shelf).put([seal(key) for key in keys])
        assert [True, True] == await fetch_sound(MemoryBackend(shelf), keys)


@pytest.mark.asyncio
class TestOpening:
    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        classes = {"memory": MemoryBackend, "other": Shelf}
        monkeypatch.setattr(
            "ucm.backends.opening.load_class", lambda _group, name, _key: classes[name]
        )

    async def test_configured_backend_is_opened(self):
        """Its settings are read by itself."""
        backend = await open_backend({"type": "memory", "capacity": "2MiB"}, "tiers.0")
        assert 2 << 20 == (await backend.stats()).capacity_bytes

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({}, "tiers.0.type"),
            ({"type": 3}, "tiers.0.type"),
            ({"type": "other"}, "tiers.0.type"),
            ({"type": "memory", "capacity": "much"}, "tiers.0.capacity"),
            ({"type": "memory", "capacity": 0}, "tiers.0.capacity"),
            ({"type": "memory", "path": "/x"}, "tiers.0.path"),
        ],
    )
    async def test_wrong_setting_is_named(self, settings, key):
        """Refused at start, by its dotted key."""
        with pytest.raises(ConfigError) as caught:
            await open_backend(settings, "tiers.0")
        assert key == caught.value.key
