# SPDX-License-Identifier: Apache-2.0
"""What a scheduler remembers of blocks that were not saved, or went bad."""

import pytest

from tests.scheduler.model import HYBRID, ONE_FULL, STATE, hashes_of, make_layout
from ucm.config import SaveDecoded
from ucm.layout import KVLayout
from ucm.reasons import MissReason, Reason
from ucm.scheduler.decoded import Decoded
from ucm.scheduler.requests import NO_WISHES, RequestEnd, Wishes
from ucm.scheduler.unsaved import NOT_TAKEN, Unsaved

HASHES = hashes_of("u", 40)
ALL = Decoded(SaveDecoded.AT_END, {})
QUEUE = {"queue_tickets", "queue_bytes", "store_behind", "overload"}


def end_of(
    tokens: int, prompt: int, wishes: Wishes = NO_WISHES, hashes: int = 40
) -> RequestEnd:
    """Return the end of a request that had so many tokens, and one more sampled."""
    return RequestEnd(
        computed_tokens=tokens,
        known_tokens=tokens + 1,
        prompt_tokens=prompt,
        hashes=HASHES[:hashes],
        tables=(),
        wishes=wishes,
    )


def known(unsaved: Unsaved, group: int = 0, step: int = 1) -> list[int]:
    """Return the positions of a group's blocks of which anything is known."""
    some = HASHES[step - 1 :: step]
    return [
        at for at, each in enumerate(some) if unsaved.of(group, each, 0) is not None
    ]


class TestUnsaved:
    @pytest.mark.parametrize("reason", Reason)
    def test_end_of_a_ticket_says_why_its_blocks_are_missing(
        self, reason: Reason
    ) -> None:
        """R-71: each end is one of the reasons of misses, and its own word the detail."""
        expected = {
            Reason.CORRUPT: MissReason.CORRUPT,
            Reason.EVICTED: MissReason.EVICTED,
        }.get(reason, MissReason.QUEUE if reason in QUEUE else MissReason.FAILED)
        unsaved = Unsaved()
        unsaved.ended(0, HASHES[:2], reason, 10.0)
        unsaved.ended(1, HASHES[2:3], reason, 10.0)
        for group, at in ((0, 0), (0, 1), (1, 2)):
            assert ((expected, reason), 2.5) == unsaved.of(group, HASHES[at], 12.5)
        assert unsaved.of(1, HASHES[0], 12.5) is None
        assert unsaved.of(0, HASHES[2], 12.5) is None

    def test_later_word_counts(self) -> None:
        """What was refused and then failed has failed."""
        unsaved = Unsaved()
        unsaved.put(0, HASHES[:2], NOT_TAKEN, 1.0)
        unsaved.ended(0, HASHES[1:2], Reason.DEADLINE, 2.0)
        assert (NOT_TAKEN, 2.0) == unsaved.of(0, HASHES[0], 3.0)
        assert ((MissReason.FAILED, "deadline"), 1.0) == unsaved.of(0, HASHES[1], 3.0)

    @pytest.mark.parametrize(
        ("tokens", "prompt", "wishes", "saves_decoded", "blocks"),
        [
            (30, 18, NO_WISHES, True, range(0)),
            (30, 18, NO_WISHES, False, range(4, 7)),
            (18, 18, NO_WISHES, False, range(0)),
            (30, 18, Wishes(most_saved=10), True, range(2, 7)),
            (30, 18, Wishes(most_saved=99), True, ()),
            (30, 18, Wishes(most_saved=0), True, range(7)),
            (30, 18, Wishes(most_saved=0, forgets=True), False, range(7)),
            (9000, 18, Wishes(most_saved=0), True, range(40)),
        ],
    )
    def test_what_is_not_to_be_saved_is_put_down_when_its_request_ends(
        self,
        tokens: int,
        prompt: int,
        wishes: Wishes,
        saves_decoded: bool,
        blocks: range,
    ) -> None:
        """R-71: the whole blocks of a request that wishes no save; of any other, where
        answers are not saved, those behind its prompt."""
        unsaved = Unsaved()
        end = end_of(tokens, prompt, wishes)
        when = SaveDecoded.AT_END if saves_decoded else SaveDecoded.NEVER
        unsaved.passed_over(ONE_FULL, end, 0.0, Decoded(when, {}))
        assert [*blocks] == known(unsaved)
        for at in blocks:
            why, _ = unsaved.of(0, HASHES[at], 0.0) or (None, 0)
            text = "save_decoded" if wishes.most_saved > prompt else "wish"
            assert (MissReason.ADMISSION, text) == why

    @pytest.mark.parametrize(
        ("tokens", "wishes", "text"),
        [
            (19, NO_WISHES, "shortest_saved_tokens"),
            (19, Wishes(most_saved=4), "shortest_saved_tokens"),
            (19, Wishes(most_saved=0), "wish"),
            (20, NO_WISHES, None),
        ],
    )
    def test_request_that_was_too_short_is_put_down_whole(
        self, tokens: int, wishes: Wishes, text: str | None
    ) -> None:
        """R-71: of a request below the shortest that is saved nothing is stored, and that is
        why, unless it wished so itself."""
        unsaved = Unsaved()
        decoded = Decoded(SaveDecoded.AT_END, {}, shortest=20)
        unsaved.passed_over(ONE_FULL, end_of(tokens, 8, wishes), 0.0, decoded)
        found = unsaved.of(0, HASHES[0], 0.0)
        assert text == (None if found is None else found[0].detail)

    @pytest.mark.parametrize(
        ("layout", "group_1"),
        [(HYBRID, [0, 1, 2, 3]), (make_layout((4, None), (8, STATE)), [])],
    )
    def test_groups_are_told_apart(self, layout: KVLayout, group_1: list[int]) -> None:
        """Each group has its own blocks; of states nothing is known beforehand."""
        unsaved = Unsaved()
        end = end_of(32, 32, Wishes(most_saved=0))
        unsaved.passed_over(layout, end, 0.0, ALL)
        assert [*range(8)] == known(unsaved)
        assert group_1 == known(unsaved, group=1, step=2)

    def test_one_request_takes_a_bounded_part(self) -> None:
        """A request of a million tokens leaves room for what is known of others."""
        hashes = hashes_of("long", 5000)
        end = RequestEnd(
            computed_tokens=20000,
            known_tokens=20001,
            prompt_tokens=20000,
            hashes=hashes,
            tables=(),
            wishes=Wishes(most_saved=0),
        )
        unsaved = Unsaved()
        unsaved.passed_over(ONE_FULL, end, 0.0, ALL)
        told = [unsaved.of(0, each, 0.0) is not None for each in hashes]
        assert 1000 < sum(told) <= 1024
        assert not any(told[1024:])
