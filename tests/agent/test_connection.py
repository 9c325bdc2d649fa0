# SPDX-License-Identifier: Apache-2.0
"""What an agent says to a peer, and to one that is no engine of its kind."""

import asyncio
import struct
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent.unruly import Unruly, inline, lay, open_core
from tests.stores.slab_kit import open_slab
from ucm.agent.connection import Connection
from ucm.agent.ledger import Ledger
from ucm.agent.protocol import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Ask,
    Done,
    Drop,
    Forget,
    FromAgent,
    GetStatus,
    Hello,
    Refused,
    Status,
    Welcome,
    digest_of,
    encode_frame,
)
from ucm.errors import StoreUnavailableError
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys

KEYS = make_keys(8)
HELLO = Hello(PROTOCOL_VERSION, 4096)
DECODER = msgspec.msgpack.Decoder(FromAgent)


class Pipe:
    """A peer's end of a connection in memory, and the stream of the agent's end."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[bytes] = asyncio.Queue()
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_broken = False
        self.reads = anyio.Event()
        """Whether the peer takes what it is told."""
        self.reads.set()

    async def receive(self) -> bytes:
        """Return some of what the peer has said."""
        if not (data := await self.said.get()):
            raise anyio.EndOfStream
        return data

    async def send(self, data: bytes) -> None:
        """Take what the agent says."""
        if self.is_broken:
            raise anyio.BrokenResourceError
        await self.reads.wait()
        await self._heard.put(data)

    def say(self, *messages) -> None:
        """Say messages, or bytes."""
        for message in messages:
            is_raw = isinstance(message, bytes)
            self.said.put_nowait(message if is_raw else encode_frame(message))

    def hang_up(self) -> None:
        """Say nothing more."""
        self.said.put_nowait(b"")

    async def hear(self):
        """Return the agent's next message."""
        frame = await self._heard.get()
        return DECODER.decode(frame[FRAME_HEADER.size :])


async def tell_status() -> dict[str, object]:
    """Return how an agent is."""
    return {"pid": 1}


def ask_for(number: int, keys=KEYS, **changes) -> Ask:
    """Return a want."""
    ask = Ask(number, list(keys), [BLOCK_BYTES] * len(keys), 5.0, 5.0)
    return msgspec.structs.replace(ask, **changes)


def talk(tmp_path: Path, talking, laid=KEYS, ledger=Ledger, status=tell_status):
    """Have *talking* with a connection over a core; return what came of it."""

    async def run():
        backend = Unruly()
        await lay(backend, laid)
        with open_slab(tmp_path / "slab", 64) as slab:
            async with open_core(slab, backend) as core:
                pipe, problems = Pipe(), []

                async def core_of(_):
                    return await inline(lambda: core)

                peer = Connection(
                    *(pipe, core_of, status), ["memory"], ledger, nonce="this one"
                )

                async def serve():
                    problems.append(await peer.serve())

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(serve)
                    told = await talking(pipe, core)
                    pipe.hang_up()
                return told, problems[0], core.fetcher

    return asyncio.run(run())


