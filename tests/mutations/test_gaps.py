# SPDX-License-Identifier: Apache-2.0
"""What no other test noticed when it was broken on purpose."""

import threading

import attrs

from tests.rig import order, running
from ucm.blocks import KeySpace, TransferId
from ucm.mailbox import Mailbox
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.threads import Threads

SPACE = KeySpace(
    model="m",
    weights="w",
    kv_dtype="a",
    layout="b",
    block_tokens=16,
    parallel="tp=1",
    hash_algorithm="sha256",
    engine="test",
)


def test_name_of_the_next_field_inside_a_value_changes_the_bytes() -> None:
    """X-08: texts that run together the same way still make two key spaces."""
    one = attrs.evolve(SPACE, kv_dtype="a", layout="blayoutc")
    other = attrs.evolve(SPACE, kv_dtype="alayoutb", layout="c")
    assert one.kv_dtype + "layout" + one.layout == (
        other.kv_dtype + "layout" + other.layout
    )
    assert one.encode() != other.encode()


class Interrupted(threading.Event):
    """An event that another thread sets just before it is lowered, once."""

    box: Mailbox[int] | None = None

    def clear(self) -> None:
        """Let the other thread come first, then lower."""
        box, self.box = self.box, None
        if box is not None:
            box.put(1)
        super().clear()


class InterruptedThreads(Threads):
    """Threads that come at the worst moment."""

    def event(self) -> Interrupted:
        """Return an event that is not set."""
        return Interrupted()


def test_message_that_comes_amid_a_drain_is_taken_or_news() -> None:
    """S2-11: a message that a drain leaves in the box lets nobody sleep."""
    box: Mailbox[int] = Mailbox(InterruptedThreads())
    box.put(0)
    box._filled.box = box
    assert [0, 1] == box.drain() or box.wait(0)


def test_save_that_waits_in_the_queue_is_dropped_at_its_deadline() -> None:
    """S1-26: behind a copy that is waited for, a save that has not begun gives its
    blocks back when its time is over, and not when its turn comes."""
    gate = Gate()
    config = {"queue": {"window": 1}}
    with running(config, FaultPlan(Fault("gather", gate))) as rig:
        rig.submit(order(1, Direction.SAVE, range(1), range(1, 2)))
        gate.wait_reached()
        rig.submit(order(2, Direction.SAVE, range(2, 3), range(2, 3), request="b"))
        waiting = rig.runtime._open[TransferId(2)]
        rig.advance(31.0)
        assert waiting.wait_told(20.0)
        assert [2] == rig.told(NoticeKind.RELEASED)
        assert "deadline" == rig.outcomes()[2].reason
        gate.open()
