# SPDX-License-Identifier: Apache-2.0
"""``ucm keys``: what a key says, and why two engines find nothing of each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

from ucm.blocks import KeySpace
from ucm.cli.main import NOT_WELL
from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.telling import examples
from ucm.configuration.files import read_text
from ucm.doctor.keys import (
    MEANINGS,
    differences,
    parse_key,
    parse_keyspace,
    pick,
)
from ucm.errors import KeyFormatError, StoreUnavailableError
from ucm.stores.slab import SlabSurvey

__all__ = ["keys"]


def _store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a subcommand take slabs whose key spaces it knows."""
    return click.option(
        "--store",
        "stores",
        multiple=True,
        metavar="PATH",
        help="Directory of a slab; may be given several times.",
    )(command)


@click.group(no_args_is_help=False)
def keys() -> None:
    """Explain keys and compare key spaces."""


@keys.command(
    name="explain",
    epilog=examples("ucm keys explain 0267c1...9a --store /dev/shm/ucm"),
)
@click.argument("key")
@_store_option
@json_option
def _explain(key: str, stores: tuple[str, ...], *, as_json: bool) -> int:
    """
    Say what each part of KEY, in hexadecimal digits, means.

    With --store also the key space, if a slab there describes it.

    Exit codes: 0 explained, 1 no store describes its key space, 2 it is no key,
    3 a store cannot be read.
    """
    try:
        parsed = parse_key(key)
    except KeyFormatError as exc:
        raise click.BadParameter(str(exc), param_hint="KEY") from exc
    keyspace = _known(stores).get(parsed.keyspace_digest)
    if as_json:
        say_json(parsed.explain(keyspace))
    else:
        _show_key(parsed.explain(), keyspace)
    if stores and keyspace is None:
        if not as_json:
            click.echo("No store that was named describes its key space.")
        return NOT_WELL
    return 0


def _show_key(told: dict[str, object], keyspace: KeySpace | None) -> None:
    rows = [(name, str(value)) for name, value in told.items()]
    console().print(table("", ("part", "value"), rows))
    if keyspace is not None:
        fields = attrs.asdict(keyspace)
        described_as = [(f, str(fields[f]), MEANINGS[f]) for f in fields]
        console().print(table("Key space", ("field", "value", "is"), described_as))


@keys.command(
    name="diff", epilog=examples("ucm keys diff 67c1 8f02 --store /dev/shm/ucm")
)
@click.argument("first")
@click.argument("second")
@_store_option
@json_option
def _diff(first: str, second: str, stores: tuple[str, ...], *, as_json: bool) -> int:
    """
    Say in which fields the key spaces FIRST and SECOND differ.

    Each is a JSON file (a slab has them in keyspaces/), the beginning of a digest that a
    --store describes, or a key.

    Exit codes: 0 they are equal, 1 they differ, 2 one is not known, 3 a file or store
    cannot be read.
    """
    known = _known(stores)
    one, other = (_keyspace(name, known) for name in (first, second))
    found = differences(one, other)
    if as_json:
        digests = {"first": one.digest.hex(), "second": other.digest.hex()}
        say_json({**digests, "differences": [attrs.asdict(each) for each in found]})
    elif not found:
        click.echo("They are equal: what one stores the other finds.")
    else:
        rows = [attrs.astuple(each) for each in found]
        columns = ("field", "first", "second", "is")
        console().print(table("They differ", columns, rows))
    return NOT_WELL if found else 0


def _known(stores: tuple[str, ...]) -> dict[bytes, KeySpace]:
    known: dict[bytes, KeySpace] = {}
    for path in stores:
        with SlabSurvey(Path(path)) as survey:
            found, problem = survey.keyspaces()
        if problem:
            raise StoreUnavailableError(problem)
        known |= found
    return known


def _keyspace(name: str, known: dict[bytes, KeySpace]) -> KeySpace:
    found = pick(name, known)
    if found is not None:
        return found
    if not name.endswith(".json"):
        digests = ", ".join(digest.hex()[:8] for digest in known)
        raise click.UsageError(
            f"{name!r} is no .json file, nor 4 digits or more that only one begins with of "
            + (digests if known else "none: name a slab with --store")
        )
    text = read_text(Path(name), key="key space")
    try:
        return parse_keyspace(text)
    except KeyFormatError as exc:
        raise StoreUnavailableError(f"{name}: {exc}") from exc
