# SPDX-License-Identifier: Apache-2.0
"""A death at every single line of the index, one after the other."""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest

from tests.stores.slab_kit import die, open_slab
from ucm.errors import LeaseExpiredError
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import SlotState, Word
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    make_keyspace,
    payload,
    save,
    uses_at,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("by_python")]
OLD, NEW = make_keys(3), make_keys(4, first=10)
WATCHED = (
    *("_index.py", "_chains.py", "_oldest.py"),
    *("_reserving.py", "_tables.py", "_tally.py", "_tenants.py", "_used.py"),
)


class Death(BaseException):
    """Stands for the end of the process; nothing may catch it."""


@functools.cache
def is_watched(code: CodeType) -> bool:
    """Return whether its lines count."""
    return code.co_filename.endswith(WATCHED)


def run_until(line: int, action: Callable[[], None]) -> int:
    """
    Run *action* and die before the *line*-th line of the index that it executes.

    The locks go as the kernel lets them go; nothing else is cleaned up, since what a
    process had written to shared memory stays written.

    Returns:
        Lines executed; less than *line* if the action came to its end.
    """
    executed = 0

    def on_line(frame: FrameType, event: str, arg: object) -> object:
        nonlocal executed
        if event == "line":
            executed += 1
            if executed == line:
                raise Death
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> object:
        return on_line if is_watched(frame.f_code) else None

    before = sys.gettrace()  # coverage watches as well
    sys.settrace(on_call)
    try:
        action()
    except Death:
        pass
    finally:
        sys.settrace(before)
    return executed


# None of these leaves a ``with``: that would wait for a lock which the dead still has.


def evicting_save(store: SlabStore) -> None:
    """Save four blocks into five slots, three of which are in use."""
    lease = store.reserve(NEW, BLOCK_BYTES)
    fill(lease)
    lease.commit()


def lossy_save(store: SlabStore) -> None:
    """Do the same, but leave two blocks out of the commit."""
    lease = store.reserve(NEW, BLOCK_BYTES)
    fill(lease)
    lease.commit([0, 2])


def discard(store: SlabStore) -> None:
    """Reserve and give back."""
    store.reserve(NEW[:2], BLOCK_BYTES).discard()


def forget(store: SlabStore) -> None:
    """Forget two of the three."""
    store.forget(OLD[1:])


def tenants_save(store: SlabStore) -> None:
    """Save four blocks of one tenant, at the cost of another one's."""
    later = uses_at([time.monotonic_ns()] * 4, tenant=7)
    lease = store.reserve(NEW, BLOCK_BYTES, later)
    fill(lease)
    lease.commit()


def lonely_save(store: SlabStore) -> None:
    """Save one block alone, at the cost of another."""
    others = store.reserve(NEW[2:], BLOCK_BYTES)
    lease = store.reserve(NEW[:1], BLOCK_BYTES)
    fill(lease)
    lease.commit()
    others.discard()


def withdraw(store: SlabStore) -> None:
    """Let go of all slots, and use them again."""
    index = store._slab.index
    assert index.withdraw(np.arange(5))
    index.admit(np.arange(5))


def clear(store: SlabStore) -> None:
    """Forget all."""
    store.clear(b"")


SHOWN = {
    evicting_save: [True] * 4,
    lossy_save: [False, True, False, True],
    tenants_save: [True] * 4,
    lonely_save: [True, False, False, False],
}
"""What becomes visible of the new blocks, at once; of others nothing does."""


