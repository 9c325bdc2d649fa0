# SPDX-License-Identifier: Apache-2.0
"""What ends when our loop has died, of a bug or for want of memory, is told all the same."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.cache.kit import LIMIT_S, Host, keys_of, leaving_nothing
from ucm.cache.sync import Cache, Save
from ucm.pipeline.outcomes import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


@contextlib.contextmanager
def dead_amid(stage: str, gate: Gate, *, num_saves: int = 1) -> Iterator[list[Save]]:
    """Yield saves of which one is at the gate, and others wait for room, once our loop is dead."""
    host = Host(FaultPlan(Fault(stage, gate)), {"queue": {"tickets": 1}})
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        core = host.core
        assert core is not None
        keys = [keys_of(2, at) for at in range(num_saves)]
        saves = [cache.save(each, range(2), wait_for_room=True) for each in keys]
        gate.wait_reached()
        assert num_saves - 1 == cache.statistics().waiting_parts
        core._runtime._pipeline._take_in = _die
        core._runtime._loop.wake()
        core._serving.join(LIMIT_S)
        yield saves
        gate.open()


def _die() -> None:
    raise MemoryError


def test_blocks_are_released_when_their_copy_ends() -> None:
    """Whoever waits for them hears of it then, and not at a deadline minutes away."""
    gate = Gate()
    with dead_amid("gather", gate) as (save,):
        assert OutcomeKind.FAILED is save.wait_committed().kind
        assert not save._transfer.released.is_done
        gate.open()
        save.wait_released()


def test_saves_that_wait_for_room_have_failed() -> None:
    """Nobody would let them in any more."""
    with dead_amid("reserve", Gate(), num_saves=3) as saves:
        assert [True, True, True] == [save.is_over for save in saves]
        ends = [save.wait_committed() for save in saves]
        assert [Reason.RUNTIME_FAILED] * 3 == [end.reason for end in ends]
        assert [OutcomeKind.CANCELLED] * 2 == [end.kind for end in ends[1:]]
