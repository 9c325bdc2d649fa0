# SPDX-License-Identifier: Apache-2.0
"""
What lies below the slab, beside what it stands on.

*Spill* is what an agent's core takes from blocks that are committed in a slab in memory until
all of them are in the tier; *fetch* is what one request's want takes until all of them are in
the slab, compared with their checksums. *Bare* is the client's own library, or plain direct
I/O, with as many requests in flight, from and to slots of the same slab; it computes no
checksums. *Hashed* computes one of each block besides: nobody does less who stores no block that
was damaged and shows none. LMCache and vLLM's tier of files take part where they have such a tier
(``benchmarks.tiers_peers``). *Files* are fetched (not for TTFT) from the drive, as from a mount what
other machines have put; *page cache* from this machine's own, where there is nothing but copies to be
measured. Files are written, in each sample, to a folder that no sample before has deleted anything from or
beside (``benchmarks.tiers_folders``), and in which, where a side has folders below it, these are: as in a
tier that has been in use. All run in one process, in turns, forwards and backwards; servers have processes of their own on the same cores. What
the process computed meanwhile is told apart: it does not depend on who else computes. Mooncake runs in a
network of its own.

*start*: how long a disk takes to open, by how it was left. *TTFT*: the real engine's time to the
first token of one prompt, computed, from the slab, and from each tier with an empty slab; a
process each for engine, scheduler and agent. *dead*: steps of an engine full of decoding
requests, whose only tier is a server that was stopped, beside engines without tiers and without
us.

Run ``python -m benchmarks.tiers``.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks import tiers_bare
from benchmarks.harness import Figure, Note, Scale, Told, main
from benchmarks.peers import PeersError, interpreter
from benchmarks.tiers_engine import TTFT, dead, first_tokens
from benchmarks.tiers_folders import folder_in
from benchmarks.tiers_moves import Blocks, Medium, measure
from benchmarks.tiers_start import start
from tests.backends.mooncake_kit import why_not

__all__ = ["CASES"]

_Opener = Callable[[Path, Blocks], AbstractContextManager[Medium]]
KB = 1024
SIZES = {"64 KB": 64 * KB, "256 KB": 256 * KB, "1 MB": KB * KB, "4 MB": 4 * KB * KB}
DEPTHS = (1, 4, 16, 64)
_INSIDE = "inside"


def move(name: str, opener: _Opener, total: int, scale: Scale) -> Told:
    """Measure one kind of tier with blocks of several sizes."""
    sizes = {"256 KB": SIZES["256 KB"]} if scale.is_quick else SIZES
    for text, nbytes in sizes.items():
        yield from move_size(name, opener, total, nbytes, f"{name}, {text}", scale)


def move_size(
    name: str, opener: _Opener, total: int, nbytes: int, case: str, scale: Scale
) -> Told:
    """Measure one kind of tier with blocks of one size."""
    total //= 8 if scale.is_quick else 1
    blocks = Blocks(max(8, total // nbytes), nbytes)
    with folder_in(scale.directory) as home, opener(home, blocks) as medium:
        yield from measure(medium, blocks, case, scale)


def depths(scale: Scale) -> Told:
    """Measure a disk with more and fewer requests in flight."""
    for depth in DEPTHS[1:2] if scale.is_quick else DEPTHS:
        opener = functools.partial(tiers_bare.disk, depth=depth)
        for text in ("64 KB", "1 MB")[: 1 if scale.is_quick else 2]:
            case = f"disk, {text}, depth {depth}"
            yield from move_size("disk", opener, 128 << 20, SIZES[text], case, scale)


def mooncake(scale: Scale) -> Told:
    """Measure Mooncake in a network of its own, if it runs here."""
    with tempfile.TemporaryDirectory(prefix="ucm-mooncake-") as home:
        problem, environment = why_not(Path(home))
        if problem:
            yield Note("mooncake", f"absent, {problem}; no figure.")
            return
        python = ["unshare", "-rn", sys.executable, "-m", "tests.own_network"]
        yield from _inside("mooncake", python, scale, environment)


def beside_peers(name: str, scale: Scale) -> Told:
    """Measure one kind of tier where LMCache is installed; without it where it cannot be."""
    python = sys.executable
    try:
        python = str(interpreter())
    except PeersError as exc:
        yield Note(name, f"LMCache is absent, {exc}; no figure.")
    yield from _inside(name, [python, "-m"], scale)


def _inside(
    name: str,
    python: Sequence[str],
    scale: Scale,
    environment: Mapping[str, str] | None = None,
) -> Told:
    """Measure cases in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="ucm-inside-") as home:
        told = Path(home) / "told.json"
        command = [*python, "benchmarks.tiers", _INSIDE, "--only", name]
        command += ["--json", str(told)]
        command += ["--quick"] if scale.is_quick else []
        with folder_in(scale.directory) as directory:
            done = subprocess.run(
                [*command, "--directory", str(directory)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            yield Note(name, f"failed: {done.stderr.strip()[-300:]}")
            return
        yield from figures_of(told)


def figures_of(path: Path) -> Iterator[Figure]:
    """Yield the figures of a results file."""
    for each in json.loads(path.read_text(encoding="utf-8"))["figures"]:
        del each["verdict"]
        yield Figure(**each)


def others(_: Scale) -> Told:
    """Say who is not here."""
    yield Note("others", "FlexKV is not measured: it is not to be had here; no figure.")


CASES: dict[str, Callable[[Scale], Told]] = {
    "disk": functools.partial(beside_peers, "disk"),
    "depth": depths,
    "start": start,
    "files": functools.partial(beside_peers, "files"),
    "page cache": functools.partial(beside_peers, "page cache"),
    "object": functools.partial(move, "object", tiers_bare.objects, 32 << 20),
    "redis": functools.partial(beside_peers, "redis"),
    "mooncake": mooncake,
    **TTFT,
    "dead": dead,
    "others": others,
}
INSIDE: dict[str, Callable[[Scale], Told]] = {
    "disk": functools.partial(move, "disk", tiers_bare.disk, 128 << 20),
    "files": functools.partial(move, "files", tiers_bare.files, 64 << 20),
    "page cache": functools.partial(
        move,
        "page cache",
        functools.partial(tiers_bare.files, is_remembered=True),
        64 << 20,
    ),
    "redis": functools.partial(move, "redis", tiers_bare.redis, 64 << 20),
    "mooncake": functools.partial(move, "mooncake", tiers_bare.mooncake, 64 << 20),
    "mooncake, TTFT": functools.partial(first_tokens, "mooncake", tiers_bare.mooncake),
}


if __name__ == "__main__":
    if sys.argv[1:2] == [_INSIDE]:
        main("tiers", INSIDE, sys.argv[2:])
        sys.stdout.flush()
        os._exit(
            0
        )  # LMCache's threads keep a process, and its ``close`` waits for itself
    else:
        main("tiers", CASES)
