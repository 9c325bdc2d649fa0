# SPDX-License-Identifier: Apache-2.0
"""Huge pages and NUMA nodes: a slab has what was asked for, or says why not."""

import contextlib
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.stores.test_slab_room import make_system
from ucm.config import HugePages, StoreConfig
from ucm.errors import ConfigError
from ucm.stores.slab import SlabStore, _creation, _memory
from ucm.stores.slab._memory import (
    MemoryWishes,
    has_huge_pages,
    map_aligned,
    may_collapse,
    nodes_of,
    populate,
)
from ucm.testing.store_blocks import load, make_keys, payload, save

SETTING = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
NODES = "sys/devices/system/node/has_memory"
CAPACITY = 4 << 20
_WITHOUT_MBIND = """
import ctypes, struct, sys
from ucm.stores.slab import SlabStore
rules = [(32, 0, 0, 0), (21, 0, 1, 237), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
text = b"".join(struct.pack("HBBI", *rule) for rule in rules)
code = ctypes.create_string_buffer(text)
filter = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
system = ctypes.CDLL(None)
system.prctl(38, 1, 0, 0, 0)  # no new privileges
assert not system.prctl(22, 2, filter, 0, 0)  # seccomp(2)
SlabStore(path=sys.argv[1], capacity_bytes=1 << 20, block_bytes=4096, index_only=False, numa="interleave")
"""


def mounts(options: str) -> str:
    """Return a table of mounts in which every device of this machine has options."""
    return re.sub(
        r"(?m)(- \S+ \S+) \S+$",
        rf"\1 {options}",
        Path("/proc/self/mountinfo").read_text(),
    )


def open_slab(path: Path, **more: object) -> SlabStore:
    """Open a slab as the settings say."""
    config = StoreConfig(path=str(path), capacity=CAPACITY, **more)
    return SlabStore.open_configured(config, block_bytes=4096, index_only=False)


def flags_of(path: Path) -> list[str]:
    """Return the kernel's flags of the mapped data."""
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps.partition(f"{path}/data\n")[2].partition("VmFlags:")[2]
    return entry.partition("\n")[0].split()


