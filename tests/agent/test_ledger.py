# SPDX-License-Identifier: Apache-2.0
"""The node's ledger: who follows it has what is there, whatever happened meanwhile."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent.ledger_kit import DIGEST, Follower, hash_at, key_of, now
from ucm.agent.ledger import AT_ONCE, Ledger
from ucm.agent.mirror import Said
from ucm.blocks import block_of, hash_of, keyspace_prefix, shard_of

OTHER = bytes(16)
SAID = Said(hash_at(7), None, [1, 2, 3])
TEXT = msgspec.msgpack.encode(SAID)
SAID_BYTES = len(TEXT) + len(block_of(key_of(7)))
"""Of a description, and of the name of its block."""
STEP = st.tuples(
    st.sampled_from(
        ["store", "store", "remove", "follow", "look", "restart", "describe"]
    ),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 1),
)


class World:
    """A ledger, the media that it is told of, and one who follows."""

    def __init__(self) -> None:
        self.media: list[set] = [set(), set()]
        self.ledger = self._begin()
        self.follower = Follower(2)
        self.follower.join(self.ledger)

    def _begin(self) -> Ledger:
        return Ledger(2, most_changes=4, most_said_bytes=3 * SAID_BYTES)

    def store(self, number: int, medium: int, shard: int) -> None:
        """Put a part of a block somewhere."""
        self.media[medium].add(key_of(number, shard))
        self.ledger.stored(medium, key_of(number, shard))

    def remove(self, number: int, medium: int, shard: int) -> None:
        """Take it away."""
        self.media[medium].discard(key_of(number, shard))
        self.ledger.removed(medium, key_of(number, shard))

    def restart(self, number: int, medium: int, shard: int) -> None:
        """Begin another ledger, and lose a part meanwhile."""
        self.media[medium].discard(key_of(number, shard))
        self.ledger = self._begin()
        for at, keys in enumerate(self.media):
            for key in keys:
                self.ledger.stored(at, key)
        self.follower.join(self.ledger)

    def describe(self, number: int, medium: int, shard: int) -> None:
        """Say what a block holds, by the engine's own name of it."""
        said = Said(hash_at(100 + number), None, [number])
        self.ledger.describe(key_of(number), msgspec.msgpack.encode(said))

    def follow(self, *_: int) -> None:
        """Read what is new."""
        self.follower.follow()

    def look(self, *_: int) -> None:
        """Read some of it."""
        if (told := now(self.follower.reader)) is not None:
            self.follower.hear(told)

    def whole(self) -> set[tuple[int, bytes]]:
        """Return the blocks of which all parts are there, by medium."""
        found = set()
        for medium, keys in enumerate(self.media):
            names = {block_of(key) for key in keys if shard_of(key) == 0}
            names &= {block_of(key) for key in keys if shard_of(key) == 1}
            found |= {(medium, name[-32:]) for name in names}
        return found


