# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own engine keeps beside plain pages: it does not start with our doors."""

from pathlib import Path

import pytest

from tests.e2e.models import GPT_OSS
from tests.sglang.door import SGLangDoor, shared_forks
from ucm.testing.door import Setting

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("layout", ["", "layer_first"], ids=["linker", "hicache"])
def test_model_with_windows_in_a_pool_of_their_own_is_refused_by_name(
    tmp_path: Path, layout: str
) -> None:
    """R-81: when the engine starts, and not when a prompt lacks the pages of its window."""
    args = {"attention_backend": "triton"}  # which this model needs, and nobody calls
    door = SGLangDoor(shared_forks(), layout, model=GPT_OSS, args=args)
    with pytest.raises(
        AssertionError, match=r"(?i)ConfigError: model='.*swa'.*several"
    ):
        door.start(tmp_path / "slab", Setting.PLAIN)
