# SPDX-License-Identifier: Apache-2.0
"""
What is asked of the kernel about mapped memory: pages, their size and their node.

Called through ``ctypes``, which lets other threads run meanwhile; ``mmap.madvise``
does not.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from ucm.affinity import parse_cpulist
from ucm.config import HugePages
from ucm.errors import ConfigError

__all__ = [
    "MemoryWishes",
    "Mount",
    "advise",
    "has_huge_pages",
    "is_in_memory",
    "map_aligned",
    "may_collapse",
    "mount_of",
    "nodes_of",
    "populate",
    "punch",
]

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_COLLAPSES = 6, 1
"""The kernel that makes huge pages on request."""
_PAGE = 4096
_HUGE_BYTES = 2 << 20
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_TMPFS_MAGIC = 0x01021994
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_AGAIN = {errno.EINTR, errno.EAGAIN}
_libc = ctypes.CDLL(None, use_errno=True)
_map = _libc.mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
)

_Memory = npt.NDArray[np.uint8]
"""A mapping, or a part of one, as bytes."""


def _madvise(memory: _Memory, advice: int) -> None:
    address, nbytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory))
    while _libc.madvise(address, nbytes, advice):
        code = ctypes.get_errno()
        if code not in _AGAIN:
            raise OSError(code, os.strerror(code))


def map_aligned(fd: int) -> memoryview:
    """
    Map a whole file, shared, from where a huge page can begin, if there is room for that.

    Raises:
        OSError: It cannot be mapped.
        ValueError: It is empty.
    """
    nbytes = os.fstat(fd).st_size
    with contextlib.suppress(OSError):
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = mmap.mmap(-1, nbytes + _HUGE_BYTES, kind)
        first = np.frombuffer(room, np.uint8).ctypes.data
        skipped = -first % _HUGE_BYTES
        wanted, access = first + skipped, mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_SHARED | _MAP_FIXED
        # In the place of memory that is ours: all of it goes with the last view.
        if nbytes and _map(wanted, nbytes, access, kind, fd, 0) == wanted:
            return memoryview(room)[skipped : skipped + nbytes]
    return memoryview(mmap.mmap(fd, 0))


def populate(
    memory: _Memory,
    fd: int,
    offset: int,
    num_threads: int = 1,
    *,
    collapses: bool = False,
) -> None:
    """
    See that every page is there and known to this process; blocks, and may be stopped.

    Args:
        memory: From a page on.
        fd: The file that is mapped there.
        offset: Of the memory in the file.
        num_threads: That do it; one has a kernel zero some 2 GB a second.
        collapses: Nobody uses it yet, and it may come in huge pages.

    Raises:
        OSError: There is no memory for a page; ``EFAULT`` or ``ENOMEM``, ``ENOSPC``.
    """
    share = _HUGE_BYTES * -(-len(memory) // (_HUGE_BYTES * num_threads))
    parts = [memory[at : at + share] for at in range(0, len(memory), share)]
    fill = _fill_huge if collapses else _fill
    try:
        if not (len(parts) > 1 and _populate_beside(parts, fill)):
            fill(memory)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise
        os.posix_fallocate(fd, offset, len(memory))


def _fill(memory: _Memory) -> None:
    _madvise(memory, _MADV_POPULATE_WRITE)


def _fill_huge(memory: _Memory) -> None:
    """
    Have huge pages as long as the kernel finds some; then small ones.

    Asked so, it does whatever its settings and the mount say, but where they say ``deny``
    (madvise(2)): where a page is there, it makes a huge one of it.
    """
    first = -memory.ctypes.data % _HUGE_BYTES
    places = range(first, len(memory) - _HUGE_BYTES + 1, _HUGE_BYTES)
    for number, at in enumerate(places):
        # Not the first of each: a kernel that takes nodes in turn takes them page by page, and
        # the huge page comes from where that one lies.
        some = at + number % (_HUGE_BYTES // _PAGE) * _PAGE
        _fill(memory[some : some + _PAGE])
    # By one call: each has all CPUs hand over what pages they have just taken.
    address = ctypes.c_void_p(memory.ctypes.data + first)
    _libc.madvise(address, ctypes.c_size_t(len(places) * _HUGE_BYTES), _MADV_COLLAPSE)
    _fill(memory)


def _populate_beside(parts: list[_Memory], fill: Callable[[_Memory], None]) -> bool:
    """Populate parts side by side; return whether there were threads for it."""
    try:
        with ThreadPoolExecutor(len(parts), "ucm-populate") as pool:
            for _ in pool.map(fill, parts):
                pass  # an error is raised here
    except RuntimeError:  # none is to be had, or the process ends
        return False
    return True


def punch(fd: int, start: int, nbytes: int) -> None:
    """
    Give the memory of a part of a file back; it reads as zeros, and has no pages.

    Raises:
        OSError: The file system cannot.
    """
    mode, *where = _PUNCH_HOLE | _KEEP_SIZE, *map(ctypes.c_int64, (start, nbytes))
    while _libc.fallocate(fd, mode, *where):
        code = ctypes.get_errno()
        if code not in _AGAIN:
            raise OSError(code, os.strerror(code))


def advise(memory: _Memory, wanted: HugePages) -> None:
    """Ask for huge pages, or for none; what a kernel does not know it does not do."""
    advice = mmap.MADV_NOHUGEPAGE if wanted is HugePages.OFF else mmap.MADV_HUGEPAGE
    try:
        _madvise(memory, advice)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise


@attrs.frozen
class MemoryWishes:
    """In which pages and on which nodes a slab's memory is to be."""

    huge_pages: HugePages = HugePages.AUTO
    numa: str = "off"

    def check(self, root: Path, system: Path) -> None:
        """
        Make sure that they can be fulfilled, as far as that is known beforehand.

        Args:
            root: The slab's directory, which need not be there.
            system: Where ``proc`` and ``sys`` are: ``/``.

        Raises:
            ConfigError: They cannot; says why.
        """
        nodes_of(self.numa, system)
        if self.huge_pages is HugePages.REQUIRE:
            _require_huge_pages(root, system)

    def tell(self, memory: _Memory, system: Path) -> None:
        """
        Tell the kernel, before the memory is populated.

        Raises:
            ConfigError: It refused.
        """
        advise(memory, self.huge_pages)
        _bind(memory, self.numa, system)

    def verify(self, memory: _Memory, root: Path, system: Path) -> None:
        """
        Make sure that memory, of which some is populated, is as it was required.

        Raises:
            ConfigError: It is not.
        """
        if self.huge_pages is HugePages.REQUIRE and not has_huge_pages(memory, system):
            raise _huge_pages_error(
                f"the memory of the slab in {root} came in small pages",
                "Stop all its users, free some memory, remove the directory, and start "
                "again",
            )


