# SPDX-License-Identifier: Apache-2.0
"""``ucm store ls``, ``stat`` and ``verify``: what lies in a slab, and whether it is well."""

import contextlib
import time
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np

from ucm.blocks import BlockKey, KeySpace, PackedKey
from ucm.cli.main import NOT_WELL
from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.store.choose import Choice, Wanted, choosing, hex_bytes
from ucm.cli.telling import SIZE, ago, examples, plain, progress
from ucm.errors import KeyFormatError
from ucm.fates import Fate
from ucm.settings import size_text
from ucm.stores.slab import (
    Blocks,
    ClassFacts,
    ClassSurvey,
    Seen,
    SlabStore,
    SlabSurvey,
    facts_of,
)
from ucm.stores.slab import (
    verify as verify_blocks,
)

__all__ = ["ls", "stat", "verify"]

_HEAD = 17
_LISTED = 1000
_RATE = 1 << 30
_NS = 1e-9

_PATH = click.Path(readable=False, path_type=Path)


@attrs.define
class _Sum:
    """What one key space has."""

    blocks: int = 0
    nbytes: int = 0
    newest_ns: int = 1 << 62
    oldest_ns: int = -(1 << 62)
    sizes: set[int] = attrs.field(factory=set)

    def add(self, blocks: Blocks, slot_bytes: int) -> None:
        """Count some blocks."""
        self.blocks += len(blocks)
        self.nbytes += int(blocks.records["nbytes"].sum())
        self.newest_ns = min(self.newest_ns, int(blocks.ages_ns.min()))
        self.oldest_ns = max(self.oldest_ns, int(blocks.ages_ns.max()))
        self.sizes.add(slot_bytes)


@click.command(
    epilog=examples(
        "ucm store ls /dev/shm/ucm",
        "ucm store ls /dev/shm/ucm --keys --keyspace 3f2a --limit 20 --json",
    )
)
@click.argument("path", type=_PATH)
@click.option("--keys", "with_keys", is_flag=True, help="List keys, not key spaces.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=100,
    show_default=True,
    help="So many keys.",
)
@choosing
@json_option
def ls(
    path: Path, *, with_keys: bool, limit: int, as_json: bool, wanted: Wanted
) -> None:
    """
    List the key spaces of the slab in PATH: blocks, bytes, share, newest and oldest use.

    Takes no lock, and changes nothing. A key space is what must be equal for blocks to be
    interchangeable: model, weights, layout, engine. Of the newest 64 the text is kept; of
    others there is the digest.
    """
    with SlabSurvey(path) as survey:
        choice = wanted.choose(survey)
        if with_keys:
            _list_keys(survey, choice, limit, as_json=as_json)
        else:
            _list_keyspaces(survey, choice, as_json=as_json)


def _list_keyspaces(survey: SlabSurvey, choice: Choice, *, as_json: bool) -> None:
    known, problem = survey.keyspaces()
    sums: dict[bytes, _Sum] = {}
    for surveyed in survey.classes:
        for blocks in surveyed.blocks():
            _add_up(sums, blocks.where(choice.mask(blocks)), surveyed)
    total = sum(each.nbytes for each in sums.values())
    rows = [
        _row_of(head, each, known.get(head[1:]), total)
        for head, each in sorted(sums.items(), key=lambda item: -item[1].nbytes)
    ]
    answer = {
        "path": str(survey.path),
        "blocks": sum(each.blocks for each in sums.values()),
        "nbytes": total,
        "problem": problem,
        "keyspaces": rows,
    }
    if as_json:
        say_json(answer)
        return
    columns = ("key space", "model", "blocks", "bytes", "share", "newest", "oldest")
    cells = [
        (
            row["digest"][:16] or "(other)",
            plain(str(row["model"] or "?")),
            row["blocks"],
            size_text(row["nbytes"]),
            f"{row['share']:.1%}",
            ago(row["newest_age_s"]),
            ago(row["oldest_age_s"]),
        )
        for row in rows
    ]
    console().print(table("", columns, cells) if rows else "no blocks")
    if problem:
        click.echo(f"no texts: {plain(problem)}", err=True)


