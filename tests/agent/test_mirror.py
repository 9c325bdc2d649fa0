# SPDX-License-Identifier: Apache-2.0
"""What a mirror tells of a ledger whose listings break off."""

from tests.agent.ledger_kit import DIGEST, Follower, hash_at, key_of, now
from ucm.agent.ledger import AT_ONCE, Ledger
from ucm.blocks import keyspace_prefix


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


def test_block_of_two_key_spaces_is_there_behind_a_change() -> None:
    """R-57: the engine's hash of a block is the same with other weights: that it is gone under the
    former ones is told before that it is there, also where the agent is lost between."""
    other, numbers = bytes(16), range(3)
    ledger, follower = Ledger(1), Follower()
    for digest in (DIGEST, other):
        for number in numbers:
            ledger.stored(0, key_of(number, digest=digest))
    follower.join(ledger)
    follower.follow()
    follower.mirror.tell_again(keyspace_prefix(other))
    follower.join(ledger, other)
    first = next(follower.mirror.apply(now(follower.reader)))  # no more of it
    assert not first.is_stored
    follower.heard.clear()
    follower.there.pop((0, 0, first.block_hash))
    follower.join(ledger, other)
    follower.follow()
    assert [False, False, True, True, True] == [
        each.is_stored for each in follower.heard
    ]
    assert {(0, 0, hash_at(number)) for number in numbers} == set(follower.there)


def test_description_that_is_no_text_is_none() -> None:
    """R-57: it ended the thread that talks to the agent, for good; whoever else follows the ledger
    may have described it."""
    ledger, follower = Ledger(1), Follower()
    ledger.describe(key_of(0), b"\x96\xc4\x01a\xc0\x90\xc0\xa1\xff\xc0")
    ledger.stored(0, key_of(0))
    follower.join(ledger)
    follower.follow()
    assert [(hash_at(0), None)] == [
        (each.block_hash, each.said) for each in follower.heard
    ]
