# SPDX-License-Identifier: Apache-2.0
"""The place of the store: whose it is, and whether it fits."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from ucm.config import HugePages, StoreConfig
from ucm.doctor.findings import Finding, fine, note, refused, warning, wrong
from ucm.settings import size_text
from ucm.stores.slab import SlabLook

__all__ = ["check_place", "within"]

_PAGE: Final = 4096
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
    yield from _check_room(config, seen)
    yield from _check_huge_pages(config, seen)
    if seen.data_bytes:
        yield from _check_slab(config, seen, block_bytes)
    elif not seen.problems:
        yield fine("store", f"{config.path} is free for a slab")


def _check_room(config: StoreConfig, seen: SlabLook) -> Iterator[Finding]:
    short = [room for room in seen.rooms if room.left < seen.needed_bytes]
    for room in short:
        is_mount = room.what == "the file system"
        where = f"{seen.mount.place} ({room.what})" if is_mount else room.what
        yield wrong(
            "shared memory" if is_mount else "room",
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
    if is_mount:
        return (
            "Set store.capacity to less, or make the mount larger: docker run "
            "--shm-size, in Kubernetes an emptyDir with medium: Memory and a sizeLimit, "
            f"else mount -o remount,size=... {seen.mount.place}."
        )
    return "Set store.capacity to less, or raise the limit of the container or machine."


def _check_huge_pages(config: StoreConfig, seen: SlabLook) -> Iterator[Finding]:
    place, options = seen.mount.place, seen.mount.options
    is_given = "huge=" in options or seen.may_collapse
    if config.huge_pages is HugePages.AUTO and not is_given:
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


def within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return what a call answers, None if it does not in time: a mount may hang."""
    answers: list[_T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
