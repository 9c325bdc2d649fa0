# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is loaded or computed: what is held against what, and what is learnt."""

import pytest

from tests.testing.host_kit import ONE_FULL, make_layout
from ucm.scheduler.paying import Paying

SIZE = ONE_FULL.groups[0].block_tokens
HIT = range(32 * SIZE)
TOKENS = 8192
"""Of the prompts from which is learnt how fast they are computed."""


class Engine:
    """
    A decision that has learnt, and the time.

    Args:
        load_s: How long each load of ``HIT`` has taken; 0: there was none.
        compute_s: How long computing as much takes; 0: nobody knows.
    """

    def __init__(self, load_s=2.0, compute_s=1.0, layout=ONE_FULL, *, predicts=True):
        self.now = 10.0
        self.paying = Paying(layout, predicts=predicts)
        run_s = compute_s * TOKENS / len(HIT)
        for _ in range(4 if compute_s else 0):
            self.paying.planned(TOKENS, self.now)
            self.now += run_s
            self.paying.planned(0, self.now)
            self.paying.planned(0, self.now)
        for _ in range(4 if load_s else 0):
            self.load(load_s)

    def load(self, seconds, *names, hit=HIT):
        """Have loads begin together, and end together after so long."""
        for name in names or ("r",):
            self.paying.ordered(name, hit, self.now)
        self.now += seconds
        self.paying.planned(0, self.now)
        self.paying.over(names or ("r",), self.now)

    def declines(self, hit=HIT):
        """Decide on a hit."""
        return self.paying.declines(hit, self.now)


class TestDeclines:
    def test_load_that_is_slower_than_computing_is_not_taken(self) -> None:
        """R-59: of the slab as of tiers; one that is faster is taken."""
        assert Engine(load_s=2.0).declines()
        assert not Engine(load_s=0.5).declines()

    @pytest.mark.parametrize("load_s", [0.0, 1e-6])
    def test_few_tokens_are_computed_with_the_last_one(self, load_s) -> None:
        """R-59: a step computes the last token in any case, and who waits for a load misses
        one: whatever loads take, the last block of a prompt is not worth it, where it is
        known that the engine computes prompts at all."""
        made = Engine(load_s=load_s)
        for start in (0, 4096):
            assert made.declines(range(start, start + 64))
        assert not Engine(load_s=1e-6).declines(range(65))
        assert not Engine(compute_s=0.0).declines(range(64))
        assert not Engine(predicts=False).declines(range(64))

    @pytest.mark.parametrize("unknown", [{"load_s": 0.0}, {"compute_s": 0.0}])
    def test_nothing_is_declined_unmeasured(self, unknown) -> None:
        """R-59: before a few loads and prompts were seen all hits are taken."""
        assert not Engine(**unknown).declines()

    def test_setting_has_all_loaded(self) -> None:
        """R-59: who does not want predictions has what is stored."""
        assert not Engine(predicts=False).declines()

    def test_slow_slab_is_tried_again_and_believed(self) -> None:
        """R-59: what was slow for a time is not refused for ever: of sixteen hits one is
        loaded, and one after half a minute; once loads are fast all are."""
        engine = Engine(load_s=2.0)
        assert [True] * 15 + [False] == [_alone(engine) for _ in range(16)]
        engine.now += 31.0
        assert not _alone(engine)
        loaded = 0
        for _ in range(200):
            if not _alone(engine):
                loaded += 1
                engine.load(0.01)
        assert loaded > 100

    def test_prompts_that_are_computed_first_count(self) -> None:
        """R-59: what the last plan computes, and what was decided to be computed since, is
        ahead of this prompt: loads run beside it."""
        engine = Engine(load_s=2.5)
        assert engine.declines()
        assert engine.declines()
        assert not engine.declines()
        engine.paying.planned(2 * len(HIT), engine.now)
        assert not engine.declines()
        engine.paying.planned(0, engine.now)
        assert engine.declines()

    def test_loads_that_are_on_their_way_count(self) -> None:
        """R-59: what is loaded first is ahead of this load, until it is over or has failed."""
        engine = Engine(load_s=0.6)
        engine.paying.ordered("a", HIT, engine.now)
        assert engine.declines()
        engine.paying.planned(0, engine.now)
        engine.paying.forget("a")
        assert not engine.declines()
        engine.load(0.6, "a")
        assert not engine.declines()
        assert 0 == len(engine.paying)

    def test_only_what_a_hit_brings_counts(self) -> None:
        """R-59: of a group with a window a long hit is a short load, as of what the engine
        has itself."""
        window = make_layout((SIZE, SIZE))
        full, part = range(64 * SIZE), range(32 * SIZE, 64 * SIZE)
        assert not Engine(load_s=1.9, layout=window).declines(full)
        assert Engine(load_s=1.9).declines(full)
        assert Engine(load_s=1.9).declines(part)

    def test_hit_much_larger_than_any_load_is_tried(self) -> None:
        """R-59: short loads that are alike took a latency; a long one is not so many times it."""
        engine = Engine(load_s=2.0)
        long = range(320 * SIZE)
        assert engine.declines()
        assert not engine.declines(long)
        engine.load(100.0, hit=long)
        assert engine.declines(long)


class TestLearns:
    def test_load_that_is_over_with_its_step_took_no_time(self) -> None:
        """R-59: an engine that computes prompts of others for seconds hears late of a load that
        was over at once; it computes them anyway."""
        engine = Engine(load_s=0.0)
        for _ in range(4):
            engine.paying.ordered("r", HIT, engine.now)
            engine.paying.planned(TOKENS, engine.now)
            engine.now += 2.0
            engine.paying.over(["r"], engine.now)
        assert not _alone(engine)

    def test_loads_that_ran_together_are_no_slower(self) -> None:
        """R-59: of four that end after two seconds each took half of one."""
        engine = Engine(load_s=0.0)
        for _ in range(4):
            engine.load(2.0, "a", "b", "c", "d")
        assert not engine.declines()

    def test_load_behind_another_is_not_charged_with_it(self) -> None:
        """R-59: those that end one after the other took the time between the ends."""
        engine = Engine(load_s=0.0)
        names = "abcdefgh"
        for name in names:
            engine.paying.ordered(name, HIT, engine.now)
        for name in names:
            engine.now += 0.5
            engine.paying.planned(0, engine.now)
            engine.paying.over([name], engine.now)
        assert not engine.declines()

    def test_failed_load_says_nothing(self) -> None:
        """R-59: how long it took to fail is not how long a load takes."""
        engine = Engine(load_s=0.5)
        for _ in range(8):
            engine.paying.ordered("r", HIT, engine.now)
            engine.now += 10.0
            engine.paying.forget("r")
            engine.paying.over(["r"], engine.now)
        assert not engine.declines()

    def test_request_that_loads_anew_counts_once(self) -> None:
        """R-59: a load that was begun again is ahead of others once."""
        engine = Engine(load_s=0.3)
        for _ in range(9):
            engine.paying.ordered("r", HIT, engine.now)
        assert not engine.declines()


def _alone(engine: Engine) -> bool:
    """Decide on a hit in a step of its own, in which nothing is computed."""
    engine.paying.planned(0, engine.now)
    return engine.declines()
