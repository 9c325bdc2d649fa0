# SPDX-License-Identifier: Apache-2.0
"""What it costs the engine's thread that a request with a long prompt ends, beside many others."""

from typing import ClassVar

from tests.integration.vllm.test_tier_lookups import Desk, found
from ucm.integration.vllm.tier_lookups import Lookups

REQUESTS, KEYS = 200, 200


class Counted(bytes):
    """A key that counts how often anybody is looked up by one."""

    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        type(self).looks += 1
        return super().__hash__()


def crowd() -> tuple[Desk, Lookups, list[Counted]]:
    """Return look-ups of many requests, of which the first and the last share a prompt."""
    desk = Desk()
    lookups = Lookups(desk.ask, lambda: desk.now, desk.fetch)
    keys = [Counted(b"%d" % at) for at in range(KEYS)]
    found(lookups, keys, "first")
    for at in range(REQUESTS):
        lookups.find(b"of %d" % at, f"r{at}")
    found(lookups, keys, "last")
    lookups.end_step()
    Counted.looks = 0
    return desk, lookups, keys


def test_prompt_that_somebody_else_has_is_passed_on_at_once() -> None:
    """R-54: who waits for what tiers were asked for by one that ends is looked for once,
    and not for each of its blocks."""
    desk, lookups, keys = crowd()
    desk.asked[-1].say([])
    lookups.end_step()
    Counted.looks = 0
    lookups.release("first")
    assert Counted.looks < 20 * KEYS + REQUESTS
    lookups.end_step()
    assert desk.asked[-1].keys == keys


def test_answer_for_one_that_has_ended_is_passed_on_at_once() -> None:
    """R-54: so it is where the store answers when who asked it has ended."""
    desk, lookups, keys = crowd()
    lookups.release("first")
    desk.asked[-1].say([])
    Counted.looks = 0
    lookups.end_step()
    assert Counted.looks < 20 * KEYS + REQUESTS
    assert keys in [each.keys for each in desk.fetches]