@pytest.mark.parametrize("action", [*SHOWN, discard, forget, withdraw, clear])
def test_death_at_any_line_leaves_a_whole_slab(tmp_path, action, monkeypatch):
    """
    Wherever a writer dies, its lease is visible whole or not at all (S4-31, X-01).

    What was committed before stays right, nothing stays reserved, and the index agrees
    with itself. R-28: what the death has left is put right without a rebuild, also if
    whoever does it dies amid it.
    """
    line = 0
    died = True
    outcomes = set()
    while died:
        line += 1
        path = tmp_path / str(line)
        witness = open_slab(path, 5)
        store = open_slab(path, 5)
        second = open_slab(path, 5)
        monkeypatch.setattr(store._slab.index, "rebuild", None)
        monkeypatch.setattr(second._slab.index, "rebuild", None)
        monkeypatch.setattr(witness._slab.index, "rebuild", None)
        payer = 0 if action is lonely_save else 8  # who is paid for is not let go alone
        save(store, OLD, BLOCK_BYTES, uses_at([30, 20, 10], tenant=payer))
        died = run_until(line, lambda store=store: action(store)) == line
        die(store)
        run_until(line % 60 + 3, second.audit)
        die(second)
        visible = witness.contains(NEW)
        outcomes.add(any(visible))
        assert visible in ([False] * 4, SHOWN.get(action, [False] * 4))
        left = [
            key for key, there in zip(OLD, witness.contains(OLD), strict=True) if there
        ]
        assert OLD[: len(left)] == left
        assert [payload(key) for key in left] == load(witness, left)
        shown = [key for key, there in zip(NEW, visible, strict=True) if there]
        assert [payload(key) for key in shown] == load(witness, shown)
        assert witness.audit() == []
        witness._slab.index.admit(np.arange(5))
        with witness.reserve(NEW, BLOCK_BYTES) as lease:
            assert len(lease.keys) == 4 - len(shown)
        with open_slab(path, 5) as late:
            assert late.stats().reserved_blocks == 0
            assert late.audit() == []
        witness.close()
    assert line > 20
    assert outcomes == ({False, True} if action in SHOWN else {False})


def live_briefly(path: str) -> None:
    """Join, hold slots, describe and leave."""
    with open_slab(Path(path), 5) as store:
        store.reserve(NEW[:1], BLOCK_BYTES)
        store.describe(make_keyspace())


def create(path: str) -> None:
    """Make a slab, or join one."""
    open_slab(Path(path), 5)


@pytest.mark.timeout(1200)
class TestKillsOfWholeLives:
    """Kill -9 before each line that a process runs from its first look to its end."""

    def test_alone(self, killer, memory_path):
        """R-23: what was committed is there whoever dies while nobody else lives."""
        with open_slab(memory_path, 5) as store:
            save(store, OLD)
        line = 0
        while killer.killed_at(line := line + 1, live_briefly, str(memory_path)):
            with open_slab(memory_path, 5) as store:
                assert [payload(key) for key in OLD] == load(store, OLD)
                assert 0 == store.stats().reserved_blocks
                assert store.audit() == []
        assert line > 100

    def test_beside_another(self, killer, memory_path):
        """R-23: the living keep their slots and get back those of the dead."""
        with open_slab(memory_path, 5) as witness:
            save(witness, OLD)
            lease = witness.reserve(NEW[3:], BLOCK_BYTES)
            line = 0
            while killer.killed_at(line := line + 1, live_briefly, str(memory_path)):
                with witness.reserve(NEW[:1], BLOCK_BYTES) as free:
                    assert 1 == len(free.keys)
                assert [payload(key) for key in OLD] == load(witness, OLD)
                assert witness.audit() == []
            assert line > 100
            fill(lease)
            assert 1 == lease.commit()

    @pytest.mark.parametrize("marked", [False, True], ids=["new", "half made"])
    def test_creation(self, killer, memory_path, marked):
        """R-24: a directory is ours again wherever its creation was killed, and what
        the next one leaves is a slab and nothing else."""
        line = 0
        died = True
        while died:
            if marked:
                memory_path.mkdir(0o700)
                for name in ("data", "arena", "index-4096.0.new", "slab.json.tmp"):
                    (memory_path / name).write_bytes(b'{"kind":"ucm-slab",')
                    (memory_path / name).chmod(0o600)
            died = killer.killed_at(line := line + 1, create, str(memory_path))
            with open_slab(memory_path, 5) as store:
                assert 3 == save(store, OLD)
                assert store.audit() == []
            files = {"slab.json", "data", "arena", "fates", "index-4096.0"}
            assert files == set(os.listdir(memory_path))
            for each in memory_path.iterdir():
                each.unlink()
            memory_path.rmdir()
        assert line > 100


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("num_flipped", range(5))
def test_publication_that_had_begun_is_completed(tmp_path, num_flipped, is_rebuilt):
    """A death among the state changes of one publication still shows all of it, and
    nothing else, whether it is repaired or all is rebuilt."""
    store = open_slab(tmp_path / "s", 5)
    lease = store.reserve(NEW, BLOCK_BYTES)
    fill(lease)
    index = store._slab.index
    other = store.reserve(OLD[:1], BLOCK_BYTES)
    slots = lease.slots.slots
    index.begin(slots)
    index.records["checksum"][slots] = lease._checksums
    index.header[Word.PUBLISHING] = index.generation[slots[0]]
    index.state[slots[:num_flipped]] = SlotState.COMMITTED
    if is_rebuilt:
        index.distrust_derived()
    die(store)
    with open_slab(tmp_path / "s", 5) as again:
        assert [payload(key) for key in NEW] == load(again, NEW)
        assert again.contains(other.keys) == [False]
        assert again.audit() == []


