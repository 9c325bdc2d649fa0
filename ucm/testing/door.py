# SPDX-License-Identifier: Apache-2.0
"""
An engine behind a door, as the contract of doors drives it, and what it is asked.

A ``Running`` starts an engine only where a test needs another than the one that runs. In
their order all tests of the contract together take nine starts at most, and three of the
engine without a cache.
"""

import enum
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from ucm.blocks import PackedKey
from ucm.testing.door_tiers import await_spilled, end_agent, tiers_at
from ucm.testing.slab_damage import Damage, damage, stored

__all__ = ["POOL", "ROOM", "Ability", "Door", "Prompts", "Running", "Setting"]

Prompts: TypeAlias = list[list[int]]

ROOM = 6
"""Blocks for which a small store has room."""
POOL = 24
"""Blocks of a tight pool, in which six prompts of five blocks grow to eight."""


class Setting(enum.StrEnum):
    """What kind of engine a test wants."""

    PLAIN = "plain"
    """One model, a store with room for all, and an engine's pool with room for all."""
    FOREIGN = "foreign"
    """Another model of the same shape: its blocks have the same size."""
    SMALL = "small"
    """As plain, over a store that has room for ``ROOM`` blocks or a few more."""
    TIGHT = "tight"
    """As plain, with an engine's pool of ``POOL`` blocks."""
    TIERED = "tiered"
    """As plain, with the setting ``Door.tiers`` below its store."""


class Ability(enum.StrEnum):
    """What not every door, or not every engine, is able to do."""

    ABORT = "abort"
    """A request can be given up before it ends."""
    PREEMPT = "preempt"
    """The engine takes blocks from a request and computes it again later."""
    KILL = "kill"
    """The engine is a process of its own, which a test may kill."""
    FOREIGN = "foreign"
    """There is a second model."""
    SMALL = "small"
    """The size of the store can be chosen."""
    TIERS = "tiers"
    """It asks tiers for what its store lacks."""


class Door(ABC):
    """
    One engine at a time behind a door, driven by the contract.

    ``start`` and ``stop`` or ``kill`` take turns. Every call may take as long as it must,
    and ends what it started where it raises.
    """

    block_tokens: int
    """Tokens of a block; prompts are made of so many."""
    vocabulary: int = 500
    """Prompts have token ids below this."""
    num_tokens: int = 8
    """Tokens that most tests let an engine decode."""
    cannot: Mapping[Ability, str] = MappingProxyType({})
    """What this door or its engine is not able to do, and why: those tests are skipped."""
    tiers: Sequence[Mapping[str, object]] = ()
    """The setting of that name, of engines that are tiered; all others have none."""

    @abstractmethod
    def start(self, slab: Path, setting: Setting) -> None:
        """
        Start an engine whose store is the slab in this directory, which may exist.

        One that is tiered is there once its agent is: before that no tier is asked.
        """

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Decode greedily exactly so many tokens for each prompt; ask for all at once."""

    @abstractmethod
    def loaded_blocks(self) -> int:
        """Return how many blocks have come from the store, verified, since the start."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all that is to be saved is stored, or is known not to be."""

    @abstractmethod
    def forget(self) -> None:
        """Let the engine forget its own cache, so that only the store has anything."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine in its orderly way, whatever is still under way."""

    @abstractmethod
    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Return what the same engine says without any cache; called while none runs."""

    def kill(self) -> None:
        """End the engine's processes with SIGKILL, as they are."""
        raise NotImplementedError

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Ask for prompts and give them up, each at another moment before its end."""
        raise NotImplementedError

    def preemptions(self) -> int:
        """Return how often the engine has preempted a request since the start."""
        raise NotImplementedError

    def fetched_blocks(self) -> int:
        """Return how many blocks the store has had from tiers, by counters, since the start."""
        raise NotImplementedError

    def left(self) -> Mapping[str, int]:
        """Return the sizes, above 0, of what the door keeps though nothing runs."""
        return {}

    def blocks_of(self, prompt: list[int]) -> int:
        """Return how many blocks a prompt loads that is stored as a whole."""
        return len(prompt) // self.block_tokens


_STORIES: Mapping[Setting, Mapping[str, Sequence[float]]] = {
    Setting.PLAIN: {
        "warm": (5, 4.4, 3.2, 1.6, 0.3),
        Damage.BITS: (4.2, 3.5),
        Damage.EXCHANGED: (4.2, 3.5),
        Damage.REMOVED: (3.4, 2.2),
        "missing": (4.3,),
        "given up": (4.2, 3.7, 2.1),
        "kept": (4.1, 3.5),
        "pending": (3.3, 2.8),
        "saved": (4.1, 3.5),
        "in hand": (3.3, 2.8),
        "foreign": (4.5, 2.3),
        "spilled": (4.2, 3.5),
        "full": (4.2, 4.3, 4.4, 4.3),
        "last": (4.2,),
        "longer": (1.5 * ROOM,),
    },
    Setting.FOREIGN: {"foreign": (4.5, 2.3)},
    Setting.TIGHT: {"tight": (4.1, 4.2, 4.3, 4.4, 4.5, 4.6)},
}
"""Lengths in blocks of each test's prompts, of which no two have a block in common."""
_GROWTH = 3
"""Blocks by which requests grow in a tight pool."""