def has_huge_pages(memory: _Memory, system: Path) -> bool:
    """Return whether some of a mapping, which is populated, is in huge pages."""
    text = os.fsdecode((system / "proc/self/smaps").read_bytes())
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        if entry.startswith(f"{memory.ctypes.data:x}-"):
            sizes = re.findall(r"(?:ShmemPmdMapped|FilePmdMapped): +(\d+)", entry)
            return any(int(number) for number in sizes)
    return False


def may_collapse(system: Path) -> bool:
    """Return whether this kernel may make huge pages on request, whatever mounts say."""
    try:
        release = (system / "proc/sys/kernel/osrelease").read_text()
    except OSError:
        return False
    return tuple(map(int, re.findall(r"\d+", release)[:2])) >= _COLLAPSES


def _require_huge_pages(root: Path, system: Path) -> None:
    """
    Make sure that memory below *root* can come in huge pages.

    Raises:
        ConfigError: It cannot; says what has to be written where.
    """
    setting = system / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        chosen = re.findall(r"\[(\w+)\]", setting.read_text())
    except OSError:
        chosen = []
    if not chosen or chosen == ["deny"]:
        raise _huge_pages_error(
            f"{setting} says {chosen[0] if chosen else 'nothing'}",
            f"Write advise to {setting}",
        )
    if may_collapse(system):
        return
    mount = mount_of(root, system)
    if chosen == ["force"] or re.search(
        r"\bhuge=(always|within_size|advise)\b", mount.options
    ):
        return
    raise _huge_pages_error(
        f"{mount.place} is mounted without huge pages ({mount.options})",
        f"Run: mount -o remount,huge=advise {mount.place}; or write force to {setting}",
    )


