# SPDX-License-Identifier: Apache-2.0
"""``ucm bench``: what memory and disk of this machine give our store, in seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from ucm.cli.measuring import Plan, Row, measure_disk, measure_store, workplace
from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.telling import SIZE, Number, examples, plain
from ucm.settings import size_text
from ucm.stores.slab import is_in_memory

__all__ = ["bench"]

_PAGE = 4096
_US = 1e6


@click.command(
    epilog=examples("ucm bench", "ucm bench /dev/shm /mnt/nvme --block 256KiB --json")
)
@click.argument("paths", nargs=-1, type=click.Path(readable=False, path_type=Path))
@click.option(
    "--block", type=SIZE, default=512 << 10, help="Bytes of a block.  [default: 512KiB]"
)
@click.option(
    "--size",
    "nbytes",
    type=SIZE,
    default=256 << 20,
    help="Bytes that are written, to be read.  [default: 256MiB]",
)
@click.option(
    "--seconds",
    type=Number(0.01, 60.0),
    default=0.5,
    show_default=True,
    help="For each row.",
)
@json_option
def bench(
    paths: Sequence[Path], *, block: int, nbytes: int, seconds: float, as_json: bool
) -> None:
    """
    Measure our store where a path is memory, and reads and writes where it is a disk.

    PATHS are directories, /dev/shm if none is named. All is done in a new directory in
    each, which is removed; no store is touched. Copies, saves and loads are of one thread;
    the figures are this machine's at this moment. Exit code 3 if a path cannot be used.
    """
    rounded = _PAGE * -(-block // _PAGE)
    plan = Plan(rounded, max(nbytes, 64 * rounded), seconds)
    answers = [_measure(path, plan) for path in paths or (Path("/dev/shm"),)]
    if as_json:
        say_json({"block_bytes": rounded, "size": plan.size, "paths": answers})
        return
    for answer in answers:
        _print(answer, rounded)


def _measure(path: Path, plan: Plan) -> dict[str, Any]:
    click.echo(f"measuring in {plain(str(path))}", err=True)
    with workplace(path, plan.size) as folder:
        in_memory = is_in_memory(folder)
        rows: list[Row]
        if in_memory:
            rows, is_direct = list(measure_store(folder, plan)), False
        else:
            rows, is_direct = measure_disk(folder, plan)
    return {
        "path": str(path),
        "kind": "memory" if in_memory else "disk",
        "direct": is_direct,
        "rows": [attrs.asdict(row) for row in rows],
    }


def _print(answer: dict[str, Any], block_bytes: int) -> None:
    title = (
        f"{plain(answer['path'])}: {answer['kind']}, blocks of {size_text(block_bytes)}"
    )
    if answer["kind"] == "disk" and not answer["direct"]:
        title += ", through the kernel's cache (no O_DIRECT here)"
    columns = ("", "depth", "GB/s", "per second", "median us", "99 % below us")
    rows = [
        (
            row["what"],
            row["depth"],
            f"{row['bytes_per_s'] / 1e9:.2f}" if row["bytes_per_s"] else "",
            round(row["operations_per_s"]),
            f"{row['median_s'] * _US:.1f}",
            f"{row['slowest_s'] * _US:.1f}",
        )
        for row in answer["rows"]
    ]
    console().print(title, markup=False)
    console().print(table("", columns, rows))
