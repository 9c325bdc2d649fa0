# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the place of the store; facts are fed, nothing is measured."""

import threading

import pytest

from ucm.config import HugePages, StoreConfig
from ucm.doctor.findings import Severity
from ucm.doctor.place import DiskFacts, check_disk, check_place, probe_disk, within
from ucm.errors import ConfigError
from ucm.stores.slab import Room, SlabLook

GIB = 1 << 30
CONFIG = StoreConfig(path="/dev/shm/x", capacity=4 * GIB)
FREE = Room(9 * GIB, "the file system")


def seen(**facts):
    """Return what there is below /dev/shm, by default all that is needed."""
    given = {
        "in_memory": True,
        "mount": ("/dev/shm", "rw,huge=advise"),
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

    def test_small_disk_has_another_remedy(self):
        """Nobody is sent to /dev/shm for a disk."""
        look = seen(in_memory=False, rooms=(Room(GIB, "the file system"),))
        ((_, _, remedy),) = found(look)
        assert "larger disk" in remedy


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
        look = seen(mount=("/dev/shm", "rw"))
        assert any("remount,huge=advise" in r for *_, r in found(look, Severity.NOTE))
        off = StoreConfig(path="/x", capacity=4 * GIB, huge_pages=HugePages.OFF)
        assert [] == found(look, Severity.NOTE, config=off)


class TestDisk:
    @pytest.mark.parametrize(
        ("facts", "severity", "told"),
        [
            (None, Severity.WRONG, "does not answer"),
            (DiskFacts(problem="/x: no"), Severity.NOTE, "could not be tried: /x: no"),
            (DiskFacts(sync_s=0.5), Severity.WARNING, "in 5e+02 ms"),
            (DiskFacts(sync_s=0.0005), Severity.FINE, "in 0.5 ms"),
            (DiskFacts(stat_s=0.5, sync_s=0), Severity.WARNING, "asked in 5e+02 ms"),
            (DiskFacts(file_system="nfs4"), Severity.WARNING, "network mount"),
            (DiskFacts(file_system="fuse.juicefs"), Severity.WARNING, "network mount"),
            (DiskFacts(takes_direct=True), Severity.FINE, "works"),
            (DiskFacts(takes_direct=False), Severity.FINE, "does not work"),
        ],
    )
    def test_how_a_directory_answers_is_told(self, tmp_path, facts, severity, told):
        """X-14: slow, hung and remote directories are told apart."""
        assert any(
            severity is each.severity and told in each.text
            for each in check_disk(facts, tmp_path)
        )

    def test_a_directory_is_tried_and_stays_as_it_is(self, tmp_path):
        """The file that is written to has no name."""
        before = tmp_path.stat().st_mtime_ns
        facts = probe_disk(tmp_path)
        assert "" == facts.problem
        assert facts.sync_s > 0
        assert facts.stat_s > 0
        assert facts.file_system
        assert before == tmp_path.stat().st_mtime_ns
        assert [] == [*tmp_path.iterdir()]

    def test_directory_that_cannot_be_tried_says_why(self, tmp_path):
        """An error is a fact as well."""
        assert "No such file" in probe_disk(tmp_path / "missing").problem

    def test_what_hangs_is_not_waited_for(self):
        """X-14: a hung mount does not hang the doctor."""
        never = threading.Event()
        assert within(0.01, never.wait) is None
        never.set()
        assert 7 == within(60.0, lambda: 7)
