# SPDX-License-Identifier: Apache-2.0
"""Several real processes on one slab, some of which are killed."""

import contextlib
import os
import random
import signal

import numpy as np
import pytest

from tests.stores.slab_kit import Child, RawSlab, open_slab
from ucm.stores.slab._layout import SlotState
from ucm.testing.store_blocks import fill, load, make_keys, payload, save

pytestmark = pytest.mark.slow
NUM_BLOCKS = 8
UNUSED = (SlotState.FREE, SlotState.ABSENT)


def check_whole(directory, num_blocks):
    """Assert that a slab agrees with itself and that each committed block is right."""
    every = make_keys(50)
    with open_slab(directory, num_blocks) as store:
        known = [
            key
            for key, there in zip(every, store.contains(every), strict=True)
            if there
        ]
        stats = store.stats()
        assert store.audit() == []
        assert stats.reserved_blocks == 0
        assert stats.committed_blocks == len(known)
        assert [payload(key) for key in known] == load(store, known)
        assert num_blocks == len(known) + np.count_nonzero(
            np.isin(RawSlab(directory, num_blocks).states, UNUSED)
        )


def test_blocks_of_one_process_are_read_by_another(tmp_path):
    """Two processes share a slab at the same time and after each other."""
    with Child(tmp_path / "s", "save", NUM_BLOCKS) as writer:
        assert writer.say() == "3"
        with Child(tmp_path / "s", "read", NUM_BLOCKS) as reader:
            assert reader.say() == "True"
        writer.tell("")
        assert writer.finish() == 0
    with Child(tmp_path / "s", "read", NUM_BLOCKS) as reader:
        assert reader.say() == "True"


def test_racing_openers_agree_on_one_slab(tmp_path):
    """Processes that create at the same moment end up in the same slab."""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(tmp_path / "s", "race", NUM_BLOCKS))
            for _ in range(4)
        ]
        for child in children:
            assert child.say() == "ready"
        for number, child in enumerate(children):
            child.tell(str(number))
        assert [child.say() for child in children] == ["1"] * 4
        assert [child.finish() for child in children] == [0] * 4
    with open_slab(tmp_path / "s") as store:
        assert store.match(make_keys(4)) == 4


def test_writer_killed_before_commit_leaves_nothing(tmp_path):
    """
    Slots of a killed writer come back while others go on; its key can be written.

    So they do although a child of the writer, which inherited its files, lives on, and
    that child can neither use the slab nor give back what is not its own (X-12).
    """
    keys = make_keys(3)
    with (
        open_slab(tmp_path / "s") as store,
        Child(tmp_path / "s", "reserve", NUM_BLOCKS) as writer,
    ):
        assert writer.say() == "child: the slab was opened before this fork"
        grandchild = int(writer.say().removeprefix("grandchild "))
        try:
            assert store.stats().reserved_blocks == 3
            with store.reserve(keys, 96) as lease:
                assert lease.keys == ()
            os.kill(writer.process.pid, signal.SIGKILL)
            writer.process.wait(60)
            assert store.match(keys) == 0
            with store.reserve(keys, 96) as lease:
                assert lease.keys == tuple(keys)
                fill(lease)
                assert lease.commit() == 3
        finally:
            os.kill(grandchild, signal.SIGKILL)
        assert [payload(key) for key in keys] == load(store, keys)
        assert store.audit() == []


def test_slots_of_the_dead_are_taken_when_no_other_is_left(tmp_path):
    """A full slab takes back what a killed writer had reserved."""
    with (
        open_slab(tmp_path / "s", 3) as store,
        Child(tmp_path / "s", "reserve", 3) as writer,
    ):
        writer.say()
        grandchild = int(writer.say().removeprefix("grandchild "))
        os.kill(grandchild, signal.SIGKILL)
        writer.kill()
        assert save(store, make_keys(3, first=20)) == 3
        assert store.audit() == []


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_any_moment_harms_nothing(tmp_path, seed):
    """After kill -9 of busy writers, all committed blocks verify, all slots count."""
    chance = random.Random(seed)
    with open_slab(tmp_path / "s", NUM_BLOCKS):
        for turn in range(2):
            with contextlib.ExitStack() as stack:
                writers = [
                    stack.enter_context(
                        Child(tmp_path / "s", "churn", NUM_BLOCKS, 10 * seed + turn + i)
                    )
                    for i in range(2)
                ]
                for writer in writers:
                    for _ in range(chance.randint(1, 30)):
                        assert writer.say() == "round"
                for writer in writers:
                    writer.kill()
            check_whole(tmp_path / "s", NUM_BLOCKS)
    check_whole(tmp_path / "s", NUM_BLOCKS)
