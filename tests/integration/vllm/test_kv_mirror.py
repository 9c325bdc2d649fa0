# SPDX-License-Identifier: Apache-2.0
"""The example that mirrors an engine's events, without an engine."""

import signal
import subprocess
import sys

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from examples import kv_mirror
from examples.kv_mirror import Mirror, Place

GPU, SLAB = Place("GPU", "", 0), Place("CPU", "slab", 0)


def stored(hashes, parent=None, tokens=(), **more) -> BlockStored:
    """Return an event about blocks of two tokens."""
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=list(tokens),
        block_size=2 if tokens else 0,
        lora_id=None,
        medium=more.pop("medium", "GPU"),
        lora_name=None,
        group_idx=0,
        **more,
    )


def removed(hashes, **more) -> BlockRemoved:
    """Return an event about blocks that went."""
    return BlockRemoved(block_hashes=list(hashes), group_idx=0, **more)


def batch(*events) -> bytes:
    """Return events as they travel."""
    return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=list(events)))


SLAB_WORDS = {"medium": "CPU", "ownership": "slab"}


class TestMirror:
    def test_places_are_kept_apart(self) -> None:
        """R-57: a block that leaves the engine's cache may still be in the slab."""
        mirror = Mirror()
        first = stored([1, 2], tokens=[5, 6, 7, 8])
        mirror.take(0, batch(first, stored([1, 2], tokens=[5, 6, 7, 8], **SLAB_WORDS)))
        mirror.take(1, batch(removed([2], medium="GPU")))
        assert {GPU: 1, SLAB: 2} == mirror.count()
        assert {GPU: 2, SLAB: 4} == mirror.reusable([5, 6, 7, 8, 9])
        assert {GPU: 0, SLAB: 0} == mirror.reusable([7, 8])

    def test_chains_go_over_events_and_prompts(self) -> None:
        """R-57: a block is of use behind its own parent only, and with its own adapter."""
        mirror = Mirror()
        mirror.take(0, batch(stored([1], tokens=[5, 6]), stored([3], tokens=[9, 9])))
        mirror.take(
            1, batch(stored([2], 1, [7, 8]), stored([4], 3, [1, 1]), stored([7]))
        )
        assert {GPU: 4} == mirror.reusable([5, 6, 7, 8])
        assert {GPU: 2} == mirror.reusable([5, 6, 1, 1])
        assert {GPU: 0} == mirror.reusable([5, 6], lora="poet")

    def test_what_was_missed_is_asked_for(self) -> None:
        """R-57: batches that were dropped on their way are replayed, in order, once."""
        sent = [batch(stored([number], tokens=[number] * 2)) for number in range(5)]
        asked = []

        def replay(start):
            asked.append(start)
            return enumerate(sent[1:], 1)

        mirror = Mirror(replay)
        for number in (0, 3, 4):
            mirror.take(number, sent[number])
        assert ([0], {GPU: 5}, 0) == (asked, mirror.count(), mirror.num_lost)

    def test_what_is_gone_for_good_is_counted(self) -> None:
        """R-57: a mirror that may be wrong says so."""
        sent = [batch(stored([number])) for number in range(6)]
        mirror = Mirror(lambda start: [(3, sent[3]), (4, sent[4]), (5, sent[5])])
        mirror.take(0, sent[0])
        mirror.take(5, sent[5])
        assert ({GPU: 4}, 2, 6) == (mirror.count(), mirror.num_lost, mirror.next_number)
        silent = Mirror()
        silent.take(2, sent[2])
        assert 2 == silent.num_lost

    def test_engine_that_begins_again_has_nothing(self) -> None:
        """R-57: numbers from the start are those of another process; a cleared cache is
        cleared everywhere, and what is below is told again behind it."""
        mirror = Mirror()
        for number in range(2):
            mirror.take(number, batch(stored([number])))
        mirror.take(0, batch(stored([7])))
        assert {GPU: 1} == mirror.count()
        mirror.take(1, batch(AllBlocksCleared(), stored([8], **SLAB_WORDS)))
        assert ({SLAB: 1}, 1) == (mirror.count(), mirror.num_cleared)

    def test_engine_that_begins_again_unseen_has_what_it_told_since(self) -> None:
        """R-57: where its numbers are beyond the last one's by the time it is heard, what it said
        by that number is other than what was heard, and it is asked for all."""
        sent = [batch(stored([number])) for number in range(20, 26)]
        mirror = Mirror(lambda start: list(enumerate(sent))[start:])
        for number in range(3):
            mirror.take(number, batch(stored([number])))
        mirror.take(5, sent[5])
        assert [*range(20, 26)] == [*mirror.places[GPU]]
        assert 0 == mirror.num_lost


def test_interrupt_ends_it_without_a_word() -> None:
    """It runs until somebody presses Ctrl-C, which is no error."""
    # Whoever runs the tests behind other work may have it ignored, and children with it.
    script = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"runpy.run_path({kv_mirror.__file__!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", script, "tcp://127.0.0.1:1", "--seconds=0.01"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (0, b"") == (process.returncode, told)