class TestHugePages:
    @pytest.mark.parametrize(
        ("chosen", "options", "told"),
        [
            ("always within_size advise never [deny] force", "rw", "says deny"),
            ("always within_size advise [never] deny force", "rw", "mounted without"),
            ("", "rw,huge=advise", "says nothing"),
            ("[never] deny force", "rw,huge=never", "mounted without"),
        ],
    )
    def test_machine_that_gives_none_is_told_what_to_write(
        self, memory_path, tmp_path, monkeypatch, chosen, options, told
    ):
        """R-27: where huge pages are required the start says what is missing and what
        gives them, and nothing was made."""
        files = {SETTING: chosen, "proc/self/mountinfo": mounts(options)}
        monkeypatch.setattr(
            _creation, "SYSTEM", make_system(tmp_path / "system", files)
        )
        with pytest.raises(ConfigError, match=told) as caught:
            open_slab(memory_path, huge_pages=HugePages.REQUIRE)
        assert "store.huge_pages" == caught.value.key
        assert (
            "huge=advise" in caught.value.remedy or "advise to" in caught.value.remedy
        )
        assert not memory_path.exists()

    @pytest.mark.parametrize(
        ("chosen", "options"),
        [
            ("[force] deny", "rw"),
            ("[never] deny", "rw,size=9k,huge=advise"),
            ("[advise] deny", "rw,huge=always"),
            ("[never]", "rw,huge=within_size"),
        ],
    )
    def test_machine_that_gives_them_is_tried(self, tmp_path, chosen, options):
        """R-27: by the mount, or by the machine for all mounts, however old its kernel is."""
        files = {SETTING: chosen, "proc/self/mountinfo": mounts(options)}
        system = make_system(tmp_path / "system", files)
        MemoryWishes(HugePages.REQUIRE).check(tmp_path / "not yet", system)

    @pytest.mark.parametrize(
        ("release", "may"),
        [("6.1.0-13-amd64\n", True), ("6.0.9", False), ("7.0", True), ("odd", False)],
    )
    def test_kernel_that_makes_them_on_request_needs_no_mount(
        self, tmp_path, release, may
    ):
        """R-27: since 6.1 it does so whatever mounts say, but where the machine denies it."""
        files = {
            SETTING: "[never]",
            "proc/self/mountinfo": mounts("rw"),
            "proc/sys/kernel/osrelease": release,
        }
        system = make_system(tmp_path / "system", files)
        assert may is may_collapse(system)
        wishes, place = MemoryWishes(HugePages.REQUIRE), tmp_path / "not yet"
        with contextlib.nullcontext() if may else pytest.raises(ConfigError):
            wishes.check(place, system)
        denied = make_system(tmp_path / "denied", files | {SETTING: "[deny]"})
        with pytest.raises(ConfigError, match="says deny"):
            wishes.check(place, denied)

    def test_mapping_that_got_none_is_refused(self, memory_path, tmp_path, monkeypatch):
        """R-27: what counts is what the memory got; nobody is left in the slab."""
        files = {
            SETTING: "[force]",
            "proc/self/mountinfo": mounts("rw"),
            "proc/self/smaps": "",
            "proc/meminfo": "",
        }
        with monkeypatch.context() as patch:
            system = make_system(tmp_path / "system", files)
            patch.setattr(_creation, "SYSTEM", system)
            with pytest.raises(ConfigError, match="came in small pages"):
                open_slab(memory_path, huge_pages=HugePages.REQUIRE)
        with open_slab(memory_path) as store:
            assert not store._slab._class.owners.are_others()

    @pytest.mark.parametrize(
        ("entry", "has"),
        [
            ("ShmemPmdMapped:     2048 kB\nFilePmdMapped: 0 kB\n", True),
            ("ShmemPmdMapped:     0 kB\nFilePmdMapped: 4096 kB\n", True),
            ("ShmemPmdMapped:     0 kB\nFilePmdMapped: 0 kB\n", False),
            ("Rss: 4 kB\n", False),
        ],
    )
    def test_only_the_own_mapping_is_looked_at(self, tmp_path, entry, has):
        """R-27: that others have huge pages says nothing."""
        memory = np.zeros(4096, dtype=np.uint8)
        start = memory.ctypes.data
        other = (
            "1000-2000 rw-s 0 0:1 1 /x\nShmemPmdMapped: 2048 kB\nFilePmdMapped: 1 kB\n"
        )
        own = f"{start:x}-{start + 4096:x} rw-s 0 0:1 1 /y\n"
        for text in (other + own + entry, own + entry + other):
            system = make_system(tmp_path, {"proc/self/smaps": text})
            assert has == has_huge_pages(memory, system)

    @pytest.mark.parametrize(
        ("wanted", "flag"), [(HugePages.AUTO, "hg"), (HugePages.OFF, "nh")]
    )
    def test_kernel_is_told(self, memory_path, wanted, flag):
        """R-27: the mapping is marked for huge pages, or against them."""
        with open_slab(memory_path, huge_pages=wanted) as store:
            assert flag in flags_of(memory_path)
            assert "hg nh".replace(flag, "").strip() not in flags_of(memory_path)
            assert 5 == save(store, make_keys(5))
            assert [payload(key) for key in make_keys(5)] == load(store, make_keys(5))


class Kernel:
    """The machine's, which may know no such request; notes what memory it is asked to collapse."""

    def __init__(self, *, knows):
        self.collapsed, self.touched = [], []
        self._knows = knows
        self._libc = _memory._libc

    def __getattr__(self, name):
        return getattr(self._libc, name)

    def madvise(self, address, nbytes, advice):
        """Forward."""
        if nbytes.value == 4096:
            self.touched.append(address.value)
        if advice != _memory._MADV_COLLAPSE:
            return self._libc.madvise(address, nbytes, advice)
        self.collapsed.append((address.value, nbytes.value))
        return self._libc.madvise(address, nbytes, advice) if self._knows else -1


HUGE = 2 << 20