def _draw(door: Door, name: str, blocks: float) -> list[int]:
    """Return a prompt of that name; no other one shares a block with it."""
    rng = random.Random(name)
    count = round(blocks * door.block_tokens)
    return [rng.randrange(5, door.vocabulary) for _ in range(count)]


def _make_prompts(door: Door, setting: Setting) -> dict[str, Prompts]:
    """Return what engines of a kind are asked, by the name of the story."""
    made = {
        str(story): [
            _draw(door, f"{story} {at}", each) for at, each in enumerate(lengths)
        ]
        for story, lengths in _STORIES[setting].items()
    }
    if setting is Setting.PLAIN:
        size = door.block_tokens
        trunk, whole = _draw(door, "trunk", 4), _draw(door, "whole", 4.3)
        made["shared"] = [
            trunk[: at % 5 * size] + _draw(door, f"branch {at}", 1.3) for at in range(8)
        ]
        made["varied"] = [whole] + [
            whole[:start] + _draw(door, f"part {start}", 1) + whole[start + size :]
            for start in range(0, 4 * size, size)
        ]
    return made


class Running:
    """
    The engine that runs, if any, and what is right.

    Args:
        door: How it is driven.
        root: Directory of the test's own.
    """

    def __init__(self, door: Door, root: Path) -> None:
        self.door = door
        self.slab = root
        """The store of the engine that runs, or ran last."""
        self._root = root
        self._setting: Setting | None = None
        self._num_removed = 0
        self._num_left = 0
        self.tier = root / "tier"
        """Where the blocks of tiered engines are below their slabs."""
        self._prompts: dict[Setting, dict[str, Prompts]] = {}
        self._expected: dict[Setting, dict[str, Prompts]] = {}

    def on(self, setting: Setting) -> None:
        """Have an engine of that kind run: the one that does, or one that is started."""
        if setting is self._setting:
            return
        self.stop()
        self.expected(setting)
        self.slab = self._slab_of(setting)
        self.slab.parent.mkdir(exist_ok=True)
        self.door.tiers = tiers_at(self.tier) if setting is Setting.TIERED else ()
        self.door.start(self.slab, setting)
        self._setting = setting

    def stop(self) -> None:
        """Have none run."""
        if self._setting is not None:
            self._setting = None
            try:
                self.door.stop()
            finally:
                end_agent(self.slab)

    def kill(self) -> None:
        """Kill the one that runs."""
        self._setting = None
        self.door.kill()

    def remove_slab(self) -> None:
        """Take away what is the store of plain engines; the next one has a new one."""
        damage(self.slab, Damage.REMOVED)
        self._num_removed += 1

    def move(self) -> None:
        """Have the next tiered engine on another machine, whose slab has nothing yet."""
        await_spilled(self.slab, self.tier)
        self.stop()
        self._num_left += 1

    def ask(self, story: str) -> int:
        """
        Have the prompts of a story answered, and hold that against what is right.

        Returns:
            How many blocks the store had for them.
        """
        assert self._setting is not None
        expected = self.expected(self._setting)[story]
        before = self.door.loaded_blocks()
        said = self.door.generate(
            self._prompts[self._model(self._setting)][story], len(expected[0])
        )
        assert expected == said
        return self.door.loaded_blocks() - before

    def ask_anew(self, story: str) -> int:
        """Ask once all is saved, and the engine itself remembers nothing."""
        self.door.settle()
        self.door.forget()
        return self.ask(story)

    def store(self, story: str) -> set[PackedKey]:
        """Ask what the store has nothing of yet; return the keys of what it has then."""
        self.door.settle()
        before = stored(self.slab)
        assert self.ask(story) == 0
        self.door.settle()
        return stored(self.slab) - before

    def prompts(self, story: str) -> Prompts:
        """Return what engines are asked in a story."""
        return next(each[story] for each in self._prompts.values() if story in each)

    def blocks_of(self, story: str) -> int:
        """Return how many blocks a story's prompts load that are stored as a whole."""
        return sum(map(self.door.blocks_of, self.prompts(story)))

    def expected(self, setting: Setting) -> dict[str, Prompts]:
        """Return what an engine of a kind says without a cache, by story."""
        model = self._model(setting)
        if model not in self._expected:
            self.stop()
            stories = self._prompts[model] = _make_prompts(self.door, model)
            num_tokens = self.door.num_tokens
            if model is Setting.TIGHT:
                num_tokens = _GROWTH * self.door.block_tokens
            prompts = [each for story in stories.values() for each in story]
            said = iter(self.door.baseline(prompts, num_tokens, model))
            self._expected[model] = {
                story: [next(said) for _ in asked] for story, asked in stories.items()
            }
        return self._expected[model]

    def _slab_of(self, setting: Setting) -> Path:
        """Return where the blocks of such engines are; foreign ones share with plain."""
        own = {
            Setting.SMALL: "small",
            Setting.TIGHT: "tight",
            Setting.TIERED: f"tiered-{self._num_left}",
        }
        name = own.get(setting, f"plain-{self._num_removed}")
        return self._root / name / "slab"

    @staticmethod
    def _model(setting: Setting) -> Setting:
        """Return the kind of engine that says the same as that kind."""
        is_plain = setting in (Setting.SMALL, Setting.TIERED)
        return Setting.PLAIN if is_plain else setting
