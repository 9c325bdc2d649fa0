# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the place of the store; facts are fed, nothing is measured."""

import threading

from ucm.config import HugePages, StoreConfig
from ucm.doctor.findings import Severity
from ucm.doctor.place import check_place, within
from ucm.errors import ConfigError
from ucm.stores.slab import Mount, Room, SlabLook

GIB = 1 << 30
CONFIG = StoreConfig(path="/dev/shm/x", capacity=4 * GIB)
FREE = Room(9 * GIB, "the file system")


def seen(**facts):
    """Return what there is below /dev/shm, by default all that is needed."""
    given = {
        "mount": Mount("/dev/shm", "tmpfs", "rw,huge=advise"),
        "needed_bytes": 4 * GIB,
        "rooms": (FREE,),
    }
    return SlabLook(**{**given, **facts})


def found(look, severity=Severity.WRONG, config=CONFIG, block_bytes=None):
    """Return what is found of this severity: check, text and remedy."""
    return [
        (each.check, each.text, each.remedy)
        for each in check_place(config, look, block_bytes)
        if each.severity is severity
    ]


class TestRoom:
    def test_enough_is_well(self):
        """Where all fits, the shortest room is told."""
        assert [] == found(seen())
        assert any("9 GiB" in text for _, text, _ in found(seen(), Severity.FINE))

    def test_small_shared_memory_is_found(self):
        """X-12: the commonest fault of a container: /dev/shm of 64 MiB; the remedy has
        the words for docker and Kubernetes."""
        look = seen(rooms=(Room(64 << 20, "the file system"),))
        ((check, text, remedy),) = found(look)
        assert "shared memory" == check
        assert "64 MiB" in text
        assert "4 GiB" in text
        assert "--shm-size" in remedy
        assert "emptyDir" in remedy

    def test_memory_limit_below_the_capacity_is_found(self):
        """R-26: both numbers, and which limit it is."""
        look = seen(rooms=(FREE, Room(2 * GIB, "the limit in /sys/fs/cgroup/m")))
        ((check, text, remedy),) = found(look)
        assert "room" == check
        assert "4 GiB" in text
        assert "2 GiB are left of the limit in /sys/fs/cgroup/m" in text
        assert "raise the limit" in remedy

    def test_slab_that_is_full_already_needs_nothing_more(self):
        """What is counted is what is still to come."""
        look = seen(
            needed_bytes=0, rooms=(Room(0, "the file system"),), data_bytes=4 * GIB
        )
        assert [] == found(look)


class TestSlab:
    def test_what_would_stop_an_engine_is_passed_on(self):
        """R-24: the store's own words, with its own remedy."""
        error = ConfigError("store.path", "/x", "it belongs to user 7", "Use another.")
        ((_, text, remedy),) = found(SlabLook(problems=(error,)))
        assert "store.path='/x': it belongs to user 7" == text
        assert "Use another." == remedy

    def test_slab_of_another_layout_is_found(self):
        """C.5: other slots than this model needs: nothing of it will be found, and the
        settings that decide it are named."""
        look = seen(data_bytes=4 * GIB, slot_sizes=(65536,))
        for block_bytes, times in ((60000, 0), (65537, 1), (4096, 1), (None, 0)):
            texts = found(look, Severity.WARNING, block_bytes=block_bytes)
            assert times == len(texts)
            assert all("another layout" in text for _, text, _ in texts)

    def test_slab_of_another_size_is_found(self):
        """R-31: the capacity changes only while nobody uses it."""
        ((_, text, _),) = found(seen(data_bytes=GIB), Severity.WARNING)
        assert "1 GiB, not the 4 GiB" in text

    def test_mount_without_huge_pages_is_noted_where_they_are_wanted(self):
        """R-27: how to have them."""
        look = seen(mount=Mount("/dev/shm", "tmpfs", "rw"))
        assert any("remount,huge=advise" in r for *_, r in found(look, Severity.NOTE))
        able = seen(mount=look.mount, may_collapse=True)
        assert not any("huge" in r for *_, r in found(able, Severity.NOTE))
        off = StoreConfig(path="/x", capacity=4 * GIB, huge_pages=HugePages.OFF)
        assert [] == found(look, Severity.NOTE, config=off)


def test_what_hangs_is_not_waited_for():
    """X-14: a hung mount does not hang the doctor."""
    never = threading.Event()
    assert within(0.01, never.wait) is None
    never.set()
    assert 7 == within(60.0, lambda: 7)
