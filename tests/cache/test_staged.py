# SPDX-License-Identifier: Apache-2.0
"""Blocks in slots of the host's own, verified before anybody asks for them."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from tests.cache.kit import Host, keys_of, leaving_nothing, span_of
from tests.clocks import AdvancingThreads
from ucm.agent.client import Answer
from ucm.cache.staged import Staged
from ucm.cache.sync import Cache
from ucm.errors import StoreUnavailableError
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

LONG = 60.0
FROM = 40
"""Where blocks are saved from; slots are below."""


def saved(cache: Cache, count: int, seed: int = 0) -> list[bytes]:
    """Save blocks from behind the slots; return their keys."""
    keys = keys_of(count, seed)
    assert cache.save(keys, range(FROM, FROM + count)).wait_committed().is_whole
    return keys


class TestStaged:
    def test_staged_blocks_are_in_their_slots(self) -> None:
        """What was saved is there byte by byte, up to the first that is not stored."""
        host = Host(config=span_of())
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 8)
            keys = saved(cache, 5)
            assert 5 == staged.stage([*keys, *keys_of(1, 9)], LONG)
            slots = staged.hold(keys)
            assert [0, 1, 2, 3, 4] == slots
            assert host.content(range(FROM, FROM + 5)) == host.content(range(5))
            assert staged.hold([*keys, *keys_of(1, 9)]) is None

    def test_what_is_staged_is_not_loaded_again(self) -> None:
        """Of a prompt that has grown only the rest is."""
        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 8)
            keys = saved(cache, 5)
            assert 3 == staged.stage(keys[:3], LONG)
            assert 5 == staged.stage(keys, LONG)
            assert 5 == staged.stage(keys, LONG)
            assert 5 == cache.statistics().loaded_blocks

    def test_room_is_made_of_what_was_used_longest_ago(self) -> None:
        """From the end of a prompt on, and never of what is held."""
        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 4)
            first, second = saved(cache, 2), saved(cache, 2, 1)
            third, held = saved(cache, 1, 2), saved(cache, 4, 3)
            assert 2 == staged.stage(first, LONG)
            assert 2 == staged.stage(second, LONG)
            assert 2 == staged.stage(first, LONG)
            assert 1 == staged.stage(third, LONG)
            assert staged.hold(first) is not None
            assert staged.hold(second) is None
            assert staged.hold(second[:1]) is not None
            staged.release(second[:1])
            assert 2 == staged.stage(held, LONG)
            assert staged.hold(first) is not None
            staged.release(first)
            staged.release(first)
            assert 4 == staged.stage(held, LONG)

    def test_what_others_hold_is_not_gone_through(self) -> None:
        """A host may look up a thousand prompts before a step, and none of these look-ups
        goes by what all others have staged."""

        class Held(Counter[bytes]):
            def items(self) -> Any:
                raise AssertionError("each hold is looked at")

        class Verified(OrderedDict[bytes, int]):
            def keys(self) -> Any:
                raise AssertionError("each staged block is looked at")

            __iter__ = keys

        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 8)
            staged._held, staged._verified = Held(), Verified()
            keys = saved(cache, 4)
            assert 2 == staged.stage(keys[:2], LONG)
            assert staged.hold(keys[:2]) == staged.hold(keys[:2])
            assert 4 == staged.stage(keys, LONG)
            staged.release(keys[:2])
            assert dict.fromkeys(keys[:2], 1) == staged._held
            staged.release(keys[:2])
            assert not staged._held

    def test_what_others_hold_is_not_gone_through_for_room(self) -> None:
        """Where they hold all there is, each look-up of a thousand would go by all of it."""
        asked: list[bytes] = []

        class Held(Counter[bytes]):
            def __getitem__(self, key: bytes) -> int:
                asked.append(key)
                return super().__getitem__(key)

        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 4)
            staged._held = Held()
            first, second = saved(cache, 4), saved(cache, 2, 1)
            assert 4 == staged.stage(first, LONG)
            assert staged.hold(first) is not None
            asked.clear()
            assert 0 == staged.stage(second, LONG)
            assert not asked
            staged.release(first)
            staged.release(first)
            assert 2 == staged.stage(second, LONG)
            assert staged.hold(first[:2]) is not None  # the first are the last to go

    def test_load_that_takes_longer_is_staged_for_who_asks_later(self) -> None:
        """It is not begun again meanwhile, and its slots are not given to others."""
        gate = Gate()
        host = Host(FaultPlan(Fault("scatter", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 3)
            keys, others = saved(cache, 2), saved(cache, 2, 1)
            assert 0 == staged.stage(keys, 0.01)
            gate.wait_reached()
            assert 0 == staged.stage(keys, 0.01)
            assert 1 == len(staged._loads)
            staged.forget()
            gate.open()
            assert 1 == staged.stage(others, LONG)
            assert 2 == staged.stage(keys, LONG)
            assert 3 == cache.statistics().loaded_blocks

    def test_store_that_hangs_is_waited_for_once(self) -> None:
        """R-81: not by each of many prompts in a row; and again after a while."""
        host, threads, waits = Host(), AdvancingThreads(), list[float]()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 8, threads)
            keys = saved(cache, 2)

            def hang(_: object, *, timeout: float) -> int:
                waits.append(timeout)
                threads.advance(timeout + 1e-6)
                return 0

            with pytest.MonkeyPatch.context() as meanwhile:
                meanwhile.setattr(cache, "match", hang)
                assert {0} == {staged.stage(keys, 16.0) for _ in range(50)}
            assert [16] + 49 * [1] == [round(each) for each in waits]
            assert 2 == staged.stage(keys, LONG)
            assert 0 == staged.stage(keys_of(1, 1), LONG)
            threads.advance(100.0)
            waits.clear()
            with pytest.MonkeyPatch.context() as meanwhile:
                meanwhile.setattr(cache, "match", hang)
                staged.stage(keys_of(1, 1), 16.0)
            assert [16] == [round(each) for each in waits]

    def test_slab_is_loaded_while_tiers_are_silent(self) -> None:
        """R-54: a tier that takes longer than the prompt waits costs none of what is here."""

        class Silent:
            is_up = True

            def want(self, *_: object, **__: object) -> bool:
                return True

            def answer(self, _: str) -> None: ...
            def drop(self, _: str) -> None: ...
            def close(self) -> None: ...

        host = Host()
        core, opened = host.open_core()
        with leaving_nothing(host), Cache(core, opened) as cache:
            staged, keys = Staged(cache, 8), saved(cache, 2)
            with pytest.MonkeyPatch.context() as meanwhile:
                meanwhile.setattr(core.fetches, "_client", Silent())
                assert 2 == staged.stage([*keys, *keys_of(1, 9)], 2.0)

    def test_vain_question_to_tiers_keeps_nothing(self) -> None:
        """R-53: an agent that has no more than the slab keeps nothing for a load to come."""
        dropped = []

        class Vain:
            is_up = True

            def want(self, *_: object, tell: Callable[[], None], **__: object) -> bool:
                tell()
                return True

            def answer(self, _: str) -> Answer:
                return Answer(2, Reason.ABSENT)

            def drop(self, name: str) -> None:
                dropped.append(name)

        host = Host()
        core, opened = host.open_core()
        with leaving_nothing(host), Cache(core, opened) as cache:
            staged, keys = Staged(cache, 8), saved(cache, 2)
            with pytest.MonkeyPatch.context() as meanwhile:
                meanwhile.setattr(core.fetches, "_client", Vain())
                assert 2 == staged.stage([*keys, *keys_of(1, 9)], LONG)
                assert (["0"], 0) == (dropped, len(core.fetches))

    def test_slots_of_a_failed_load_are_free(self) -> None:
        """Nothing is staged, and the next one has room."""
        error = raising(StoreUnavailableError("no"))
        host = Host(FaultPlan(Fault("read", error)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            staged = Staged(cache, 2)
            keys = saved(cache, 2)
            assert 0 == staged.stage(keys, LONG)
            assert 2 == staged.stage(keys, LONG)

    def test_slots_of_a_stuck_load_are_nobodys(self) -> None:
        """Something may still write to them."""
        gate, threads = Gate(), AdvancingThreads()
        host = Host(
            FaultPlan(Fault("scatter", gate)),
            {"timeout": {"shutdown": 0.2}},
            threads=threads,
        )
        cache = Cache(*host.open_core())
        staged = Staged(cache, 3)
        keys = saved(cache, 2)
        assert 0 == staged.stage(keys, 0.01)
        gate.wait_reached()
        while staged._loads:
            threads.advance(100.0)  # its deadline, then that of its copy
            staged.stage(keys, 0.01)
        assert [2] == staged._free
        assert staged.hold(keys) is None
        cache.close()
        gate.open()
        host.join()
