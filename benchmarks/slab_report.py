# SPDX-License-Identifier: Apache-2.0
"""
Writes ``docs/slab.md`` from what ``slab_scale``, ``slab_crash`` and ``slab_soak`` found.

Run ``python -m benchmarks.slab_report``; nothing is measured.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report import RESULTS, ROOT
from ucm.stores.slab._layout import MOST

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "slab.md"

_HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
# The slab at size

What a slab costs an operator who gives it a terabyte, and what was done to it. How it is
made: decisions [2](decisions/0002-slab-index.md), [14](decisions/0014-extents.md) and
[15](decisions/0015-who-is-kept.md). This page is written by `python -m
benchmarks.slab_report`.

## Size

`python -m benchmarks.slab_scale`: the index alone; the data are simulated, since no machine at
hand has so much. CPU time of one thread in milliseconds. *Repair* is what the next user pays when
a process died amid a change of {most} slots, *rebuild* when nobody knows amid which.
*Evict* makes room for so many blocks, *scattered* when the oldest lie anywhere. *Lock* is the
longest time for which the index was locked, by anything but a rebuild.

"""

_START = """
## Start

`python -m benchmarks.slab_start`: ranks that start together, each a process. A rank serves when
a block can be reserved; behind that all memory is populated, once for all of them. Beside it
stands what the kernel takes to populate a file of that size in one call. A rank that maps
{capacity} GiB has {tables:.0f} MiB of page tables where memory comes in pages of 4 KiB, so that
eight ranks on a slab of 1 TiB have {terabyte:.0f} GiB of them; in huge pages a five-hundredth. Linux 6.1 and later
makes huge pages of a slab's memory as it comes, where it finds some, also on a mount without
(`MADV_COLLAPSE`); it takes the longer the more memory lies in pieces.

"""

_DEATHS = """
## Deaths and damage

`python -m benchmarks.slab_crash --kills 500`: users of a slab are killed (`kill -9`) before
every line that changes it, spread over all lines, and at random while the directory is damaged;
then everybody who is left, and whoever comes next, compares every byte. A file that is shortened
under a copy ends the process that copies (`SIGBUS`), as documented; the next one refuses such a
slab by name.

"""

_CROWD = """
## A crowd

`python -m benchmarks.slab_soak`: {writers} processes that save and {readers} that load, with eviction
all the time, one of them killed each second, every byte of every load compared.

"""


def page(found: Mapping[str, Any]) -> str:
    """
    Return the page.

    Args:
        found: By name of the benchmark, what it wrote.
    """
    soak, start = found["slab_soak"], found["slab_start"]
    tables = start["page_tables_kib"]
    return "".join(
        (
            _HEAD.format(most=MOST),
            _table(_SCALE, map(_of_scale, found["slab_scale"]["results"])),
            _START.format(
                capacity=start["capacity_gib"],
                tables=tables / 1024,
                terabyte=8 * 1024 / start["capacity_gib"] * tables / (1 << 20),
            ),
            _table(_BEGUN, [_of_start(start)]),
            _DEATHS,
            _table(_CRASH, map(_of_crash, found["slab_crash"])),
            _CROWD.format(writers=soak["writers"], readers=soak["readers"]),
            _table(("what", "how many"), ((name, _whole(soak[name])) for name in soak)),
        )
    )


_SCALE = (
    *(
        "slots of",
        "capacity",
        "slots",
        "index, MiB",
        "create",
        "join",
        "look up 1000, p99",
    ),
    *("evict 1", "32", "4096", "32 scattered", "repair", "rebuild", "clear", "lock"),
)
_BEGUN = (
    "capacity, GiB",
    "ranks",
    "serves, s",
    "all memory, s",
    "kernel alone, s",
    "ratio",
)
_CRASH = (
    *("what was killed", "kills", "wrong bytes", "lost", "left behind", "cannot save"),
    *("ended by SIGBUS", "refused by name", "failed otherwise"),
)


def _of_scale(row: Mapping[str, Any]) -> list[str]:
    times = (
        *("create", "join", "look_up_1000_p99", "evict_1", "evict_32", "evict_4096"),
        *("evict_32_scattered", "repair", "rebuild", "clear", "longest_lock"),
    )
    return [
        *(row["slot"], row["capacity"], _whole(row["slots"])),
        f"{row['index_bytes'] / 2**20:.0f}",
        *(_ms(row.get(f"{name}_ms")) for name in times),
    ]


def _of_start(row: Mapping[str, Any]) -> list[str]:
    names = ("serves_s", "all_memory_s", "kernel_alone_s")
    times = (" / ".join(f"{each:.3g}" for each in row[name]) for name in names)
    return [str(row["capacity_gib"]), str(row["ranks"]), *times, f"{row['ratio']:.2f}"]


def _of_crash(row: Mapping[str, Any]) -> list[str]:
    names = (
        *("kills", "wrong bytes", "lost", "left behind", "cannot save"),
        *("bus errors", "refused", "failed"),
    )
    return [row["case"], *(str(row.get(name, "")) for name in names)]


def _ms(value: float | None) -> str:
    if value is None:
        return "too small"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _whole(value: object) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read() -> dict[str, Any]:
    """Return what is committed."""
    names = ("slab_scale", "slab_crash", "slab_soak", "slab_start")
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}


if __name__ == "__main__":
    PAGE.write_text(page(read()))
