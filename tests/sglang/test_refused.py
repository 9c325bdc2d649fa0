# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own engine keeps beside plain pages: it does not start with our linker."""

from pathlib import Path

import pytest

from tests.e2e.models import LAGUNA
from tests.sglang.door import SGLangDoor, shared_forks
from ucm.testing.door import Setting

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_model_with_windows_in_a_pool_of_their_own_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """R-81: by the linker, when the engine starts, and not when a prompt lacks its window."""
    door = SGLangDoor(shared_forks(), model=LAGUNA)
    with pytest.raises(
        AssertionError, match=r"(?i)ConfigError: model='.*swa'.*several"
    ):
        door.start(tmp_path / "slab", Setting.PLAIN)