class TestFollow:
    @settings(max_examples=150, deadline=None)
    @given(steps=st.lists(STEP, max_size=40))
    def test_who_follows_has_what_is_whole(self, steps) -> None:
        """R-57: whatever comes and goes, however late one reads, and though ledgers end, a
        block is told of where all its parts are, under one name, and nowhere else."""
        world = World()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ucm.agent.ledger.AT_ONCE", 2)
            for name, *step in steps:
                getattr(world, name)(*step)
            world.follow()
        own = [(at, name[0] % 100) for at, _, name in world.follower.there]
        assert sorted((at, name[0]) for at, name in world.whole()) == sorted(own)
        assert len(own) == len(world.follower.mirror)

    def test_who_was_too_slow_is_told_what_there_is(self) -> None:
        """R-57: changes that the ring has no room for are seen by what they left behind."""
        ledger, follower = Ledger(1, most_changes=4), Follower()
        follower.join(ledger)
        ledger.stored(0, key_of(1))
        follower.follow()
        ledger.removed(0, key_of(1))
        for number in range(2, 7):
            ledger.stored(0, key_of(number))
        follower.follow()
        assert {(0, 0, hash_at(number)) for number in range(2, 7)} == set(
            follower.there
        )

    def test_what_went_while_no_agent_was_there_is_told(self) -> None:
        """R-57: another ledger, which knows nothing of the one before, tells what there is."""
        first, second, follower = Ledger(1), Ledger(1), Follower()
        for number in (1, 2):
            first.stored(0, key_of(number))
        follower.join(first)
        follower.follow()
        second.stored(0, key_of(2))
        follower.join(second)
        follower.follow()
        assert [(0, 0, hash_at(2))] == list(follower.there)

    def test_listing_looks_at_no_block_of_another_key_space(self) -> None:
        """R-57: a million blocks of other models cost who follows one of them nothing."""

        class Untouched(bytes):
            def startswith(self, *_: object) -> bool:
                raise AssertionError("it is of another key space")

        ledger, follower = Ledger(1), Follower()
        ledger.stored(0, Untouched(key_of(1, digest=OTHER)))
        ledger.stored(0, key_of(2))
        follower.join(ledger)
        follower.follow()
        assert [(0, 0, hash_at(2))] == list(follower.there)
        ledger.removed(0, key_of(1, digest=OTHER))
        assert 1 == ledger.told()["blocks"]

    def test_listing_comes_in_batches(self) -> None:
        """R-57: a reader that begins is told all, some of it at a time."""
        ledger, follower = Ledger(1), Follower()
        for number in range(AT_ONCE + 1):
            ledger.stored(0, key_of(1, digest=DIGEST, shard=number))
        follower.join(ledger)
        first, second = now(follower.reader), now(follower.reader)
        assert (AT_ONCE, True, False) == (
            len(first.entries),
            first.begins,
            first.listed,
        )
        assert (1, False, True) == (len(second.entries), second.begins, second.listed)
        assert now(follower.reader) is None

    @pytest.mark.parametrize("pace", [2, 3])
    def test_listing_ends_though_changes_come(self, pace) -> None:
        """R-57: beside blocks that come and go all the time a listing goes on, begins no
        second time, and at its end all is told of that is there, and nothing else."""
        ledger, follower = Ledger(2, most_changes=32), Follower()
        for number in range(200):
            ledger.stored(0, key_of(number))
        follower.join(ledger)
        follower.follow()
        follower.join(ledger)
        told, numbers = [], itertools.cycle(range(200))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ucm.agent.ledger.AT_ONCE", 8)
            while not told or not told[-1].listed:
                told.append(now(follower.reader))
                follower.hear(told[-1])
                if len(told) == 1:
                    ledger.removed(0, key_of(199))
                for number in itertools.islice(numbers, pace):
                    ledger.stored(1, key_of(number))
                    ledger.removed(1, key_of((number + 150) % 200))
                assert 400 > len(told)
            assert 1 == sum(each.begins for each in told)
            follower.follow()
        assert {
            (medium, 0, hash_at(number))
            for medium in range(2)
            for number in range(200)
            if ledger.has(medium, key_of(number))
        } == set(follower.there)

    def test_listing_that_is_too_slow_ends_before_the_next_begins(self) -> None:
        """R-57: where more changes than one can read, each listing ends all the same, and what
        was gone at its beginning is told of by then."""
        ledger, follower = Ledger(2, most_changes=32), Follower()
        for number in range(100):
            ledger.stored(0, key_of(number))
        follower.join(ledger)
        follower.follow()
        ledger.removed(0, key_of(99))
        follower.join(ledger)
        told = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ucm.agent.ledger.AT_ONCE", 8)
            for _ in range(60):
                told.append(now(follower.reader))
                follower.hear(told[-1])
                for number in range(20):
                    ledger.stored(1, key_of(number))
                    ledger.removed(1, key_of(number))
                if told[-1].listed:
                    assert (0, 0, hash_at(99)) not in follower.there
            ends = [each.begins for each in told if each.begins or each.listed]
            assert 4 < len(ends)
            assert [True, False] * (len(ends) // 2) == ends[: len(ends) // 2 * 2]
            follower.follow()
        assert {(0, 0, hash_at(number)) for number in range(99)} == set(follower.there)

    def test_listing_ends_with_what_was_there_at_one_time(self) -> None:
        """R-57: at the end of a listing all is told that had changed when its last block's turn
        came, however much that was."""
        ledger, follower = Ledger(1), Follower()
        for number in range(6):
            ledger.stored(0, key_of(number))
        follower.join(ledger)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ucm.agent.ledger.AT_ONCE", 4)
            follower.hear(now(follower.reader))
            ledger.removed(0, key_of(5))
            for number in range(20, 30):
                ledger.stored(0, key_of(number))
            while not (told := now(follower.reader)).listed:
                follower.hear(told)
            follower.hear(told)
        own = {(0, 0, hash_at(number)) for number in (*range(5), *range(20, 30))}
        assert own == set(follower.there)
        assert now(follower.reader) is None

    def test_other_key_spaces_are_none_of_its_business(self) -> None:
        """R-57: hashes of other models' blocks mean nothing to an engine."""
        ledger, follower = Ledger(1), Follower()
        ledger.stored(0, key_of(1, digest=OTHER))
        follower.join(ledger)
        ledger.stored(0, key_of(2, digest=OTHER))
        follower.follow()
        assert {} == follower.there
        ledger.stored(0, key_of(3))
        follower.follow()
        assert [(0, 0, hash_at(3))] == list(follower.there)

    def test_of_those_who_want_to_be_alone_one_is_told(self) -> None:
        """R-57: engines that share a slab do not each tell a removal; when the one that
        told is gone the next one tells all, and who lost its place takes back what it said."""
        ledger, first, second = Ledger(1), Follower(alone=True), Follower(alone=True)
        ledger.stored(0, key_of(1))
        first.join(ledger)
        second.join(ledger)
        for each in (first, second):
            each.follow()
        assert (1, 0) == (len(first.there), len(second.there))
        ledger.close(first.reader)
        second.follow()
        first.join(ledger)
        first.follow()
        assert (0, 1) == (len(first.there), len(second.there))

    def test_more_than_it_can_know_is_counted(self) -> None:
        """R-57: the ledger is bounded; what it has no room for is not told of."""
        ledger, follower = Ledger(1, most_blocks=2), Follower()
        for number in range(3):
            ledger.stored(0, key_of(number))
        ledger.removed(0, key_of(2))
        follower.join(ledger)
        follower.follow()
        assert 2 == len(follower.there)
        told = {"blocks": 2, "changes": 2, "described": 0}
        assert told | {"untold": 1, "forgotten": 0} == ledger.told()

    def test_what_a_tier_may_have_lost_makes_room(self) -> None:
        """R-57: a shared tier does not tell what it lets go: the oldest of what only such tiers have is
        told as removed, and never a block of the slab or a drive, nor is one of these kept out."""
        ledger, follower = Ledger(3, most_blocks=4), Follower()
        ledger.guess(2)
        follower.join(ledger)
        ledger.stored(0, key_of(0))
        for number in (0, 1, 2, 3, 1):  # the last one is seen again
            ledger.stored(2, key_of(number))
        ledger.stored(1, key_of(4))
        ledger.stored(0, key_of(5))
        follower.follow()
        there = {(medium, hash_[0]) for medium, _, hash_ in follower.there}
        assert {(0, 0), (2, 0), (2, 1), (1, 4), (0, 5)} == there
        ledger.removed(0, key_of(0))  # now it is one that only the tier may have
        for number in (6, 7, 8):
            ledger.stored(0, key_of(number))
        follower.follow()
        there = {(medium, hash_[0]) for medium, _, hash_ in follower.there}
        assert {(1, 4), (0, 5), (0, 6), (0, 7)} == there
        told = ledger.told()
        assert (4, 4, 1) == (told["blocks"], told["forgotten"], told["untold"])


class TestDescribe:
    def test_description_travels_with_its_block(self) -> None:
        """R-57: what an engine says of a block is told when the block comes, in any medium."""
        ledger, follower = Ledger(2), Follower()
        follower.join(ledger)
        ledger.describe(key_of(7), TEXT)
        ledger.stored(0, key_of(7))
        ledger.stored(1, key_of(7))
        follower.follow()
        assert {(0, 0, hash_at(7)): SAID, (1, 0, hash_at(7)): SAID} == follower.there

    def test_late_description_tells_of_the_block_again(self) -> None:
        """R-57: a block whose tokens nobody knew is told of once more when somebody does."""
        ledger, follower = Ledger(1), Follower()
        follower.join(ledger)
        ledger.stored(0, key_of(7))
        follower.follow()
        assert {(0, 0, hash_at(7)): None} == follower.there
        ledger.describe(key_of(7), TEXT)
        ledger.describe(key_of(7), TEXT)
        follower.follow()
        assert {(0, 0, hash_at(7)): SAID} == follower.there
        assert 2 == len(follower.heard)

    def test_block_has_the_name_that_its_engine_has_for_it(self) -> None:
        """R-57: a block is stored under a hash of ours where an adapter is in it, and told of
        under the engine's."""
        ledger, follower = Ledger(1), Follower()
        follower.join(ledger)
        ledger.stored(0, key_of(8))
        follower.follow()
        assert [(0, 0, hash_at(8))] == list(follower.there)
        ledger.describe(key_of(8), TEXT)
        follower.follow()
        assert [(0, 0, hash_at(7))] == list(follower.there)
        ledger.removed(0, key_of(8))
        follower.follow()
        assert {} == follower.there

    def test_garbage_says_nothing(self) -> None:
        """R-57: what another release says in words of its own is as if nobody had."""
        ledger, follower = Ledger(1), Follower()
        ledger.describe(key_of(7), b"\xc1")
        ledger.stored(0, key_of(7))
        follower.join(ledger)
        follower.follow()
        assert {(0, 0, hash_at(7)): None} == follower.there

    def test_oldest_descriptions_go(self) -> None:
        """R-57: descriptions have a bound; blocks whose own is gone are told of without."""
        ledger, follower = Ledger(1, most_said_bytes=SAID_BYTES), Follower()
        for number in (7, 8):
            ledger.describe(key_of(number), TEXT)
            ledger.stored(0, key_of(number))
        follower.join(ledger)
        follower.follow()
        said = [each.said for each in follower.heard]
        assert [None, SAID] == said

    def test_descriptions_that_say_nothing_have_a_bound(self) -> None:
        """R-57: each takes room by the name of its block."""
        ledger = Ledger(1, most_said_bytes=2 * SAID_BYTES)
        for number in range(200):
            ledger.describe(key_of(number), b"")
        assert 2 * SAID_BYTES // (SAID_BYTES - len(TEXT)) == ledger.told()["described"]


class TestAgain:
    def test_listing_tells_all_again_when_asked(self) -> None:
        """R-57: a subscriber that forgot all, as it does when an engine clears its cache,
        hears of each block again, and of what went meanwhile."""
        ledger, follower = Ledger(1), Follower()
        for number in (1, 2):
            ledger.stored(0, key_of(number))
        follower.join(ledger)
        follower.follow()
        ledger.removed(0, key_of(2))
        follower.heard.clear()
        follower.join(ledger)
        follower.mirror.tell_again()
        follower.follow()
        assert [(True, hash_at(1)), (False, hash_at(2))] == [
            (each.is_stored, each.block_hash) for each in follower.heard
        ]
        follower.heard.clear()
        follower.join(ledger)
        follower.follow()
        assert [] == follower.heard

    def test_parts_of_a_key(self) -> None:
        """R-57: what a key says of its block."""
        key = key_of(9, shard=3)
        assert (3, hash_at(9)) == (shard_of(key), hash_of(key))
        assert block_of(key) == block_of(key_of(9, shard=1)) != block_of(key_of(8))
        assert key.startswith(keyspace_prefix(DIGEST))