class TestCollapse:
    @pytest.mark.parametrize("knows", [True, False])
    def test_whole_huge_pages_are_asked_for_and_all_memory_comes(
        self, memory_path, monkeypatch, knows
    ):
        """R-27: on a mount without them, too; where a kernel has none, small ones come."""
        kernel = Kernel(knows=knows)
        monkeypatch.setattr(_memory, "_libc", kernel)
        nbytes = 3 * HUGE + 4096
        with memory_path.parent.joinpath("data").open("w+b") as file:
            file.truncate(nbytes)
            memory = np.frombuffer(map_aligned(file.fileno()), np.uint8)
            populate(memory, file.fileno(), 0, collapses=True)
            start = memory.ctypes.data
            assert [(start, 3 * HUGE)] == kernel.collapsed
            # Nodes that have pages in turn, by the page, have huge pages in turn.
            assert [0, HUGE + 4096, 2 * HUGE + 8192] == [
                address - start for address in kernel.touched
            ]
            assert nbytes == 512 * os.fstat(file.fileno()).st_blocks
            assert not memory.any()
            del memory

    def test_memory_that_is_less_than_a_huge_page_is_as_it_was(
        self, memory_path, monkeypatch
    ):
        """R-27: nothing is asked of what is not ours."""
        kernel = Kernel(knows=True)
        monkeypatch.setattr(_memory, "_libc", kernel)
        with memory_path.parent.joinpath("data").open("w+b") as file:
            file.truncate(nbytes := HUGE + 8192)
            memory = np.frombuffer(map_aligned(file.fileno()), np.uint8)[4096:]
            populate(memory, file.fileno(), 4096, collapses=True)
            assert [(memory.ctypes.data + HUGE - 4096, 0)] == kernel.collapsed
            assert nbytes - 4096 <= 512 * os.fstat(file.fileno()).st_blocks
            del memory

    @pytest.mark.parametrize(
        ("wanted", "asked"), [(HugePages.AUTO, CAPACITY), (HugePages.OFF, 0)]
    )
    def test_only_memory_that_nobody_uses_is_collapsed(
        self, memory_path, monkeypatch, wanted, asked
    ):
        """R-27: who comes later finds it as it is, and its blocks; ``off`` asks for none."""
        kernel = Kernel(knows=True)
        monkeypatch.setattr(_memory, "_libc", kernel)
        with open_slab(memory_path, huge_pages=wanted) as store:
            save(store, make_keys(5))
            told = [nbytes for _, nbytes in kernel.collapsed]
            assert asked == sum(told)
            with open_slab(memory_path, huge_pages=wanted) as later:
                assert told == [nbytes for _, nbytes in kernel.collapsed]
                assert [payload(key) for key in make_keys(5)] == load(
                    later, make_keys(5)
                )


class TestMapping:
    def test_file_is_mapped_from_where_a_huge_page_begins(self, memory_path):
        """R-27: else none of its huge pages could be one of the mapping; what is written there is
        the file's, and it goes with the last view."""
        path = memory_path.parent / "data"
        with path.open("w+b") as file:
            file.truncate(nbytes := 5 * 4096)
            memory = np.frombuffer(map_aligned(file.fileno()), np.uint8)
            assert 0 == memory.ctypes.data % HUGE
            assert nbytes == len(memory)
            memory[4096:8192] = 7
            assert bytes(4096) + b"\7" * 4096 == path.read_bytes()[:8192]
            assert f" {path}\n" in Path("/proc/self/smaps").read_text()
            del memory
            assert f" {path}\n" not in Path("/proc/self/smaps").read_text()

    def test_file_is_mapped_anyhow(self, memory_path, monkeypatch):
        """R-27: where a kernel maps nothing there, it lies where it likes."""
        monkeypatch.setattr(_memory, "_map", lambda *_: None)
        path = memory_path.parent / "data"
        with path.open("w+b") as file:
            file.truncate(4096)
            memory = np.frombuffer(map_aligned(file.fileno()), np.uint8)
            memory[:] = 7
            assert b"\7" * 4096 == path.read_bytes()
            del memory

    def test_empty_file_is_refused(self, tmp_path):
        """R-27: as any mapping refuses it."""
        with (
            (tmp_path / "data").open("w+b") as file,
            pytest.raises(ValueError, match="empty"),
        ):
            map_aligned(file.fileno())


