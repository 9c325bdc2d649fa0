# SPDX-License-Identifier: Apache-2.0
"""Many at once, and what a save costs the thread that asks for it: in counts."""

import gc
import sys
from collections import Counter

import anyio
import anyio.to_thread
import pytest

from tests.cache.kit import Host, both_loops, keys_of, leaving_nothing, run
from ucm.testing.faults import Fault, FaultPlan, Gate

pytestmark = pytest.mark.anyio

MANY = 10_000


@both_loops
@pytest.mark.slow
async def test_ten_thousand_await_at_once() -> None:
    """Each hears of its own save's end, none is refused, and the loop is woken for many
    of them together."""
    config = {"log": {"level": "off"}, "timeout": {"save": 600.0}}
    host = Host(config=config, capacity=2 * MANY)
    woken = Counter()
    async with host.cache() as cache:
        ends = []
        keys = [keys_of(1, seed) for seed in range(MANY)]
        wake = cache._host._wake

        def count() -> None:
            woken["wake"] += 1
            wake()

        cache._host._wake = count

        async def save(at: int) -> None:
            block = at % 64
            ends.append(
                await cache.save(keys[at], [block], wait_for_room=True).committed
            )

        async with anyio.create_task_group() as group:
            for at in range(MANY):
                group.start_soon(save, at)
        assert {1} == {end.committed for end in ends}
        assert MANY == len(ends)
    host.check_left()
    assert MANY > woken["wake"] > 0


def calls_of_a_save(
    num_open: int, *, wait_for_room: bool = False, num_blocks: int = 1
) -> Counter:
    """
    Count what a save calls and carries out on the host's thread, beside others that are
    under way: calls in Python and in C by name, and all its bytecode.
    """
    gate = Gate()
    host = Host(FaultPlan(Fault("reserve", gate)))
    calls: Counter[str] = Counter()

    async def main() -> None:
        async with host.cache() as cache:
            for seed in range(num_open):
                cache.save(keys_of(1, seed + 1), [seed % 64])
            await anyio.to_thread.run_sync(gate.wait_reached)
            keys, blocks = keys_of(num_blocks), list(range(num_blocks))

            def note(frame, event: str, what: object) -> None:
                if event == "call":
                    calls[frame.f_code.co_qualname] += 1
                elif event == "c_call":
                    calls[f"C {what.__name__}"] += 1

            def trace(frame, event: str, _: object) -> object:
                frame.f_trace_opcodes = True
                calls["bytecode"] += event == "opcode"
                return trace

            before = sys.gettrace()  # coverage's
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks before it traces
            gc.disable()  # what others left would end amid it
            sys.setprofile(note)
            sys.settrace(trace)
            try:
                cache.save(keys, blocks, wait_for_room=wait_for_room)
            finally:
                sys.settrace(before)
                sys.setprofile(None)
                gc.enable()
            gate.open()

    with leaving_nothing(host):
        run("asyncio", main)
    return calls


class TestCost:
    """R-43: what holds the host's loop is bounded, whatever else goes on."""

    @pytest.mark.slow
    @pytest.mark.parametrize("wait_for_room", [False, True])
    def test_save_costs_the_same_however_many_are_under_way(
        self, *, wait_for_room: bool
    ) -> None:
        """No look through what is open, and none through the line."""
        alone = calls_of_a_save(1, wait_for_room=wait_for_room)
        assert not calls_of_a_save(500, wait_for_room=wait_for_room) - alone
        assert 30 > sum(calls for name, calls in alone.items() if "." in name)

    def test_save_costs_the_same_however_many_blocks_it_has(self) -> None:
        """R-43: neither a call nor any bytecode for each block, only what C does at once."""
        assert calls_of_a_save(1) == calls_of_a_save(1, num_blocks=60)

    def test_nothing_of_a_ticket_is_made_on_the_hosts_thread(self) -> None:
        """R-43: orders and tickets are made, keys packed and queued on our loop."""
        names = " ".join(calls_of_a_save(5, wait_for_room=False))
        assert "Orders.check" in names
        for elsewhere in ("Orders.of", "Ticket", "pack", "take_in", "offer", "submit"):
            assert elsewhere not in names