class TestTalk:
    def test_want_is_answered_with_what_was_found(self, tmp_path) -> None:
        """R-53: an engine that has said hello has its wants fetched and answered, and knows by
        whom."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7))
            return await pipe.hear(), await pipe.hear()

        told, problem, _ = talk(tmp_path, talking)
        assert (
            Welcome(PROTOCOL_VERSION, ["memory"], "this one"),
            Done(7, 8, "", b"\1" * 8),
        ) == told
        assert "" == problem

    def test_want_of_several_hits_hears_which_one_came(self, tmp_path) -> None:
        """R-53: the longest hit of which all is there, and how many blocks it needs."""
        hits = [1, 2, 3, 4] * 2, [0] * 4 + [1, 2, 3, 4]

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7, hits=hits))
            return await pipe.hear(), await pipe.hear()

        (_, told), problem, _ = talk(tmp_path, talking, laid=KEYS[:6])
        assert ("", Done(7, 3, "absent", b"\1" * 3, reach=2)) == (problem, told)

    def test_peer_that_goes_gives_its_slots_back(self, tmp_path) -> None:
        """R-53: what an engine wanted is dropped when it is gone."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7))
            await pipe.hear(), await pipe.hear()
            return core.fetcher._budget.left

        left, _, fetcher = talk(tmp_path, talking)
        assert (0, 8) == (left, fetcher._budget.left)

    def test_peer_that_is_gone_when_it_is_told_something_is_gone(
        self, tmp_path
    ) -> None:
        """R-53, R-63: also before its end was read: other engines are served on."""
        is_told = anyio.Event()

        async def tell_late() -> dict[str, object]:
            await is_told.wait()
            return await tell_status()

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7), GetStatus())
            await pipe.hear(), await pipe.hear()
            pipe.is_broken = True
            is_told.set()
            while core.fetcher._budget.left < 8:
                await anyio.lowlevel.checkpoint()

        _, problem, fetcher = talk(tmp_path, talking, status=tell_late)
        assert ("", 8) == (problem, fetcher._budget.left)

    def test_peer_that_asks_and_does_not_read_has_one_answer(self, tmp_path) -> None:
        """R-52: however often it asks how the agent is, until it has taken what it was told."""

        async def talking(pipe, core):
            pipe.say(HELLO)
            await pipe.hear()
            pipe.reads = anyio.Event()
            for _ in range(8):
                pipe.say(GetStatus())
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
            pipe.reads.set()
            pipe.say(ask_for(7))
            return [await pipe.hear() for _ in range(2)]

        told, problem, _ = talk(tmp_path, talking)
        assert [Status({"pid": 1}), Done(7, 8, "", b"\1" * 8)] == told
        assert "" == problem

    def test_tier_that_does_not_say_how_it_is_holds_up_no_want(self, tmp_path) -> None:
        """R-52, R-54: an engine looks every few seconds, and a want has one; who is asked
        again before it has answered answers once."""
        is_told, asked = anyio.Event(), []

        async def tell_late() -> dict[str, object]:
            asked.append(1)
            await is_told.wait()
            return await tell_status()

        async def talking(pipe, core):
            pipe.say(HELLO, GetStatus(), GetStatus(), ask_for(7))
            for _ in range(2000):
                await anyio.lowlevel.checkpoint()
            is_told.set()
            told = [await pipe.hear() for _ in range(3)]
            pipe.say(GetStatus())
            return [*told, await pipe.hear()]

        told, problem, _ = talk(tmp_path, talking, status=tell_late)
        assert [
            Done(7, 8, "", b"\1" * 8),
            Status({"pid": 1}),
            Status({"pid": 1}),
        ] == told[1:]
        assert (2, "") == (len(asked), problem)

    def test_dropped_want_gives_its_slots_back(self, tmp_path) -> None:
        """R-53: a want that is dropped makes room for the next one at once."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(1))
            await pipe.hear(), await pipe.hear()
            pipe.say(Drop(1), Drop(5), ask_for(2, make_keys(4, first=50)))
            await pipe.hear(), await pipe.hear()
            return core.fetcher._budget.left

        left, problem, _ = talk(tmp_path, talking)
        assert (8, "") == (left, problem)

    def test_dropped_want_has_its_answer(self, tmp_path) -> None:
        """R-63: a want that is dropped before it is answered is answered, or the engine
        that asks for nothing else takes the agent for stopped, for good."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(1), Drop(1), GetStatus())
            return await pipe.hear(), await pipe.hear()

        told, problem, _ = talk(tmp_path, talking)
        assert Done(1, 0, "withdrawn") == told[1]
        assert "" == problem

    def test_status_is_told_with_and_without_a_hello(self, tmp_path) -> None:
        """R-63: whoever looks after an agent may ask how it is."""

        async def talking(pipe, core):
            pipe.say(GetStatus())
            return await pipe.hear()

        assert Status({"pid": 1}) == talk(tmp_path, talking)[0]

        async def engine_talking(pipe, core):
            pipe.say(HELLO, GetStatus())
            return await pipe.hear(), await pipe.hear()

        assert Status({"pid": 1}) == talk(tmp_path, engine_talking)[0][1]

    def test_slab_that_cannot_be_opened_is_refused_by_name(self, tmp_path) -> None:
        """R-63: an engine that cannot be served hears why."""

        async def run():
            pipe = Pipe()

            async def core_of(_):
                raise StoreUnavailableError("in use")

            pipe.say(HELLO)
            problem = await Connection(
                *(pipe, core_of, tell_status), [], Ledger
            ).serve()
            return problem, await pipe.hear()

        assert ("", Refused("in use")) == asyncio.run(run())