def _huge_pages_error(problem: str, remedy: str) -> ConfigError:
    """Return the error for a slab that has no huge pages and should have."""
    return ConfigError(
        "store.huge_pages",
        HugePages.REQUIRE.value,
        problem,
        f"{remedy}, as the machine's administrator; or set store.huge_pages to auto.",
    )


@attrs.frozen
class Mount:
    """Where a file system is mounted, of what kind it is, and its options."""

    place: str = ""
    kind: str = "an unknown file system"
    options: str = "unknown"


def is_in_memory(root: Path) -> bool:
    """
    Return whether a path lies on tmpfs, or would if it were made.

    The kernel is asked (statfs(2)): the table of mounts need not have every device.

    Raises:
        OSError: It cannot be asked.
    """
    told = (ctypes.c_long * 32)()  # struct statfs, with some room behind it
    fd = os.open(root if root.exists() else root.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        if _libc.fstatfs(fd, told):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)
    return told[0] == _TMPFS_MAGIC


def mount_of(root: Path, system: Path = Path("/")) -> Mount:
    """
    Return on what a path lies, or would if it were made.

    Args:
        root: Which.
        system: Where ``proc`` is: ``/``.

    Raises:
        OSError: It cannot be asked.
    """
    device = os.stat(root if root.exists() else root.parent).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    table = os.fsdecode((system / "proc/self/mountinfo").read_bytes())
    for line in table.split("\n"):  # other signs may be in names, which may be no UTF-8
        fields = line.split(" ")
        if fields[2:3] == [wanted]:
            kind = fields[fields.index("-") + 1]
            return Mount(fields[4], kind, fields[-1])
    return Mount(str(root))


def nodes_of(setting: str, system: Path) -> tuple[int, frozenset[int]] | None:
    """
    Return the policy and the nodes that ``store.numa`` means; None if it is off.

    Raises:
        ConfigError: The machine does not have them, or cannot be asked.
    """
    if setting == "off":
        return None
    problem = ""
    try:
        path = system / "sys/devices/system/node/has_memory"
        known = parse_cpulist(path.read_text())
    except (OSError, ValueError) as exc:
        known, problem = frozenset(), f"this machine does not tell its nodes ({exc})"
    wanted = known if setting == "interleave" else parse_cpulist(setting)
    if wanted - known and not problem:
        problem = f"nodes with memory are {sorted(known)}"
    if platform.machine() not in _SYS_MBIND and not problem:
        problem = f"unknown on {platform.machine()}"
    if problem:
        raise _numa_error(setting, problem)
    return _MPOL_INTERLEAVE if setting == "interleave" else _MPOL_BIND, wanted


def _bind(memory: _Memory, setting: str, system: Path) -> None:
    """
    Say on which nodes pages go that are not there yet; all users of a file share it.

    Raises:
        ConfigError: The setting cannot be followed; says why.
    """
    policy = nodes_of(setting, system)
    if policy is None:
        return
    mode, nodes = policy
    mask = sum(1 << node for node in nodes)
    words = (ctypes.c_ulong * 16)(
        *((mask >> (64 * at)) & (1 << 64) - 1 for at in range(16))
    )
    if _libc.syscall(
        ctypes.c_long(_SYS_MBIND[platform.machine()]),
        ctypes.c_void_p(memory.ctypes.data),
        ctypes.c_ulong(len(memory)),
        ctypes.c_long(mode),
        ctypes.byref(words),
        ctypes.c_ulong(1024 + 1),
        ctypes.c_ulong(0),
    ):
        raise _numa_error(
            setting, f"the kernel refused: {os.strerror(ctypes.get_errno())}"
        )


def _numa_error(setting: str, problem: str) -> ConfigError:
    remedy = "Give nodes that have memory, or off; a container has to allow mbind (docker run --cap-add SYS_NICE)."
    return ConfigError("store.numa", setting, problem, remedy)
