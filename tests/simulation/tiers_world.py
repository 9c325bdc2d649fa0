# SPDX-License-Identifier: Apache-2.0
"""
An agent over a slab and fickle tiers, under engines that come and go, simulated from one seed.

All of it is one loop in virtual time. The engines speak the protocol, over pipes in memory;
saves fill the slab and evict all the time; agents are stopped in the middle and started anew
over the same slab and tiers. What must hold, in each step: no byte in the slab is wrong, no
tier keeps another block's bytes under a checksum that holds, each block that was offered or
wanted is somewhere or has one end, and no answer comes after its time.

A seed repeats a run, wherever objects lie in memory: what is cancelled together is so in the order
in which it came. One in thirty does not yet to the last act (seeds 18 and 25 with 150 acts), and the slab tells
moments by the machine's clock: on one that stands still what is kept for a second may be evicted.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path

import anyio
import attrs

from tests.agent.test_connection import Pipe, tell_status
from tests.agent.unruly import TIMEOUT_S, inline, run_virtual
from tests.clocks import numbered_scopes
from tests.simulation.fickle_tier import FickleTier, Mood
from tests.stores.slab_kit import open_slab
from ucm.agent.admission import Admission
from ucm.agent.connection import Connection
from ucm.agent.core import AgentCore
from ucm.agent.ledger import Ledger
from ucm.agent.protocol import PROTOCOL_VERSION, Ask, Done, Drop, Hello
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.blocks import PackedKey
from ucm.errors import BlockNotFoundError, StoreFullError
from ucm.reasons import Reason
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save

__all__ = ["TiersWorld"]

_KEYS = make_keys(60)
_SLOTS = 24
_LATE_S = 0.001
_MOST_LOOKS = 6
_ONLY = ([], [("storage", "")], [("cpu", "local")], [("", "remote")])
_ACTS = (
    *(("want", 30), ("save", 25), ("sleep", 18), ("drop", 8), ("mood", 6)),
    *(("again", 10), ("rot", 4), ("forget", 4), ("hang_up", 2), ("restart", 1)),
)


@attrs.define
class Engine:
    """One at the other end of a pipe, and by number when its wants must be answered."""

    pipe: Pipe = attrs.Factory(Pipe)
    until: dict[int, float] = attrs.Factory(dict)
    number: int = 0
    is_gone: bool = False


class TiersWorld:
    """
    One simulated run.

    Args:
        seed: Decides everything.
        steps: Acts.
    """

    def __init__(self, seed: int, steps: int) -> None:
        self.seen: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._left = steps
        self._stored: Counter[PackedKey] = Counter()
        """How often each block may have been stored, at most."""
        self._engines: list[Engine] = []

    def run(self) -> None:
        """Run to the end."""
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
            open_slab(Path(directory) / "slab", _SLOTS) as slab,
        ):
            self._slab = slab
            with numbered_scopes():
                run_virtual(self._live)
            self._look(_KEYS)
            assert 0 == slab.stats().reserved_blocks
            assert [] == slab.audit()

    async def _live(self) -> None:
        dice = self._dice
        self._tiers = [
            FickleTier(dice, self.seen) for _ in range(dice.choice([1, 2, 3]))
        ]
        self._rules = [dice.choice(list(Admission)) for _ in self._tiers]
        while self._left > 0:
            await self._serve()

    # One life of an agent.

    async def _serve(self) -> None:
        guarded = [
            BreakerBackend(
                DeadlineBackend(tier, TIMEOUT_S),
                clock=anyio.current_time,
                hung_s=2 * TIMEOUT_S,
            )
            for tier in self._tiers
        ]
        self._core = core = AgentCore(
            self._slab, guarded, inline, most_waiting=20, rules=self._rules
        )
        self._is_over = False
        async with anyio.create_task_group() as self._tasks:
            ready = anyio.Event()
            self._tasks.start_soon(core.run, ready.set)
            await ready.wait()
            self._engines = [self._join() for _ in range(2)]
            while self._left > 0 and not self._is_over:
                self._left -= 1
                await self._act()
                self._check()
            if not self._is_over:
                await self._settle()
            for engine in self._engines:
                engine.is_gone = True
            self._tasks.cancel_scope.cancel()
        self._count()
        self._check(is_over=True)

    async def _act(self) -> None:
        names, weights = zip(*_ACTS, strict=True)
        (name,) = self._dice.choices(names, weights)
        self.seen[name] += 1
        await getattr(self, f"_act_{name}")()

    async def _settle(self) -> None:
        """Let all be well, and see that all comes to its end."""
        for tier in self._tiers:
            tier.mood = Mood()
        await anyio.sleep(120.0)
        await self._core.drain()
        for engine in self._engines:
            assert {} == engine.until
            engine.is_gone = True
            engine.pipe.hang_up()
        await anyio.sleep(1.0)
        fetcher = self._core.fetcher
        assert (0, fetcher._budget.total) == (fetcher.num_open, fetcher._budget.left)
        for room in (fetcher._budget, *(each.room for each in fetcher._flights._lines)):
            assert (room.total, 0) == (room.left, room.num_waiting)
            assert ({}, {}) == (room.held, room._rows)
        assert all(spiller.is_idle for spiller in self._core.spillers)
        self.seen["settled"] += 1

    # Engines.

    def _join(self) -> Engine:
        engine = Engine()
        media = [tier.capabilities.medium for tier in self._tiers]

        async def core_of(_: int) -> AgentCore:
            return self._core

        async def serve() -> None:
            problem = await Connection(
                *(engine.pipe, core_of, tell_status, media), Ledger
            ).serve()
            assert "" == problem

        engine.pipe.say(Hello(PROTOCOL_VERSION, 4096))
        self._tasks.start_soon(serve)
        self._tasks.start_soon(self._listen, engine)
        return engine

    async def _listen(self, engine: Engine) -> None:
        while not engine.is_gone:
            message = await engine.pipe.hear()
            if isinstance(message, Done) and not engine.is_gone:
                until = engine.until.pop(message.number, None)
                if until is not None:
                    assert anyio.current_time() <= until + _LATE_S
                    self.seen[f"answer {message.reason or 'all'}"] += 1
                    self.seen["found"] += message.found

    async def _act_want(self) -> None:
        first = self._dice.randrange(len(_KEYS))
        self._want(_KEYS[first : first + self._dice.randrange(1, 13)])

    async def _act_again(self) -> None:
        """A prompt comes back that the slab has lost, and a tier has."""
        kept = self._dice.choice(self._tiers).shelf.values
        if keys := [key for key in _KEYS if key in kept][: self._dice.randrange(1, 13)]:
            self._slab.forget(keys)
            self._want(keys)

    def _want(self, keys: list[PackedKey]) -> None:
        dice = self._dice
        engine = dice.choice(self._engines)
        self._stored.update(keys)
        engine.number += 1
        deadline_s = dice.choice([0.05, 0.5, 3.0, 3.0])
        engine.until[engine.number] = anyio.current_time() + deadline_s
        ask = Ask(
            engine.number,
            list(keys),
            [BLOCK_BYTES] * len(keys),
            deadline_s,
            hold_s=dice.choice([0.0, 1.0]),
            compute_s=dice.choice([0.0, 0.001, 0.001, 0.2, 5.0]),
            only=dice.choice(_ONLY) if dice.random() < 0.2 else None,
            priority=dice.choice([0, 0, 5]),
            tenant=engine.number % 4,
            hits=self._hits(len(keys)) if dice.random() < 0.3 else None,
        )
        engine.pipe.say(ask)

    def _hits(self, num_keys: int) -> tuple[list[int], list[int]]:
        numbers = list(range(1, num_keys + 1))
        return numbers, [self._dice.choice([0, at, at + 2]) for at in numbers]

    async def _act_drop(self) -> None:
        engine = self._dice.choice(self._engines)
        if engine.number:
            number = self._dice.randint(max(1, engine.number - 5), engine.number)
            engine.pipe.say(Drop(number))

    async def _act_hang_up(self) -> None:
        at = self._dice.randrange(len(self._engines))
        self._engines[at].is_gone = True
        self._engines[at].until.clear()
        self._engines[at].pipe.hang_up()
        self._engines[at] = self._join()

    async def _act_restart(self) -> None:
        self._is_over = True

    # The slab and its tiers.

    async def _act_save(self) -> None:
        first = self._dice.randrange(len(_KEYS))
        keys = _KEYS[first : first + self._dice.randrange(1, 9)]
        self._stored.update(keys)
        try:
            save(self._slab, keys)
        except StoreFullError:
            self.seen["full"] += 1

    async def _act_forget(self) -> None:
        first = self._dice.randrange(len(_KEYS))
        self._slab.forget(_KEYS[first : first + 8])

    async def _act_mood(self) -> None:
        self._dice.choice(self._tiers).mood = Mood.drawn(self._dice)

    async def _act_rot(self) -> None:
        self._dice.choice(self._tiers).rot()

    async def _act_sleep(self) -> None:
        await anyio.sleep(self._dice.choice([0.0, 0.01, 0.2, 1.0, 5.0]))

    # What must hold.

    def _check(self, *, is_over: bool = False) -> None:
        self._look(self._dice.sample(_KEYS, _MOST_LOOKS))
        for spiller, tier, rule in zip(
            self._core.spillers, self._tiers, self._rules, strict=True
        ):
            counts = spiller.counts
            ended = counts.spilled + counts.skipped + sum(counts.dropped.values())
            open_ = spiller.num_waiting + spiller.num_moving
            if (
                is_over or not spiller.num_moving
            ):  # a call tells of its blocks one by one
                assert counts.offered == ended + open_
            if self._left % 16 == 0:
                tier.check()
            if rule is Admission.AGAIN and counts.spilled:
                assert all(self._stored[key] > 1 for key in tier.shelf.values)
        counts = self._core.fetcher.counts
        landed = counts.fetched + counts.stored + sum(counts.failed.values())
        assert counts.begun == landed + self._core.fetcher.num_open
        budget = self._core.fetcher._budget
        assert 0 <= budget.left == budget.total - budget.held.total()
        assert all(count > 0 for count in budget.held.values())
        for engine in self._engines:
            for until in engine.until.values():
                assert is_over or anyio.current_time() <= until + _LATE_S

    def _look(self, keys: list[PackedKey]) -> None:
        for key in keys:
            try:
                assert [payload(key)] == load(self._slab, [key])
            except BlockNotFoundError:
                continue

    def _count(self) -> None:
        for spiller in self._core.spillers:
            self.seen["spilled"] += spiller.counts.spilled
            self.seen["skipped"] += spiller.counts.skipped
            for reason, count in spiller.counts.dropped.items():
                self.seen[f"dropped {reason}"] += count
        counts = self._core.fetcher.counts
        self.seen["joined"] += counts.joined
        self.seen["fetched"] += counts.fetched
        self.seen["stored by others"] += counts.stored
        for reason, count in counts.failed.items():
            self.seen[f"failed {Reason(reason)}"] += count