class HalfWritten(np.ndarray):
    """States of which a change reaches the first half only."""

    def __setitem__(self, at, value):
        """Write half, then die."""
        super().__setitem__(at[: len(at) // 2], value)
        raise Death


def test_death_amid_the_states_of_a_commit_still_shows_all(tmp_path):
    """What a commit has begun to show is shown whole by whoever comes next (X-01)."""
    store = open_slab(tmp_path / "s", 5)
    lease = store.reserve(NEW, BLOCK_BYTES)
    fill(lease)
    index = store._slab.index
    index.state = index.state.view(HalfWritten)
    with pytest.raises(Death):
        lease.commit()
    assert 2 == np.count_nonzero(index.state == SlotState.COMMITTED)
    die(store)
    with open_slab(tmp_path / "s", 5) as again:
        assert [payload(key) for key in NEW] == load(again, NEW)
        assert again.audit() == []


def test_lease_that_was_taken_back_is_refused(tmp_path):
    """A writer whose slots were given away publishes none of its blocks (S4-31)."""
    with open_slab(tmp_path / "s", 5) as store:
        lease = store.reserve(NEW, BLOCK_BYTES)
        fill(lease)
        with store._slab.index.locked():
            store._slab.index.reclaim([store._slab.owner_id])
        assert save(store, NEW[1:2]) == 1
        with pytest.raises(LeaseExpiredError):
            lease.commit()
        assert store.contains(NEW) == [False, True, False, False]
        assert [payload(NEW[1])] == load(store, NEW[1:2])
        assert store.audit() == []


def test_lease_does_not_end_with_another_ones_slots(tmp_path):
    """A lease that lost its slots neither publishes nor frees what has them now."""
    with open_slab(tmp_path / "s", 4) as store:
        lost = store.reserve(NEW, BLOCK_BYTES)
        fill(lost)
        with store._slab.index.locked():
            store._slab.index.reclaim([store._slab.owner_id])
        present = store.reserve(NEW, BLOCK_BYTES)
        assert set(lost.slots.slots.tolist()) == set(present.slots.slots.tolist())
        with pytest.raises(LeaseExpiredError):
            lost.commit()
        assert store.contains(NEW) == [False] * 4
        assert store.stats().reserved_blocks == 4
        fill(present)
        assert present.commit() == 4


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda i: i.header.__setitem__(Word.NUM_FREE, 1), "NUM_FREE"),
        (lambda i: i.tally.counts.__setitem__((0, 0), 1), "group 0"),
        (lambda i: i.stamps.__setitem__(0, -1), "below its bound"),
        (lambda i: i.shares.__setitem__(7, 1), "tenant 7 has 0"),
        (lambda i: i.chains.words.__setitem__(0, i.chains.words[1]), "two slots"),
        (lambda i: i.chains.hashes.__setitem__(0, 7), "hash"),
        (lambda i: i.chains.heads.__setitem__(slice(None), -1), "not found"),
        (lambda i: i.chains.nexts.__setitem__(slice(0, 3), 3), "linked"),
    ],
)
def test_audit_notices_damage(tmp_path, damage, told):
    """The audit that other tests rely on sees each kind of disagreement."""
    with open_slab(tmp_path / "s", 5) as store:
        save(store, OLD)
        save(store, NEW[:2])
        store.forget(NEW[:2])
        damage(store._slab.index)
        assert told in " ".join(store.audit())
        store._slab.index.distrust_derived()  # let the end find it in order
