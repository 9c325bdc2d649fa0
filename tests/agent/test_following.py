# SPDX-License-Identifier: Apache-2.0
"""An engine at the agent's socket follows its ledger, one batch after the other."""

import msgspec

from tests.agent.ledger_kit import DIGEST, hash_at, key_of
from tests.agent.test_connection import HELLO, talk
from ucm.agent.ledger import Ledger
from ucm.agent.mirror import Said
from ucm.agent.protocol import Describe, Entry, Follow, Told
from ucm.blocks import keyspace_prefix

PREFIX = keyspace_prefix(DIGEST)
SAID = msgspec.msgpack.encode(Said(hash_at(1), None, [1, 2]))


def follow(number: int = 1, prefix: bytes = PREFIX, *, alone: bool = False) -> Follow:
    """Return what asks for the next batch."""
    return Follow(number, prefix, alone)


class TestFollow:
    def test_engine_is_told_batch_by_batch(self, tmp_path) -> None:
        """R-57: a listing, then what comes and goes, each when the engine asks for more."""
        ledger = Ledger(1)
        ledger.stored(0, key_of(1))

        async def talking(pipe, core):
            pipe.say(HELLO, Describe([(key_of(1), SAID)]), follow())
            await pipe.hear()
            told = [await pipe.hear()]
            pipe.say(follow())
            ledger.removed(0, key_of(1))
            ledger.stored(0, key_of(2))
            return [*told, await pipe.hear()]

        told, problem, _ = talk(tmp_path, talking, ledger=lambda: ledger)
        assert [
            Told(1, [Entry(0, True, key_of(1), SAID)], begins=True, listed=True),
            Told(
                *(1, [Entry(0, False, key_of(1)), Entry(0, True, key_of(2))]),
                begins=False,
                listed=False,
            ),
        ] == told
        assert "" == problem

    def test_engine_that_is_gone_makes_place(self, tmp_path) -> None:
        """R-57: the next engine tells when the one that told has left."""
        ledger = Ledger(1)
        ledger.stored(0, key_of(1))

        async def talking(pipe, core):
            pipe.say(HELLO, follow(alone=True))
            await pipe.hear()
            return await pipe.hear()

        for _ in range(2):
            told, _, _ = talk(tmp_path, talking, ledger=lambda: ledger)
            assert [Entry(0, True, key_of(1))] == told.entries
        assert {} == ledger._queues

    def test_other_key_space_ends_the_wait(self, tmp_path) -> None:
        """R-57: with new weights an engine follows another key space, though it waits for
        news of the former one."""
        ledger = Ledger(1)
        ledger.stored(0, key_of(1))

        async def talking(pipe, core):
            pipe.say(HELLO, follow(1, b"\2" * 17, alone=True))
            await pipe.hear(), await pipe.hear()
            pipe.say(follow(1, b"\2" * 17, alone=True), follow(2, alone=True))
            return await pipe.hear()

        told, problem, _ = talk(tmp_path, talking, ledger=lambda: ledger)
        assert Told(2, [Entry(0, True, key_of(1))], begins=True, listed=True) == told
        assert "" == problem
        assert {} == ledger._queues


class TestStrangers:
    def test_what_makes_no_sense_ends_the_connection(self, tmp_path) -> None:
        """R-63: a peer is not believed; what it says is bounded."""
        ledger = Ledger(1)
        wrong = {
            "it asks before it was answered": [follow(), follow(), follow()],
            "a key space that is none of ours": [follow(prefix=b"short")],
            "a key that is none of ours": [Describe([(b"short", b"")])],
            "a description of 14337 bytes": [Describe([(key_of(1), bytes(14337))])],
        }

        def problem_of(messages) -> str:
            async def talking(pipe, core):
                pipe.say(HELLO, *messages)
                await pipe.hear()

            return talk(tmp_path, talking, ledger=lambda: ledger)[1]

        told = {words: problem_of(messages) for words, messages in wrong.items()}
        assert {words: words for words in wrong} == told