class TestTiers:
    def test_engine_that_is_set_to_other_tiers_is_refused_by_name(self) -> None:
        """R-63: an agent that outlives a change of settings serves nobody who expects the
        new ones; who expects none in particular is served."""

        async def core_of(slot_bytes):
            raise StoreUnavailableError("asked for a core")

        async def greet(tiers):
            pipe = Pipe()
            pipe.say(Hello(PROTOCOL_VERSION, 4096, tiers))
            await Connection(*(pipe, core_of, tell_status), [], Ledger, "one").serve()
            return (await pipe.hear()).problem

        told = {tiers: asyncio.run(greet(tiers)) for tiers in ("", "one", "two")}
        assert told[""] == told["one"] == "asked for a core"
        assert "other tiers" in told["two"]

    def test_digest_is_of_all_settings_in_whatever_order(self) -> None:
        """R-63: two spellings of the same tiers are one; another address is another one."""
        one, same = {"type": "disk", "path": "/a"}, {"path": "/a", "type": "disk"}
        assert digest_of([one]) == digest_of([same])
        assert digest_of([one]) != digest_of([one | {"path": "/b"}])
        assert digest_of([one]) != digest_of([one, one])


class TestStrangers:
    def test_other_version_is_refused_by_name(self, tmp_path) -> None:
        """R-63: an engine of another release goes on without, and hears both versions."""

        async def talking(pipe, core):
            pipe.say(Hello(99, 4096))
            return await pipe.hear()

        told, _, _ = talk(tmp_path, talking)
        assert Refused(f"version 99 is not {PROTOCOL_VERSION}, the agent's") == told

    @pytest.mark.parametrize(
        "said",
        [
            ask_for(1, sizes=[1]),
            ask_for(1, keys=[], sizes=[]),
            ask_for(1, sizes=[0] * 8),
            ask_for(1, sizes=[1 << 40] * 8),
            ask_for(1, keys=[b"short"] * 8),
            ask_for(1, keys=[b"x" * 86] * 8),
            ask_for(1, deadline_s=1e9),
            ask_for(1, deadline_s=float("nan")),
            ask_for(1, hold_s=-1.0),
            ask_for(1, tenant=-1),
            ask_for(1, tenant=1 << 32),
            ask_for(1, hits=([1], [0])),
            ask_for(1, hits=([9] * 8, [0] * 8)),
            Forget(1, []),
            Forget(1, [b"short"]),
            Forget(1, KEYS, -1.0),
            Forget(1, KEYS, 1e9),
            HELLO,
            struct.pack(">I", MAX_FRAME_BYTES + 1),
            struct.pack(">I", 3) + b"\xc1\xc1\xc1",
            struct.pack(">I", 11) + b"\x81\xa4type\xa4dr\xffp",
            struct.pack(">I", 0),
        ],
    )
    def test_what_makes_no_sense_ends_the_connection(self, tmp_path, said) -> None:
        """R-63: a message that no engine sends costs its sender the connection, and the
        agent nothing."""

        async def talking(pipe, core):
            pipe.say(HELLO, said)
            await pipe.hear()

        _, problem, fetcher = talk(tmp_path, talking)
        assert "" != problem
        assert 0 == fetcher.num_open

    def test_number_that_is_in_use_ends_the_connection(self, tmp_path) -> None:
        """R-63: two wants of one name cannot be told apart."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(1), ask_for(1))
            await pipe.hear()

        assert "want 1 is open already" == talk(tmp_path, talking)[1]

    def test_engine_without_a_hello_is_no_engine(self, tmp_path) -> None:
        """R-63: the first message says who it is."""

        async def talking(pipe, core):
            pipe.say(ask_for(1))

        assert "the first message is no hello" == talk(tmp_path, talking)[1]

    @settings(max_examples=60, deadline=None)
    @given(noise=st.lists(st.binary(min_size=1, max_size=200), max_size=6))
    def test_noise_ends_the_connection_or_is_waited_for(self, noise) -> None:
        """R-63: whatever bytes come, the agent neither raises nor asks for a core."""

        async def run():
            pipe = Pipe()

            async def core_of(_):
                raise AssertionError("noise said hello")

            pipe.say(*noise)
            pipe.hang_up()
            return await Connection(*(pipe, core_of, tell_status), [], Ledger).serve()

        assert isinstance(asyncio.run(run()), str)
