# SPDX-License-Identifier: Apache-2.0
"""``ucm store rm`` and ``compact``: forgetting blocks, and giving back what is not needed."""

from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from ucm.agent.parting import Parting
from ucm.blocks import PackedKey
from ucm.cli.main import NOT_WELL
from ucm.cli.output import console, json_option, say_json
from ucm.cli.store.choose import Choice, Wanted, choosing
from ucm.cli.telling import examples, plain, progress
from ucm.settings import size_text
from ucm.stores.slab import Blocks, ClassSurvey, SlabStore, SlabSurvey
from ucm.stores.slab import compact as compact_slab

__all__ = ["compact", "rm"]

_PATH = click.Path(readable=False, path_type=Path)


@click.command(
    epilog=examples(
        "ucm store rm /dev/shm/ucm --keyspace 3f2a81c0 --dry-run",
        "ucm store rm /dev/shm/ucm --keyspace 3f2a81c0 --prompt ids.json --tiers --yes",
    )
)
@click.argument("path", type=_PATH)
@choosing
@click.option("--all", "takes_all", is_flag=True, help="Everything.")
@click.option(
    "--tiers",
    "in_tiers",
    is_flag=True,
    help="Take them from the tiers of the slab's agent, too; from shared ones for all machines.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def rm(
    path: Path,
    *,
    takes_all: bool,
    in_tiers: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    wanted: Wanted,
) -> int:
    """
    Forget blocks of the slab in PATH; asks before it does.

    Engines go on: what they are about to load and is gone they compute. Several options
    of one kind add up; those of different kinds must all be true of a block. What is
    saved meanwhile may stay. Tiers keep what they have, and who wants it has it fetched again, unless
    --tiers is given: then exit code 1 says that tiers may have some of them yet. What only tiers have is
    not looked for.
    """
    with SlabSurvey(path) as survey:
        choice = wanted.choose(survey)
        if choice.is_all != takes_all:
            raise click.UsageError(
                "say which blocks, with --key, --prefix, --keyspace or --prompt, or --all"
            )
        matched, nbytes = _count(survey, choice)
        forgotten, parting = 0, Parting(survey.path)
        had_agent = parting.had_agent
        has_tiers = had_agent and in_tiers
        if matched and not dry_run:
            if not yes:
                what = f"Forget {matched} blocks, {size_text(nbytes)}"
                what += ", in tiers too" if has_tiers else ""
                click.confirm(f"{what}? (--yes does not ask)", abort=True, err=True)
            told = parting if has_tiers else None
            forgotten = _forget(survey, choice, matched, told)
    answer = {
        "path": str(path),
        "matched": matched,
        "nbytes": nbytes,
        "forgotten": forgotten,
        "dry_run": dry_run,
        "tiers": _told_of(parting) if has_tiers else None,
    }
    if as_json:
        say_json(answer)
    else:
        said = "none forgotten" if dry_run else f"{forgotten} forgotten"
        lines = [f"{matched} blocks, {size_text(nbytes)}: {said}"]
        if has_tiers:
            lines += _lines_of(parting, dry_run=dry_run)
        elif had_agent:
            lines += ["tiers may have them as well: --tiers takes them from there, too"]
        console().print("\n".join(lines), markup=False)
    return NOT_WELL if parting.kept or parting.unasked else 0


def _told_of(parting: Parting) -> dict[str, object]:
    """Return what became of blocks in tiers, for programs."""
    return {
        "forgotten": parting.forgotten,
        "unasked": parting.unasked,
        "kept": sorted(parting.kept),
        "problem": parting.problem,
    }


def _lines_of(parting: Parting, *, dry_run: bool) -> list[str]:
    """Return that for people."""
    if dry_run:
        return ["tiers are asked to forget them, too, by the slab's agent"]
    lines = [f"tiers had {parting.forgotten} of them, and have these no more"]
    if parting.kept:
        names = ", ".join(map(plain, sorted(parting.kept)))
        lines.append(f"may have some of the others yet: {names}")
    if parting.unasked:
        lines.append(
            f"tiers may have {parting.unasked} of them yet: no agent has answered"
            f" ({plain(parting.problem)}); once one runs, a request of its engine that"
            ' says "forget" takes them from there'
        )
    return lines


def _chosen(surveyed: ClassSurvey, choice: Choice) -> Iterator[Blocks]:
    for blocks in surveyed.blocks():
        found = blocks.where(choice.mask(blocks))
        if len(found):
            yield found


def _count(survey: SlabSurvey, choice: Choice) -> tuple[int, int]:
    matched = nbytes = 0
    for surveyed in survey.classes:
        for found in _chosen(surveyed, choice):
            matched += len(found)
            nbytes += int(found.records["nbytes"].sum())
    return matched, nbytes


def _forget(
    survey: SlabSurvey, choice: Choice, total: int, parting: Parting | None
) -> int:
    forgotten = 0
    with progress("forgotten", total, is_bytes=False) as tell:
        for surveyed in survey.classes:
            slot_bytes = surveyed.geometry.slot_bytes
            with SlabStore.join(
                survey.path, block_bytes=slot_bytes, index_only=True
            ) as store:
                for found in _chosen(surveyed, choice):
                    keys = [PackedKey(found.key(at)) for at in range(len(found))]
                    forgotten += store.forget(keys)
                    if (
                        parting is not None
                    ):  # behind the slab, or they are spilled again
                        parting.forget(keys, slot_bytes)
                    tell(forgotten)
    return forgotten


@click.command(epilog=examples("ucm store compact /dev/shm/ucm"))
@click.argument("path", type=_PATH)
@click.option("--memory", is_flag=True, help="Give memory back to the system, too.")
@json_option
def compact(path: Path, *, memory: bool, as_json: bool) -> int:
    """
    Give back what nobody needs of the slab in PATH; no block goes or moves.

    Slots that writers reserved who died are free again, and extents without a block are
    nobody's, so that another model has them at once. With --memory what nobody has goes
    back to the system, unless the slab is in use: a device may have its memory pinned. The
    next engine to start gets it again. Exit code 1 if memory was to go back, and did not.
    """
    done = compact_slab(path, memory=memory)
    code = NOT_WELL if done.kept_because else 0
    if as_json:
        say_json({"path": str(path)} | attrs.asdict(done))
        return code
    lines = [
        f"{done.slots} slots of the dead, {done.extents} extents without a block"
        if done.slots or done.extents
        else "nothing to give back"
    ]
    if memory:
        lines.append(
            f"no memory went back: {plain(done.kept_because)}"
            if done.kept_because
            else f"{size_text(done.nbytes)} of memory went back to the system"
        )
    console().print("\n".join(lines), markup=False)
    return code
