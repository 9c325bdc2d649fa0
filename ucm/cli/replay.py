# SPDX-License-Identifier: Apache-2.0
"""``ucm replay``: what a store would find of a recorded load, by capacity and policy."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.telling import SIZE, examples, plain, progress
from ucm.replay.policies import POLICIES
from ucm.replay.replaying import replay as replay_trace
from ucm.replay.replaying import usual_capacities
from ucm.replay.traces import read

__all__ = ["replay"]

_POLICIES = ("ours", "lru", "optimal")
_MOST_BLOCKS = 5_000_000


@click.command(
    epilog=examples(
        "ucm replay requests.jsonl",
        "ucm replay requests.jsonl --capacity 100GiB --capacity 1TiB --block-bytes 64MiB",
    )
)
@click.argument("trace", type=click.Path(readable=False, path_type=Path))
@click.option(
    "--capacity",
    type=SIZE,
    multiple=True,
    help="A size of the store; ten shares of all blocks if left out.",
)
@click.option(
    "--block-bytes", type=SIZE, help="Bytes of one block of the trace on all ranks."
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens of one hash id.",
)
@click.option(
    "--policy",
    type=click.Choice([*POLICIES]),
    multiple=True,
    default=_POLICIES,
    show_default=True,
    help="Who is kept: ours is the slab's, optimal knows the future.",
)
@click.option(
    "--most-blocks",
    type=click.IntRange(1),
    default=_MOST_BLOCKS,
    show_default=True,
    help="Refuse a trace with more: it is kept in memory, at about 200 bytes a block.",
)
@json_option
def replay(
    trace: Path,
    *,
    capacity: Sequence[int],
    block_bytes: int | None,
    block_tokens: int,
    policy: Sequence[str],
    most_blocks: int,
    as_json: bool,
) -> None:
    """
    Tell which share of a trace's tokens a store of each capacity would have found.

    TRACE has a JSON object a line: timestamp in milliseconds, input_length in tokens and
    hash_ids, one number for each block of the prompt; equal numbers are equal blocks behind
    equal blocks. Time is virtual. Exit code 3 if it is no such file.
    """
    if capacity and not block_bytes:
        raise click.UsageError("--capacity needs --block-bytes, the bytes of one block")
    if any(each < (block_bytes or 0) for each in capacity):
        raise click.UsageError("--capacity holds no block of --block-bytes")
    with progress("read", trace.stat().st_size) as tell:
        loaded = read(trace, block_tokens, most_blocks, tell)
    sizes = sorted({each // (block_bytes or 1) for each in capacity})
    sizes = sizes or usual_capacities(loaded)
    names = list(dict.fromkeys(policy))
    done = itertools.count(1)
    with progress("replayed", len(sizes) * len(names), is_bytes=False) as tell:
        found = replay_trace(loaded, sizes, names, lambda _: tell(next(done)))
    if as_json:
        say_json(found)
    else:
        _print(found, names)


def _print(found: dict[str, Any], names: Sequence[str]) -> None:
    rows: dict[int, list[str]] = {}
    for row in found["rows"]:
        cells = rows.setdefault(
            row["capacity_blocks"], [f"{row['share_percent']:.3g} %"]
        )
        cells.append(f"{row['ratio']:.2%}")
    console().print(
        f"{plain(found['trace'])}: {found['requests']} requests in {found['seconds']} s, "
        f"{found['distinct_blocks']} blocks of {found['block_tokens']} tokens, "
        f"{found['used_once']:.0%} of them used once",
        markup=False,
    )
    lines = [(blocks, *rest) for blocks, rest in rows.items()]
    console().print(
        table("tokens found, of those asked for", ("blocks", "of all", *names), lines)
    )
