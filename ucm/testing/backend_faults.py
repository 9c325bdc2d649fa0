# SPDX-License-Identifier: Apache-2.0
"""
A backend with planned troubles, as other sides have them.

Not random: a plan says at which call of which verb what happens; whoever wants dice
overrides ``TroubledBackend.choose``.
"""

import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import attrs

from ucm.backends.abc import Backend, Fetched, Presence, Sealed, Verdict
from ucm.backends.wrap import WrapperBackend
from ucm.blocks import PackedKey

__all__ = ["Trouble", "TroubledBackend", "Troubles"]

_Item = TypeVar("_Item")
_T = TypeVar("_T")


class Troubles(enum.StrEnum):
    """What may happen to a call."""

    FAILS = "fails"
    """It is not asked, and says so."""
    ANSWER_LOST = "answer_lost"
    """It is asked and does it, and nobody hears of it."""
    HANGS = "hangs"
    """It is not asked, and the call ends by its cancellation only."""
    SLOW = "slow"
    """It is asked when *seconds* are over."""
    OVERTAKEN = "overtaken"
    """It is asked when another call is over, or *seconds*."""
    PARTIAL = "partial"
    """Every second block is not asked for, and says so."""
    GARBAGE = "garbage"
    """Every block that comes has a wrong byte and the right checksum."""
    LIES = "lies"
    """It is not asked, and says that all is there, or done."""


@attrs.frozen
class Trouble:
    """
    One trouble of a plan.

    Args:
        what: What happens.
        verb: ``exists``, ``get``, ``put`` or ``delete``; empty for each.
        nth: At which call of it, from 1; 0 for each.
        seconds: How long, on the loop's clock.
    """

    what: Troubles
    verb: str = ""
    nth: int = 0
    seconds: float = 1.0


class TroubledBackend(WrapperBackend):
    """
    Meets a plan at each call, then asks.

    Args:
        inner: The real backend.
        troubles: What happens when; the first that fits a call does.
    """

    def __init__(self, inner: Backend, *troubles: Trouble) -> None:
        super().__init__(inner)
        self.troubles = list(troubles)
        self.calls: Counter[str] = Counter()
        self._passed = anyio.Event()

    def choose(self, verb: str, number: int) -> Trouble | None:
        """Return what happens to the call of a verb with that number, from 1."""
        for trouble in self.troubles:
            if trouble.verb in ("", verb) and trouble.nth in (0, number):
                return trouble
        return None

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Meet the plan, then ask."""
        trouble = self._next("exists")
        return await self._meet(
            trouble, keys, self.inner.exists, Presence.UNKNOWN, Presence.PRESENT
        )

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Meet the plan, then ask."""

        async def ask(pairs: Sequence[tuple[PackedKey, memoryview]]) -> list[Fetched]:
            return await self.inner.get(
                [key for key, _ in pairs], [at for _, at in pairs]
            )

        trouble = self._next("get")
        told = await self._meet(
            trouble,
            list(zip(keys, targets, strict=True)),
            ask,
            Fetched(Verdict.UNAVAILABLE),
            Fetched(Verdict.DONE, 1),
        )
        if trouble is not None and trouble.what is Troubles.GARBAGE:
            for target in targets:
                target[len(target) // 2] ^= 1
        return told

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Meet the plan, then ask."""
        trouble = self._next("put")
        return await self._meet(
            trouble, blocks, self.inner.put, Verdict.UNAVAILABLE, Verdict.DONE
        )

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Meet the plan, then ask."""
        trouble = self._next("delete")
        return await self._meet(
            trouble, keys, self.inner.delete, Verdict.UNAVAILABLE, Verdict.DONE
        )

    def _next(self, verb: str) -> Trouble | None:
        self.calls[verb] += 1
        return self.choose(verb, self.calls[verb])

    async def _meet(
        self,
        trouble: Trouble | None,
        items: Sequence[_Item],
        ask: Callable[[Sequence[_Item]], Awaitable[list[_T]]],
        failed: _T,
        lie: _T,
    ) -> list[_T]:
        """Let a call have its trouble; *failed* and *lie* are what it may say then."""
        what = None if trouble is None else trouble.what
        seconds = 0.0 if trouble is None else trouble.seconds
        if what is Troubles.LIES:
            return [lie] * len(items)
        if what is Troubles.FAILS:
            return [failed] * len(items)
        if what is Troubles.HANGS:
            await anyio.sleep_forever()
        if what is Troubles.SLOW:
            await anyio.sleep(seconds)
        if what is Troubles.OVERTAKEN:
            with anyio.move_on_after(seconds):
                await self._passed.wait()
        step = 2 if what is Troubles.PARTIAL else 1
        told = [failed] * len(items)
        told[::step] = await ask(items[::step])
        self._passed.set()
        self._passed = anyio.Event()
        return [failed] * len(items) if what is Troubles.ANSWER_LOST else told
