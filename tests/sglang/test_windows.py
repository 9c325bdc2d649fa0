# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, with windows in a pool of their own, by HiCache."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.models import LAGUNA
from tests.sglang.door import SGLangDoor, shared_forks
from tests.sglang.test_hicache import prompts_of
from ucm.blocks import PackedKey, keyspace_prefix
from ucm.testing.door import Setting
from ucm.testing.slab_damage import Damage, damage, stored

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS, PAGES, WINDOW = 4, 5, 2
"""Each prompt has five pages of all tokens; the last window is in two of its own."""
PAGE = "16KiB"
"""Its bytes, of either kind."""
WHOLE = PROMPTS * (PAGES + WINDOW)
_PREFIX = len(keyspace_prefix(bytes(16)))


def by_kind(slab: Path) -> list[list[PackedKey]]:
    """Return what is stored of each kind, that of all tokens last: there are most of them."""
    kinds = defaultdict(list)
    for key in stored(slab):
        kinds[key[:_PREFIX]].append(key)
    return sorted(kinds.values(), key=len)


def test_windows_are_exact_whatever_of_them_is_stored(tmp_path: Path) -> None:
    """R-81: cold, warm and in new processes, each page of either kind counted; where pages of
    one kind are not as they were saved, or gone, nothing is answered out of the other."""
    slab, prompts = tmp_path / "slab", prompts_of(PROMPTS)
    plain = SGLangDoor(shared_forks(), model=LAGUNA)
    said = plain.baseline(prompts, 8, Setting.PLAIN)

    def ask(door: SGLangDoor) -> int:
        before = door.loaded_blocks()
        assert said == door.generate(prompts, 8)
        found = door.loaded_blocks() - before
        door.settle()
        door.forget()
        return found

    for layout, first in (("layer_first", 0), ("page_first_direct", WHOLE)):
        door = SGLangDoor(shared_forks(), layout, model=LAGUNA)
        door.start(slab, Setting.PLAIN)
        assert first == ask(door)
        assert WHOLE == ask(door)
        windows, pages = by_kind(slab)
        assert WHOLE <= len(pages) + len(windows)
        damage(slab, Damage.BITS, windows)
        assert PROMPTS * PAGES == ask(door), "of the windows nothing was whole"
        assert WHOLE == ask(door), "all is there again"
        damage(slab, Damage.BITS, by_kind(slab)[-1])
        assert 0 == ask(door), "windows alone are of no use"
        assert WHOLE == ask(door)
        assert {} == door.left()
        door.stop()
    door = SGLangDoor(shared_forks(), "layer_first", model=LAGUNA, stage_bytes=PAGE)
    door.start(slab, Setting.PLAIN)
    assert WHOLE == ask(door), "a page has room at a time"
    door.stop()
