# SPDX-License-Identifier: Apache-2.0
"""
What every door to an engine must pass, whatever happens to its store.

Derive a ``Door``, which drives one engine over a slab, and a class of tests::

    class TestMine(DoorContract):
        @classmethod
        def make_door(cls) -> Door: ...

An engine's model must be one whose greedy output depends on each block of a prompt;
the first test sees to it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from ucm.testing.door import POOL, ROOM, Ability, Door, Prompts, Running, Setting
from ucm.testing.door_tiers import damage_files
from ucm.testing.slab_damage import Damage, damage, drop, stored, unsound

__all__ = [
    "POOL",
    "ROOM",
    "Ability",
    "Door",
    "DoorContract",
    "Prompts",
    "Running",
    "Setting",
]

_ROUNDS = 1000
"""How often an engine is asked at most until it has noticed that its store is gone."""


class DoorContract(ABC):
    """What a door promises, as tests; each holds every answer against no cache's."""

    @classmethod
    @abstractmethod
    def make_door(cls) -> Door:
        """Return what drives the door's engine; it is stopped behind the last test."""

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        """The engine that all tests of the class share."""
        running = Running(cls.make_door(), tmp_path_factory.mktemp("door"))
        yield running
        running.stop()

    def _need(self, running: Running, ability: Ability) -> None:
        reason = running.door.cannot.get(ability)
        if reason:
            pytest.skip(f"{ability}: {reason}")

    # -- nothing happens to the store ------------------------------------------------

    def test_output_depends_on_every_block(self, running: Running) -> None:
        """The control of all others: other tokens in any block give another answer."""
        said, *others = running.expected(Setting.PLAIN)["varied"]
        assert all(said != other for other in others)

    def test_cold_and_warm_answers_are_exact(self, running: Running) -> None:
        """R-81: an empty store has nothing, and a filled one every whole block."""
        running.on(Setting.PLAIN)
        assert running.ask("warm") == 0
        assert running.blocks_of("warm") == running.ask_anew("warm")
        assert running.door.left() == {}

    def test_prompts_that_share_beginnings_are_exact(self, running: Running) -> None:
        """R-81: asked at once, while some are saved that others look for."""
        running.on(Setting.PLAIN)
        running.ask("shared")
        assert running.ask_anew("shared") > 0
        assert running.door.left() == {}

    # -- something does --------------------------------------------------------------

    @pytest.mark.parametrize("how", [Damage.BITS, Damage.EXCHANGED])
    def test_damaged_blocks_are_computed(self, running: Running, how: Damage) -> None:
        """R-81: no block counts as loaded that is not as it was saved."""
        running.on(Setting.PLAIN)
        keys = running.store(how)
        assert len(keys) == damage(running.slab, how, keys)
        assert running.ask_anew(how) == 0
        assert running.blocks_of(how) == running.ask_anew(how)
        assert running.door.left() == {}

    def test_blocks_from_the_first_missing_one_on_are_computed(
        self, running: Running
    ) -> None:
        """R-81: whichever block is gone, those before it are loaded."""
        running.on(Setting.PLAIN)
        loaded = set()
        for key in sorted(running.store("missing")):
            assert drop(running.slab, [key]) == 1
            loaded.add(running.ask_anew("missing"))
            running.door.settle()
        assert set(range(running.blocks_of("missing"))) == loaded

    def test_requests_that_are_given_up_leave_nothing(self, running: Running) -> None:
        """R-81: neither while they are computed and saved nor while they are loaded."""
        self._need(running, Ability.ABORT)
        running.on(Setting.PLAIN)
        prompts = running.prompts("given up")
        running.door.abandon(prompts)
        running.ask_anew("given up")
        running.door.settle()
        running.door.forget()
        running.door.abandon(prompts)
        assert running.blocks_of("given up") == running.ask_anew("given up")
        running.door.settle()
        assert running.door.left() == {}

    # -- other engines ---------------------------------------------------------------

    def test_engine_that_is_closed_with_work_pending_leaves_what_is_right(
        self, running: Running
    ) -> None:
        """R-81: the next one finds what was saved, and nothing that is wrong."""
        running.on(Setting.PLAIN)
        assert running.store("kept")
        assert running.ask("pending") == 0
        running.stop()
        assert unsound(running.slab) == []
        running.on(Setting.PLAIN)
        assert running.blocks_of("kept") == running.ask("kept")
        running.ask("pending")

    def test_blocks_of_another_model_are_not_loaded(self, running: Running) -> None:
        """R-81: one store, the same prompts, and each model finds its own blocks only."""
        self._need(running, Ability.FOREIGN)
        running.on(Setting.PLAIN)
        assert running.store("foreign")
        running.on(Setting.FOREIGN)
        assert running.ask("foreign") == 0
        assert running.blocks_of("foreign") == running.ask_anew("foreign")
        running.door.settle()
        running.on(Setting.PLAIN)
        assert running.blocks_of("foreign") == running.ask("foreign")

    def test_engine_that_is_killed_leaves_what_is_right(self, running: Running) -> None:
        """R-81: SIGKILL with saves under way; what was saved before is found."""
        self._need(running, Ability.KILL)
        running.on(Setting.PLAIN)
        assert running.store("saved")
        assert running.ask("in hand") == 0
        running.kill()
        assert unsound(running.slab) == []
        running.on(Setting.PLAIN)
        assert running.blocks_of("saved") == running.ask("saved")
        running.ask("in hand")

    def test_engine_goes_on_without_its_store(self, running: Running) -> None:
        """R-81: its files are taken away; soon nothing is loaded any more."""
        running.on(Setting.PLAIN)
        assert running.ask(Damage.REMOVED) == 0
        assert running.blocks_of(Damage.REMOVED) == running.ask_anew(Damage.REMOVED)
        running.remove_slab()
        rounds = range(_ROUNDS)
        assert any(running.ask_anew(Damage.REMOVED) == 0 for _ in rounds)
        assert running.ask_anew(Damage.REMOVED) == 0
        running.door.settle()
        assert running.door.left() == {}
        running.stop()

    # -- tiers -----------------------------------------------------------------------

    def test_prompts_are_warm_through_a_tier_on_another_machine(
        self, running: Running
    ) -> None:
        """R-81, R-53: all that was spilled comes back; what rots there is computed."""
        self._need(running, Ability.TIERS)
        running.on(Setting.TIERED)
        assert running.store("spilled")
        running.move()
        running.on(Setting.TIERED)
        assert running.blocks_of("spilled") == running.ask("spilled")
        assert running.blocks_of("spilled") == running.door.fetched_blocks()
        running.door.settle()
        running.door.forget()
        assert drop(running.slab, stored(running.slab)) > 0
        assert damage_files(running.tier) > 0
        assert running.ask("spilled") == 0
        running.door.settle()
        assert running.door.left() == {}

    # -- no room ---------------------------------------------------------------------

    def test_full_store_serves_what_was_used_last(self, running: Running) -> None:
        """R-81: more than fits, one by one and at once, and one that is too long."""
        self._need(running, Ability.SMALL)
        running.on(Setting.SMALL)
        for story in ("full", "longer", "last"):
            assert running.ask_anew(story) == 0
        assert running.blocks_of("last") == running.ask_anew("last")
        assert len(stored(running.slab)) < running.blocks_of("full")
        running.ask_anew("longer")
        running.ask_anew("full")
        assert running.door.left() == {}

    def test_requests_that_are_preempted_are_exact(self, running: Running) -> None:
        """R-81: computed again or loaded, while their saves are under way and after."""
        self._need(running, Ability.PREEMPT)
        running.on(Setting.TIGHT)
        running.ask("tight")
        assert running.door.preemptions() > 0
        assert running.ask_anew("tight") > 0
        running.door.settle()
        assert running.door.left() == {}
