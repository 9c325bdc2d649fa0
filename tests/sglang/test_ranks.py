# SPDX-License-Identifier: Apache-2.0
"""SGLang's own engine over the store, with two tensor-parallel ranks, by both doors."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.models import LAGUNA, LLAMA, Recipe
from tests.sglang.door import SGLangDoor, shared_forks
from tests.sglang.test_hicache import prompts_of
from tests.sglang.test_latent import LATENT
from ucm.blocks import PackedKey, shard_of
from ucm.testing.door import Prompts, Setting
from ucm.testing.slab_damage import Damage, damage, drop, stored, unsound

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS, PROMPTS, PAGES = 2, 4, 5
WHOLE = PROMPTS * PAGES
WINDOWS = PROMPTS * (PAGES + 2)
"""Of each prompt the last window besides, in two pages of its own."""
TOLD = prompts_of(PROMPTS)


class Engine:
    """
    Two ranks over one slab.

    Args:
        slab: Theirs.
        layout: Of HiCache's host pool; empty: the linker.
        said: What two ranks without a cache say.
        model: What they serve.
        environment: Variables of the engine.
    """

    def __init__(
        self,
        slab: Path,
        layout: str,
        said: Prompts,
        model: Recipe = LLAMA,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.door = SGLangDoor(
            shared_forks(), layout, environment, model=model, ranks=RANKS
        )
        self._said = said
        self.door.start(slab, Setting.PLAIN)

    def ask(self) -> tuple[int, ...]:
        """Ask once; return how many pages SGLang took, and how many each rank has loaded."""
        before = self._counts()
        assert self._said == self.door.generate(TOLD, 8)
        after = self._counts()
        self.forget()
        return tuple(now - then for now, then in zip(after, before, strict=True))

    def forget(self) -> None:
        """Have nothing but what is stored."""
        self.door.settle()
        self.door.forget()
        assert {} == self.door.left()

    def _counts(self) -> list[int]:
        engine = self.door.engine
        return [engine.ask("cached") // 16, *engine.ask("look")["ranks"]]


def plainly(model: Recipe) -> Prompts:
    """Return what two ranks say without any cache."""
    door = SGLangDoor(shared_forks(), model=model, ranks=RANKS)
    return door.baseline(TOLD, 8, Setting.PLAIN)


@pytest.fixture(scope="module")
def said() -> Prompts:
    """Return what they say of the small Llama."""
    return plainly(LLAMA)


def of_rank(slab: Path, rank: int) -> list[PackedKey]:
    """Return what one rank has stored."""
    return sorted(key for key in stored(slab) if shard_of(key) == rank)


def test_ranks_are_exact_whatever_one_of_them_lacks(
    tmp_path: Path, said: Prompts
) -> None:
    """R-81: cold, and in a new process of the other door, warm; what one rank has not as it was
    saved, or not at all, all of them compute, whatever the other has loaded. In a new process
    of the first one a page that a rank loses behind its look-up ends its request on all: who
    asked is told, and nothing is kept."""
    slab, every = tmp_path / "slab", (WHOLE,) * (1 + RANKS)
    for layout, first in (("", 0), ("layer_first", WHOLE)):
        engine = Engine(slab, layout, said)
        assert (first,) * (1 + RANKS) == engine.ask()
        for rank in range(RANKS):
            damage(slab, Damage.BITS, of_rank(slab, rank))
            found = engine.ask()
            assert (0, 0, WHOLE) == (found[0], found[1 + rank], found[2 - rank])
            assert 1 == drop(slab, of_rank(slab, rank)[:1])
            found = engine.ask()
            assert found[0] == found[1 + rank] < WHOLE
        damage(slab, Damage.EXCHANGED)  # each has another page, some the other rank's
        assert (0, 0, 0) == engine.ask()
        assert every == engine.ask(), "all is there again"
        engine.door.stop()
    engine = Engine(slab, "", said)
    engine.door.engine.ask("lose")
    with pytest.raises(AssertionError, match="External KV cache load failed"):
        engine.door.generate(TOLD[:1], 8)
    engine.forget()
    assert every == engine.ask()
    engine.door.stop()


def test_failures_of_either_rank_cost_time_only(tmp_path: Path, said: Prompts) -> None:
    """R-81: SGLang's own before calls of HiCache; each rank has its own, and its own delays."""
    slab = tmp_path / "slab"
    environment = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.01",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.15",
    }
    engine = Engine(slab, "layer_first", said, environment=environment)
    taken = sum(engine.ask()[0] for _ in range(6))
    assert 0 < taken < 5 * WHOLE
    engine.door.stop()
    assert [] == unsound(slab)


@pytest.mark.parametrize(
    ("model", "layout", "whole", "num_shards"),
    [
        (LATENT, "", (WHOLE, WHOLE, WHOLE), 1),
        (LAGUNA, "layer_first", (WHOLE, WINDOWS, WINDOWS), RANKS),
    ],
    ids=["latent", "windows"],
)
def test_pages_of_other_kinds_are_exact_on_all_ranks(
    tmp_path: Path,
    model: Recipe,
    layout: str,
    whole: tuple[int, ...],
    num_shards: int,
) -> None:
    """R-81: latent ones, which both ranks save and one has stored, and those of windows."""
    slab = tmp_path / "slab"
    engine = Engine(slab, layout, plainly(model), model)
    assert (0, 0, 0) == engine.ask()
    assert whole == engine.ask()
    assert set(range(num_shards)) == {shard_of(key) for key in stored(slab)}
    damage(slab, Damage.BITS, of_rank(slab, 0))
    found = engine.ask()
    assert (0, 0) == (found[0], found[1]), "rank 0 had nothing"
    engine.ask()  # windows are looked at once the pages before them are whole again
    assert whole == engine.ask()
    engine.door.stop()
