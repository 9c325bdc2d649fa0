# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, by our ``UnifiedCacheLinker``."""

from pathlib import Path

import pytest

from tests.e2e.models import LLAMA, make_model
from tests.sglang.door import SGLangDoor, shared_forks
from ucm.testing.door import Door, Setting
from ucm.testing.door_contract import DoorContract

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class TestLinker(DoorContract):
    """R-81: cold, warm, restarted, killed, damaged and without room."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return SGLangDoor(shared_forks())


def test_weights_that_are_written_again_end_all_reuse(tmp_path: Path) -> None:
    """R-81: SGLang tells of no end of doubt, so that answers are computed from then on."""
    door = SGLangDoor(shared_forks())
    prompts = [[5 + at * 7 % 400 for at in range(70)]]
    door.start(tmp_path / "slab", Setting.PLAIN)
    said = door.generate(prompts, 8)
    door.settle()
    door.forget()
    assert said == door.generate(prompts, 8)
    assert 4 == door.loaded_blocks()
    assert door.engine.ask("update_weights", path=str(make_model(LLAMA)))
    door.forget()
    assert said == door.generate(prompts, 8)
    assert 4 == door.loaded_blocks()
    door.stop()