def _add_up(sums: dict[bytes, _Sum], blocks: Blocks, surveyed: ClassSurvey) -> None:
    if not len(blocks):
        return
    heads = np.ascontiguousarray(blocks.fields[:, :_HEAD]).view(f"V{_HEAD}")[:, 0]
    kinds, whose = np.unique(heads, return_inverse=True)
    for number, head in enumerate(kinds.tolist()):
        part = blocks.where(whose == number)
        sums.setdefault(head, _Sum()).add(part, surveyed.geometry.slot_bytes)


def _row_of(
    head: bytes, found: _Sum, text: KeySpace | None, total: int
) -> dict[str, Any]:
    return {
        "digest": head[1:].hex(),
        "model": text.model if text else None,
        "blocks": found.blocks,
        "nbytes": found.nbytes,
        "share": found.nbytes / total if total else 0.0,
        "newest_age_s": round(found.newest_ns * _NS, 3),
        "oldest_age_s": round(found.oldest_ns * _NS, 3),
        "slot_bytes": sorted(found.sizes),
        "keyspace": attrs.asdict(text) if text else None,
    }


def _list_keys(
    survey: SlabSurvey, choice: Choice, limit: int, *, as_json: bool
) -> None:
    rows: list[dict[str, Any]] = []
    total = 0
    for surveyed in survey.classes:
        for blocks in surveyed.blocks():
            found = blocks.where(choice.mask(blocks))
            total += len(found)
            rows += [
                _key_row(found, at) for at in range(min(len(found), limit - len(rows)))
            ]
    answer = {"path": str(survey.path), "keys": rows, "num_keys": total}
    if as_json:
        say_json(answer)
        return
    for row in rows:  # no table: a key must not be cut
        click.echo(f"{row['key']}  {row['nbytes']} B  {ago(row['age_s'])}")
    if total > len(rows):
        click.echo(f"{len(rows)} of {total}: see --limit", err=True)


def _key_row(blocks: Blocks, at: int) -> dict[str, Any]:
    return {
        "key": blocks.key(at).hex(),
        "nbytes": int(blocks.records["nbytes"][at]),
        "age_s": round(int(blocks.ages_ns[at]) * _NS, 3),
    }


# -- stat --------------------------------------------------------------------------


@click.command(epilog=examples("ucm store stat /dev/shm/ucm"))
@click.argument("path", type=_PATH)
@click.option("--key", help="Of one block instead: its packed key in hex.")
@json_option
def stat(path: Path, *, key: str | None, as_json: bool) -> int:
    """
    Tell how the slab in PATH is doing: occupancy, classes, extents, memory, locks, users.

    With --key it tells of one block where it is and when it was used; 1 is the exit code
    if it is not stored.
    """
    with SlabSurvey(path) as survey:
        if key is not None:
            return _stat_key(survey, hex_bytes(key, "key"), as_json=as_json)
        facts = facts_of(survey)
    if as_json:
        say_json(attrs.asdict(facts))
        return 0
    lines = [
        (
            f"{facts.path}: {size_text(facts.data_bytes)} of memory, "
            f"{'in use' if facts.is_in_use else 'used by nobody'}"
        ),
        (
            f"{facts.extents} extents of {size_text(facts.extent_bytes)}: "
            f"{facts.populated_extents} have their memory "
            f"({size_text(facts.populated_bytes)}), {facts.unowned_extents} are nobody's"
        ),
        f"{facts.keyspaces} key spaces described {plain(facts.problem)}",
    ]
    lines += [
        f"the lock of the {name} is held by process {', '.join(map(str, holders))}"
        for name, holders in facts.locked_by.items()
        if holders
    ]
    for each in facts.classes:
        lines += _lines_of(each)
    console().print("\n".join(lines), markup=False)
    return 0


def _lines_of(each: ClassFacts) -> list[str]:
    share = each.committed_blocks / max(1, each.slots)
    lines = [
        "",
        (
            f"slots of {size_text(each.slot_bytes)}: {each.slots} in {each.extents} extents, "
            f"{each.committed_blocks} blocks ({share:.1%}, {size_text(each.block_bytes)}), "
            f"{each.reserved_slots} being written, {each.free_slots} free"
        ),
        (
            f"  {each.users} users; {each.retained_blocks} blocks retained, "
            f"{each.evicted_blocks_total} evicted, {each.curbed_blocks_total} curbed, "
            f"{each.over_share_blocks_total} over a share, since it was made"
        ),
    ]
    if each.num_tenants:
        most = ", ".join(f"{place}: {slots}" for place, slots in each.tenants)
        lines.append(f"  {each.num_tenants} tenants; by place, slots: {most}")
    if each.dead_writers:
        lines.append(
            f"  {each.reserved_by_dead} slots of {len(each.dead_writers)} that died; the "
            "next to open it frees them, and so does: ucm store compact"
        )
    if each.locked_by:
        holders = ", ".join(map(str, each.locked_by))
        lines.append(f"  its lock is held by process {holders}")
    if each.is_unfinished:
        lines.append("  a change is going on, or whoever began it died")
    return lines


