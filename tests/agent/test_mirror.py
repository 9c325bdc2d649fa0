# SPDX-License-Identifier: Apache-2.0
"""What a mirror tells of a ledger whose listings break off."""

from tests.agent.ledger_kit import Follower, hash_at, key_of, now
from ucm.agent.ledger import AT_ONCE, Ledger


def test_listing_that_broke_off_is_told_again_by_the_next_one() -> None:
    """R-57: a subscriber that forgot all hears of each block again, though the agent that told
    them was lost amid that, and its successor lists them anew."""
    numbers = range(3)
    first, second, follower = Ledger(1), Ledger(1), Follower(AT_ONCE)
    for number in numbers:
        for shard in range(AT_ONCE):
            first.stored(0, key_of(number, shard))
            second.stored(0, key_of(number, shard))
    follower.join(first)
    follower.follow()
    follower.heard.clear()
    follower.mirror.tell_again()
    follower.join(first)
    follower.hear(now(follower.reader))
    assert [hash_at(0)] == [each.block_hash for each in follower.heard]
    follower.join(second)
    follower.follow()
    assert {hash_at(number) for number in numbers} == {
        each.block_hash for each in follower.heard
    }
    follower.heard.clear()
    follower.join(second)
    follower.follow()
    assert [] == follower.heard


def test_all_is_told_again_also_where_the_end_of_a_listing_broke_off() -> None:
    """R-57: an agent is lost while it is told what its listing left out, after a subscriber forgot
    all; what its successor has of that is told again."""
    numbers = range(3)
    first, second, follower = Ledger(1), Ledger(1), Follower()
    for number in numbers:
        second.stored(0, key_of(number))
    follower.join(second)
    follower.follow()
    follower.mirror.tell_again()
    follower.join(first)
    told = now(follower.reader)
    assert told.listed
    next(follower.mirror.apply(told))  # no more of it
    follower.heard.clear()
    follower.join(second)
    follower.follow()
    assert [hash_at(number) for number in numbers] == [
        each.block_hash for each in follower.heard
    ]
