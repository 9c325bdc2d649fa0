# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, by our ``UnifiedCacheLinker``."""

import pytest

from tests.sglang.door import SGLangDoor, shared_forks
from ucm.testing.door_contract import Door, DoorContract

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class TestLinker(DoorContract):
    """R-81: cold, warm, restarted, killed, damaged and without room."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return SGLangDoor(shared_forks())