def _stat_key(survey: SlabSurvey, key: bytes, *, as_json: bool) -> int:
    choice = Choice(keys=(key,))
    for surveyed in survey.classes:
        for blocks in surveyed.blocks():
            found = blocks.where(choice.mask(blocks))
            if len(found):
                _tell_key(_facts_of_key(surveyed, found), as_json=as_json)
                return 0
    _tell_key({"key": key.hex(), "state": "absent"}, as_json=as_json)
    return NOT_WELL


def _facts_of_key(surveyed: ClassSurvey, found: Blocks) -> dict[str, Any]:
    record, slot = found.records[0], int(found.slots[0])
    told: dict[str, Any] = _key_row(found, 0) | {
        "state": "committed",
        "slot": slot,
        "slot_bytes": surveyed.geometry.slot_bytes,
        "extent": slot // surveyed.geometry.slots_per_extent,
        "generation": int(record["generation"]),
        "checksum": f"{int(record['checksum']):016x}",
        "tenant_place": int(found.places[0]),
        "retained": bool(found.ages_ns[0] < 0),
    }
    with contextlib.suppress(KeyFormatError):
        told |= BlockKey.unpack(found.key(0)).explain()
    return told


def _tell_key(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say_json(told)
    else:
        console().print(
            "\n".join(f"{name}: {value}" for name, value in told.items()), markup=False
        )


# -- verify ------------------------------------------------------------------------


@click.command(epilog=examples("ucm store verify /dev/shm/ucm --rate 500MiB"))
@click.argument("path", type=_PATH)
@click.option(
    "--rate",
    type=SIZE,
    default=_RATE,
    help="Bytes per second at most.  [default: 1GiB]",
)
@click.option("--forget", is_flag=True, help="Forget the blocks that are damaged.")
@json_option
def verify(path: Path, *, rate: int, forget: bool, as_json: bool) -> int:
    """
    Compare every block of the slab in PATH with its checksum.

    Takes no lock; engines go on. Exit code 1 if a block is damaged: it would have been
    found by whoever loads it, too. With --forget damaged blocks are gone.
    """
    seen, began = Seen(), time.monotonic()
    listed: list[dict[str, str]] = []
    num_damaged = num_forgotten = 0
    with SlabSurvey(path) as survey, contextlib.ExitStack() as stack:
        total = sum(each.block_bytes for each in facts_of(survey).classes)
        tell = stack.enter_context(progress("verified", total))
        stores = [
            stack.enter_context(
                SlabStore.join(
                    path, block_bytes=each.geometry.slot_bytes, index_only=True
                )
            )
            for each in (survey.classes if forget else ())
        ]

        def wait(seconds: float) -> None:
            tell(seen.nbytes)
            time.sleep(min(seconds, 0.1))

        for wrong in verify_blocks(survey, seen, rate, wait):
            num_damaged += 1
            if len(listed) < _LISTED:
                listed.append({"key": wrong.key.hex(), "problem": str(wrong)})
            for store in stores:  # who has saved it again meanwhile saves it once more
                num_forgotten += store.forget([PackedKey(wrong.key)], Fate.CORRUPT)
    answer = {
        "path": str(path),
        "blocks": seen.blocks,
        "nbytes": seen.nbytes,
        "gone": seen.gone,
        "num_damaged": num_damaged,
        "forgotten": num_forgotten,
        "seconds": round(time.monotonic() - began, 3),
        "damaged": listed,
    }
    if as_json:
        say_json(answer)
    else:
        lines = [each["problem"] for each in listed]
        lines.append(
            f"{seen.blocks} blocks, {size_text(seen.nbytes)}: {num_damaged} damaged, "
            f"{num_forgotten} of them forgotten, {seen.gone} gone meanwhile"
        )
        console().print("\n".join(lines), markup=False)
    return NOT_WELL if num_damaged else 0
