# SPDX-License-Identifier: Apache-2.0
"""The place of the store: whose it is, whether it fits, and how fast it answers."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import attrs

from ucm.config import HugePages, StoreConfig
from ucm.doctor.findings import Finding, fine, note, refused, warning, wrong
from ucm.settings import size_text
from ucm.stores.slab import SlabLook

__all__ = ["DiskFacts", "check_disk", "check_place", "probe_disk", "within"]

_SLOW_S: Final = 0.01
_SYNCS: Final = 8
_PAGE: Final = 4096
_NETWORKS: Final = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse")
_T = TypeVar("_T")


def check_place(
    config: StoreConfig, seen: SlabLook, block_bytes: int | None = None
) -> Iterator[Finding]:
    """
    Say what an engine would meet at ``store.path``.

    Args:
        config: What was asked for.
        seen: What is there.
        block_bytes: Of the largest part of a block, if known.
    """
    for problem in seen.problems:
        yield refused("store", problem)
    if not seen.rooms:
        return
    if seen.in_memory:
        yield from _check_room(config, seen)
        yield from _check_huge_pages(config, seen)
    else:
        yield from _check_room(config, seen)
        yield note(
            "store",
            f"{config.path} lies on a disk ({seen.mount[0]}), not in memory",
            "Below /dev/shm blocks are loaded at the speed of memory.",
        )
    if seen.data_bytes:
        yield from _check_slab(config, seen, block_bytes)
    elif not seen.problems:
        yield fine("store", f"{config.path} is free for a slab")


def _check_room(config: StoreConfig, seen: SlabLook) -> Iterator[Finding]:
    short = [room for room in seen.rooms if room.left < seen.needed_bytes]
    for room in short:
        is_mount = room.what == "the file system"
        where = f"{seen.mount[0]} ({room.what})" if is_mount else room.what
        yield wrong(
            "shared memory" if is_mount and seen.in_memory else "room",
            f"store.capacity needs {size_text(seen.needed_bytes)} more, and {size_text(room.left)} "
            f"are left of {where}",
            _remedy(seen, is_mount=is_mount),
        )
    if not short:
        least = min(seen.rooms, key=lambda room: room.left)
        yield fine(
            "room",
            f"store.capacity of {size_text(config.capacity)} fits: {size_text(least.left)} are "
            f"left of {least.what}",
        )


def _remedy(seen: SlabLook, *, is_mount: bool) -> str:
    if not seen.in_memory:
        return "Set store.capacity to less, or use a larger disk."
    if is_mount:
        return (
            "Set store.capacity to less, or make the mount larger: docker run "
            "--shm-size, in Kubernetes an emptyDir with medium: Memory and a sizeLimit, "
            f"else mount -o remount,size=... {seen.mount[0]}."
        )
    return "Set store.capacity to less, or raise the limit of the container or machine."


def _check_huge_pages(config: StoreConfig, seen: SlabLook) -> Iterator[Finding]:
    place, options = seen.mount
    if config.huge_pages is HugePages.AUTO and "huge=" not in options:
        yield note(
            "huge pages",
            f"{place} is mounted without huge pages; the slab comes in small ones",
            f"As the administrator: mount -o remount,huge=advise {place}.",
        )


def _check_slab(
    config: StoreConfig, seen: SlabLook, block_bytes: int | None
) -> Iterator[Finding]:
    if abs(seen.data_bytes - config.capacity) >= _PAGE:
        yield warning(
            "store",
            f"the slab in {config.path} has {size_text(seen.data_bytes)}, not the "
            f"{size_text(config.capacity)} of store.capacity",
            "The first engine that opens it alone changes it; while others use it, it "
            "stays. Stop all its users, and start again.",
        )
    sizes = ", ".join(size_text(each) for each in seen.slot_sizes) or "none yet"
    yield fine("store", f"{config.path} has a slab of ours; sizes of slots: {sizes}")
    fits = [each for each in seen.slot_sizes if each >= (block_bytes or 0)]
    if block_bytes and seen.slot_sizes and (not fits or min(fits) > 2 * block_bytes):
        yield warning(
            "store",
            f"its blocks are of another layout: slots of {sizes}, and this model's "
            f"blocks have {size_text(block_bytes)}; nothing of it will be found",
            "If both models are to stay, give them capacity for both; else see whether "
            "model, tensor parallelism, block size or KV type is what you meant.",
        )


@attrs.frozen(kw_only=True)
class DiskFacts:
    """How a directory answers, in seconds; ``sync_s`` is None if that was not tried."""

    stat_s: float = 0.0
    """Asking for its free space."""
    sync_s: float | None = None
    """Median of writing a page and flushing it."""
    takes_direct: bool | None = None
    """Whether O_DIRECT works."""
    file_system: str = ""
    problem: str = ""


def probe_disk(directory: Path, system: Path = Path("/")) -> DiskFacts:
    """Try a directory with a file that has no name; nothing of it stays."""
    try:
        start = time.perf_counter()
        os.statvfs(directory)
        stat_s = time.perf_counter() - start
        kind = _file_system(directory, system)
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        return DiskFacts(problem=f"{directory}: {exc.strerror}")
    try:
        return DiskFacts(
            stat_s=stat_s,
            sync_s=sorted(_sync(fd) for _ in range(_SYNCS))[_SYNCS // 2],
            takes_direct=_takes_direct(fd),
            file_system=kind,
        )
    except OSError as exc:
        return DiskFacts(problem=f"{directory}: {exc.strerror}", file_system=kind)
    finally:
        os.close(fd)


def _sync(fd: int) -> float:
    start = time.perf_counter()
    os.pwrite(fd, bytes(_PAGE), 0)
    os.fdatasync(fd)
    return time.perf_counter() - start


def _takes_direct(fd: int) -> bool:
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _PAGE) as page:  # aligned, as it must be
            return os.pwrite(direct, page, 0) == _PAGE
    except OSError:
        return False
    finally:
        os.close(direct)


def _file_system(directory: Path, system: Path) -> str:
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (system / "proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""


def check_disk(facts: DiskFacts | None, directory: Path) -> Iterator[Finding]:
    """
    Say how a directory answers.

    Args:
        facts: What was measured; None if it did not answer.
        directory: Which.
    """
    if facts is None:
        yield wrong(
            "latency",
            f"{directory} does not answer",
            "Look at the mount; an engine would wait for it as well.",
        )
        return
    if facts.problem:
        yield note("latency", f"could not be tried: {facts.problem}")
        return
    if facts.file_system.partition(".")[0] in _NETWORKS:
        yield warning(
            "store",
            f"{directory} is a network mount ({facts.file_system}); a slab is shared "
            "by the processes of one machine only, through its memory",
            "Use /dev/shm or a local disk.",
        )
    if facts.sync_s is not None:
        text = (
            f"{directory} is asked in {facts.stat_s * 1000:.2g} ms, and a page is flushed "
            f"in {facts.sync_s * 1000:.2g} ms"
        )
        slow = max(facts.stat_s, facts.sync_s) > _SLOW_S
        remedy = "Commits of durability: power wait for it; use a faster disk."
        yield warning("latency", text, remedy) if slow else fine("latency", text)
    direct = "works" if facts.takes_direct else "does not work"
    yield fine("O_DIRECT", f"{direct} in {directory} ({facts.file_system})")


def within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return what a call answers, None if it does not in time: a mount may hang."""
    answers: list[_T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
