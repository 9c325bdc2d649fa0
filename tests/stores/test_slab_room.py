# SPDX-License-Identifier: Apache-2.0
"""A slab that would not fit into memory is refused before the kernel kills for it."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.stores.slab_kit import SLOT_BYTES, open_slab
from ucm.config import StoreConfig
from ucm.errors import ConfigError
from ucm.stores.slab import _creation, _populate
from ucm.stores.slab._fates import fates_nbytes
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._look import look
from ucm.stores.slab._room import memory_rooms, mount_room
from ucm.testing.store_blocks import make_keys, save

GIB = 1 << 30
MEMINFO = "MemTotal:  9000000 kB\nMemAvailable:    4194304 kB\n"


def make_system(root: Path, files: dict[str, str]) -> Path:
    """Write what a kernel tells."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(text))
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
SYSTEMS: dict[str, tuple[dict[str, str], list[int]]] = {
    "says nothing": ({}, []),
    "machine only": ({"proc/meminfo": MEMINFO}, [4 * GIB]),
    "version 2, limit of a parent": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{V2}/pod/box/memory.max": "max\n",
            f"{V2}/pod/box/memory.current": f"{GIB}\n",
            f"{V2}/pod/memory.max": f"{3 * GIB}\n",
            f"{V2}/pod/memory.current": f"{GIB}\n",
        },
        [2 * GIB],
    ),
    "version 2, slowed down before its limit": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "max\n",
            f"{V2}/memory.high": f"{2 * GIB}\n",
            f"{V2}/memory.current": f"{GIB}\n",
        },
        [GIB],
    ),
    "version 2, of a name that is no UTF-8": (
        {
            "proc/self/cgroup": "0::/b\udcfcx\n",
            f"{V2}/b\udcfcx/memory.max": f"{GIB}\n",
            f"{V2}/b\udcfcx/memory.current": "0\n",
        },
        [GIB],
    ),
    "version 2, seen from inside": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": f"{2 * GIB}\n",
            f"{V2}/memory.current": f"{GIB}\n",
            f"{V2}/memory.stat": f"file 9\ninactive_file {GIB // 4}\n"
            f"active_file {GIB // 4}\nshmem {GIB}\n",
        },
        [GIB + GIB // 2],
    ),
    "version 2 beside version 1": (
        {
            "proc/self/cgroup": "4:cpu,memory:/box\n0::/\n",
            f"{V2}/unified/memory.max": f"{GIB}\n",
            f"{V2}/unified/memory.current": "0\n",
            f"{V1}/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{V1}/box/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{V1}/box/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
        },
        [GIB, GIB],
    ),
    "version 1, path of the host": (
        {
            "proc/self/cgroup": "9:memory:/docker/0123\n1:name=systemd:/x\n",
            f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{V1}/memory.usage_in_bytes": "5\n",
        },
        [2 * GIB - 5],
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "9:memory:/\n",
            f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V1}/memory.usage_in_bytes": "5\n",
        },
        [],
    ),
    "above the namespace": (
        {
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/memory.max": "5\n",
            f"{V2}/memory.max": f"{GIB}\n",
            f"{V2}/memory.current": f"{2 * GIB}\n",
        },
        [0],
    ),
}


class TestRooms:
    @pytest.mark.parametrize(("files", "left"), SYSTEMS.values(), ids=SYSTEMS)
    def test_every_limit_above_us_counts(self, tmp_path, files, left):
        """R-26: limits of both versions, along the whole path, less what is in use and
        would not make way."""
        assert left == [
            room.left for room in memory_rooms(make_system(tmp_path, files))
        ]

    def test_this_machine_says_something(self):
        """R-26: what the tables stand for is there."""
        assert memory_rooms(Path("/"))
        assert all(room.left >= 0 and room.what for room in memory_rooms(Path("/")))

    def test_file_system_without_a_limit_has_room(
        self, tmp_path, memory_path, monkeypatch
    ):
        """R-26: a tmpfs of ``size=0``, as podman's ``--shm-size=0`` makes, tells of zeros and is
        not full; one that is full tells how large it is."""
        about = list(os.statvfs(tmp_path))
        about[2:5] = 0, 0, 0  # all blocks, free ones, and those free for everybody
        told = os.statvfs_result(about)
        monkeypatch.setattr(os, "statvfs", lambda _: told)
        monkeypatch.setattr(os, "fstatvfs", lambda _: told)
        seen = look(StoreConfig(path=str(memory_path), capacity=4 << 20), 4096)
        assert seen.needed_bytes < min(room.left for room in seen.rooms)
        with open_slab(memory_path) as store:
            assert 8 == save(store, make_keys(8))
        about[2] = 1 << 20
        assert 0 == mount_room(os.statvfs_result(about)).left


class TestStart:
    def refuse(self, monkeypatch, tmp_path, path, files) -> str:
        """Open a slab of four MiB under the limits given; return what is told."""
        system = make_system(tmp_path / "system", files)
        monkeypatch.setattr(_creation, "SYSTEM", system)
        with pytest.raises(ConfigError) as caught:
            open_slab(path, (4 << 20) // SLOT_BYTES)
        assert "store.capacity" == caught.value.key
        assert "raise the limit" in caught.value.remedy
        assert not path.exists()
        return str(caught.value)

    def test_limit_below_the_capacity_is_told_with_both_numbers(
        self, monkeypatch, tmp_path, memory_path
    ):
        """R-26: the start says what is needed, what is left, and of which limit."""
        files = {
            "proc/self/cgroup": "0::/box\n",
            f"{V2}/box/memory.max": f"{5 << 20}\n",
            f"{V2}/box/memory.current": f"{1 << 20}\n",
        }
        told = self.refuse(monkeypatch, tmp_path, memory_path, files)
        needed = (4 << 20) + (1 << 20) + IndexLayout(1024).nbytes + fates_nbytes(1024)
        assert f"= {needed} bytes needed" in told
        assert f"free are {4 << 20} bytes" in told
        assert "limit of 5242880 bytes in" in told
        assert "box/memory.max" in told

    def test_machine_without_memory_is_told(self, monkeypatch, tmp_path, memory_path):
        """R-26: nor is memory taken from everybody else on the machine."""
        files = {"proc/meminfo": "MemAvailable: 1024 kB\n"}
        told = self.refuse(monkeypatch, tmp_path, memory_path, files)
        assert "free are 1048576 bytes of the machine's available memory" in told

    def test_slabs_that_fill_at_the_same_moment_stay_within_the_limit(
        self, monkeypatch, tmp_path, memory_path
    ):
        """R-26: where four look at what is left and fill, nobody is killed for the sum of it."""
        limit, used = 60 << 20, [0]
        files = {
            "proc/self/cgroup": "0::/box\n",
            f"{V2}/box/memory.max": f"{limit}\n",
            f"{V2}/box/memory.current": "0\n",
        }
        system = make_system(tmp_path / "system", files)
        monkeypatch.setattr(_creation, "SYSTEM", system)

        def fill_four(memory: np.ndarray, *_: int, collapses: bool) -> None:
            used[0] += 4 * len(memory)
            make_system(system, {f"{V2}/box/memory.current": f"{used[0]}\n"})
            del collapses

        monkeypatch.setattr(_populate, "populate", fill_four)
        with open_slab(memory_path, (48 << 20) // SLOT_BYTES) as slab:
            assert 0 < used[0] <= limit
            assert not slab.is_growing
