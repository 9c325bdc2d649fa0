# SPDX-License-Identifier: Apache-2.0
"""Looking: what is there is found with few questions, and what is missing is never assumed away."""

import random

import pytest

from tests.agent.unruly import Unruly, lay, run_virtual
from ucm.agent.looking import look_along, look_before_put
from ucm.backends.abc import Presence
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(300)
THERE, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN


class Asked(Unruly):
    """Counts of how many blocks it was asked, call by call."""

    def __init__(self, **can: object) -> None:
        super().__init__(**can)
        self.looks: list[int] = []

    async def exists(self, keys):
        """Look, and count."""
        self.looks.append(len(keys))
        return await super().exists(keys)


def look(how, keys, laid, *, is_down=False, **can):
    """Return what was told of *keys*, and how many questions each call had."""
    tier = Asked(**can)
    tier.does.is_down = is_down

    async def told():
        await lay(tier, laid)
        return await how(tier, keys)

    return run_virtual(told), tier.looks


class TestLookAlong:
    @pytest.mark.parametrize(("count", "asked"), [(1, 1), (8, 3), (64, 9), (256, 17)])
    @pytest.mark.parametrize("end", [THERE, ABSENT])
    def test_all_or_nothing_costs_a_few_questions(self, count, asked, end) -> None:
        """R-53: where all blocks are there, or none is, a few are asked for, in one call; of few
        blocks fewer, as a look may cost what moving a block does."""
        laid = KEYS[:count] if end is THERE else []
        told, looks = look(look_along, KEYS[:count], laid, shared=True)
        assert ([end] * count, [asked]) == (told, looks)

    @pytest.mark.parametrize("there", [0, 1, 2, 15, 16, 17, 18, 143, 144, 298, 299])
    def test_end_of_what_is_there_is_found(self, there: int) -> None:
        """R-53: a prefix is found to its last block, in three rounds at most."""
        told, looks = look(look_along, KEYS, KEYS[:there], shared=True)
        assert [THERE] * there + [ABSENT] * (300 - there) == told
        assert 3 >= len(looks)

    @pytest.mark.parametrize("seed", range(20))
    def test_hit_is_never_taken_for_a_miss(self, seed: int) -> None:
        """R-53: whatever is missing, all before the first of these is told to be there, and
        what is told first as absent is so."""
        dice = random.Random(seed)
        laid = {key for key in KEYS if dice.random() < dice.choice([0.9, 0.99, 1.0])}
        told, _ = look(look_along, KEYS, list(laid), shared=True)
        first_missing = [key in laid for key in KEYS].index(False)
        num_told = told.count(THERE)
        assert first_missing <= num_told
        assert not laid & set(KEYS[num_told : num_told + 1])

    def test_tier_without_an_answer_is_asked_once(self) -> None:
        """R-51: one that does not answer costs one deadline, and nothing is known of it."""
        told, looks = look(look_along, KEYS, KEYS, is_down=True, shared=True)
        assert ([UNKNOWN] * 300, 1) == (told, len(looks))

    def test_tier_that_answers_no_more_is_asked_no_more(self) -> None:
        """R-51: what it told before counts, and the rest costs one deadline."""

        class Fading(Asked):
            async def exists(self, keys):
                told = await super().exists(keys)
                return [
                    one if key == KEYS[0] else UNKNOWN
                    for key, one in zip(keys, told, strict=True)
                ]

        tier = Fading(shared=True)

        async def told():
            await lay(tier, KEYS)
            return await look_along(tier, KEYS)

        assert [THERE, *[UNKNOWN] * 299] == run_virtual(told)
        assert 1 == len(tier.looks)

    def test_tier_of_this_machine_is_asked_for_each(self) -> None:
        """R-53: where looks cost nothing there is no guess."""
        told, looks = look(look_along, KEYS[:40], [KEYS[0], KEYS[39]])
        assert ([THERE, *[ABSENT] * 38, THERE], [40]) == (told, looks)


class TestLookBeforePut:
    @pytest.mark.parametrize(
        ("laid", "told", "looks"),
        [
            ([], [ABSENT] * 32, [2]),
            (KEYS[:32], [THERE] * 32, [2, 30]),
            (KEYS[:1], [THERE, *[ABSENT] * 31], [2, 30]),
            (KEYS[31:32], [*[ABSENT] * 31, THERE], [2, 30]),
        ],
    )
    def test_each_is_asked_for_only_where_an_end_is_there(
        self, laid, told, looks
    ) -> None:
        """R-55: what was computed just now is put without a look at each block; what was
        listed anew is looked at, so that its bytes need not go again."""
        found = look(look_before_put, KEYS[:32], laid, creates=True)
        assert (told, looks) == found

    def test_tier_without_an_answer_is_asked_once(self) -> None:
        """R-51: one that does not answer costs one deadline before blocks are dropped."""
        found = look(look_before_put, KEYS[:32], KEYS, is_down=True, creates=True)
        assert ([UNKNOWN] * 32, [2]) == found

    def test_server_of_several_that_is_away_says_nothing_of_others(self) -> None:
        """R-55: blocks between two ends of which nothing is known are put, where others take them."""

        class Several(Asked):
            away = ("one",)

            async def exists(self, keys):
                told = await super().exists(keys)
                ends = {KEYS[0], KEYS[31]}
                return [
                    UNKNOWN if key in ends else one
                    for key, one in zip(keys, told, strict=True)
                ]

        tier = Several(creates=True)

        async def told():
            await lay(tier, [])
            return await look_before_put(tier, KEYS[:32])

        assert [UNKNOWN, *[ABSENT] * 30, UNKNOWN] == run_virtual(told)
        assert [2, 30] == tier.looks

    def test_tier_whose_put_does_not_look_is_asked_for_each(self) -> None:
        """R-55: what a put might write over is looked for."""
        told, looks = look(look_before_put, KEYS[:32], [])
        assert ([ABSENT] * 32, [32]) == (told, looks)