class TestPopulate:
    @pytest.mark.parametrize("num_threads", [1, 3, 4])
    def test_all_pages_are_there_however_many_threads_do_it(
        self, memory_path, num_threads
    ):
        """R-25: parts are side by side, and the last may be shorter."""
        nbytes = (7 << 20) + 4096
        with memory_path.parent.joinpath("data").open("w+b") as file:
            file.truncate(nbytes)
            memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
            populate(memory, file.fileno(), 0, num_threads)
            assert nbytes == 512 * os.fstat(file.fileno()).st_blocks
            del memory

    def test_no_thread_is_needed(self, memory_path, monkeypatch):
        """R-25: where none is to be had, as while a process ends, one does it all."""

        def refuse(*_, **__):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(_memory, "ThreadPoolExecutor", refuse)
        with memory_path.parent.joinpath("data").open("w+b") as file:
            file.truncate(nbytes := 4 << 20)
            memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
            populate(memory, file.fileno(), 0, 2)
            assert nbytes == 512 * os.fstat(file.fileno()).st_blocks
            del memory


class TestNodes:
    @pytest.mark.parametrize(
        ("setting", "policy"), [("0", "bind:0"), ("interleave", "interleave:0")]
    )
    def test_slab_lies_where_the_setting_says(self, memory_path, setting, policy):
        """R-27: the kernel has the policy for the slots, before there is a page."""
        with open_slab(memory_path, numa=setting) as store:
            lines = Path("/proc/self/numa_maps").read_text().splitlines()
            fields = [line.split() for line in lines]
            assert [policy] == [
                each[1] for each in fields if f"file={memory_path}/data" in each
            ]
            assert 5 == save(store, make_keys(5))

    @pytest.mark.parametrize(
        ("files", "setting", "wanted"),
        [
            ({}, "off", None),
            ({NODES: "0-1,3\n"}, "interleave", (3, {0, 1, 3})),
            ({NODES: "0-3\n"}, "1,3", (2, {1, 3})),
        ],
    )
    def test_nodes_are_those_that_have_memory(self, tmp_path, files, setting, wanted):
        """R-27: as the machine tells them."""
        assert wanted == nodes_of(setting, make_system(tmp_path, files))

    @pytest.mark.parametrize(
        ("files", "setting", "told"),
        [
            ({NODES: "0\n"}, "1", r"nodes with memory are \[0\]"),
            ({}, "interleave", "does not tell its nodes"),
            ({}, "0", "does not tell its nodes"),
        ],
    )
    def test_node_that_is_not_there_is_refused(
        self, memory_path, tmp_path, monkeypatch, files, setting, told
    ):
        """R-27: by name, and before anything is made."""
        monkeypatch.setattr(
            _creation, "SYSTEM", make_system(tmp_path / "system", files)
        )
        with pytest.raises(ConfigError, match=told) as caught:
            open_slab(memory_path, numa=setting)
        assert "store.numa" == caught.value.key
        assert not memory_path.exists()

    @pytest.mark.parametrize("setting", ["", "x", "3-1", "interleave,1"])
    def test_setting_that_is_no_list_of_nodes_is_refused(self, setting):
        """R-27: when the settings are read."""
        with pytest.raises(ConfigError, match=r"store\.numa"):
            StoreConfig(numa=setting)

    @pytest.mark.skipif(
        platform.machine() != "x86_64", reason="numbers of system calls"
    )
    def test_container_that_forbids_it_is_told_what_to_allow(self, memory_path) -> None:
        """X-09: Docker refuses mbind by default, and it was said to be for want of nodes."""
        told = subprocess.run(
            [sys.executable, "-c", _WITHOUT_MBIND, str(memory_path)],
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
        )
        assert "Operation not permitted. Give nodes" in told.stderr
        assert "SYS_NICE" in told.stderr
