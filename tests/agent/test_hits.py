# SPDX-License-Identifier: Apache-2.0
"""Which of several hits is brought, and with how few looks."""

import random

import pytest

from ucm.agent.hits import Hits, Question, Search
from ucm.errors import MessageError


class Looks:
    """Some blocks that are somewhere, and who asked for which."""

    def __init__(self, there: set[int]) -> None:
        self._there = there
        self.asked: list[list[int]] = []

    def answer(self, question: Question) -> list[bool]:
        """Say of a prefix that nothing is there behind the first that is missing."""
        told = [block in self._there for block in question.blocks]
        if not question.is_prefix:
            self.asked.append(question.blocks)
            return told
        first = told.index(False) if False in told else len(told)
        return [at < first for at in range(len(told))]

    def find(self, search: Search) -> tuple[int, int | None]:
        """Answer all that is asked; return what was found."""
        try:
            question = next(search)
            while True:
                question = search.send(self.answer(question))
        except StopIteration as over:
            return over.value


def drawn(dice: random.Random) -> list[tuple[int, int]]:
    """Return hits of some blocks: of full groups, windows and states, as they end."""
    top = dice.randint(1, 24)
    spans = []
    for _ in range(dice.randint(1, 3)):
        window = dice.choice([0, 1, 1, 2, 5])
        spans += [(at, at + window - 1 if window else 0) for at in range(1, top + 1)]
    return sorted(spans, key=lambda span: span[0])


def needs(span: tuple[int, int], hit: int) -> bool:
    """Return whether a hit needs a block."""
    return span[0] <= hit and (not span[1] or hit <= span[1])


@pytest.mark.parametrize("seed", range(200))
def test_longest_hit_of_which_all_is_there_is_chosen(seed: int) -> None:
    """R-53, R-54: whatever the slab and the tiers have, no longer hit could have been brought, and
    it needs no block that is nowhere, nor more of them than there is room for."""
    dice = random.Random(seed)
    spans = drawn(dice)
    share = dice.choice([0.5, 0.9, 0.98, 1.0])
    in_slab = [dice.random() < 0.3 for _ in spans]
    somewhere = {at for at in range(len(spans)) if dice.random() < share}
    most = dice.choice([3, 10, 1000])

    def is_good(hit: int) -> bool:
        wanted = [
            at for at, span in enumerate(spans) if needs(span, hit) and not in_slab[at]
        ]
        return len(wanted) <= most and somewhere.issuperset(wanted)

    looks = Looks(somewhere)
    hits = Hits(*zip(*spans, strict=True), len(spans))
    found, lacked = looks.find(hits.choose(in_slab, most))
    top = max(span[0] for span in spans)
    good = [hit for hit in range(1, top + 1) if is_good(hit)]
    assert max(good, default=0) == found
    assert top == hits.top
    needed = [at for at, span in enumerate(spans) if needs(span, found)]
    assert (needed if found else []) == hits.needed_for(found)
    if lacked is not None:
        assert not in_slab[lacked]
        assert lacked not in somewhere
    asked = [block for blocks in looks.asked for block in blocks]
    assert len(set(asked)) == len(asked)


def choose(
    spans: list[tuple[int, int]], there: set[int]
) -> tuple[int, int | None, Looks]:
    """Return what is chosen where the slab has nothing, and the looks that it took."""
    looks = Looks(there)
    hits = Hits(*zip(*spans, strict=True), len(spans))
    nothing = [False] * len(spans)
    return *looks.find(hits.choose(nothing, 1 << 20)), looks


def test_prompt_that_goes_on_otherwise_costs_one_look() -> None:
    """R-53: the windows of the hit that the other groups allow are asked for, and no others."""
    hits = range(1, 501)
    spans = sorted([(at, 0) for at in hits] + [(at, at + 3) for at in hits])
    there = {at for at, span in enumerate(spans) if span[0] <= 300}
    found, lacked, looks = choose(spans, there)
    assert 300 == found
    assert lacked is not None
    assert (301, 0) == spans[lacked]
    assert [[(at, at + 3) for at in range(297, 301)]] == [
        [spans[block] for block in blocks] for blocks in looks.asked
    ]


def test_states_that_are_far_between_are_found_with_few_looks() -> None:
    """R-53: looks double, where only the first of a thousand states is there."""
    hits = range(1, 1001)
    spans = sorted([(at, 0) for at in hits] + [(at, at) for at in hits])
    there = {at for at, span in enumerate(spans) if not span[1] or span[0] == 1}
    found, _, looks = choose(spans, there)
    assert 1 == found
    assert len(looks.asked) < 12


@pytest.mark.parametrize(
    ("shortest", "longest"),
    [
        ([], []),
        ([1], [1]),
        ([1, 1], [1]),
        ([0, 1], [1, 1]),
        ([1, 3], [0, 0]),
        ([1, 1], [-1, 0]),
        ([-1, 1], [0, 0]),
    ],
)
def test_hits_that_are_none_are_refused(
    shortest: list[int], longest: list[int]
) -> None:
    """R-59: an agent believes nobody: what is no hit of two blocks ends the connection."""
    with pytest.raises(MessageError):
        Hits(shortest, longest, 2)


def test_hits_longer_than_all_are_the_longest() -> None:
    """R-59: a number of any size is no harm."""
    hits = Hits([1, 2], [2**64 - 1, 0], 2)
    assert [0, 1] == hits.needed_for(2)
