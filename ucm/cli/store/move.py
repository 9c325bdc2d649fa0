# SPDX-License-Identifier: Apache-2.0
"""``ucm store export``, ``import`` and ``warm``: blocks into a file, and back."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import click

from ucm.cli.main import NOT_WELL
from ucm.cli.output import console, json_option, say_json, writing
from ucm.cli.store.choose import Wanted, choosing
from ucm.cli.telling import SIZE, examples, progress
from ucm.cli.tidying import tidily
from ucm.errors import ConfigError, StoreError, StoreUnavailableError
from ucm.settings import size_text
from ucm.stores.exports import ExportReader
from ucm.stores.moving import Incoming, Moved, Outgoing
from ucm.stores.slab import SlabStore, SlabSurvey

__all__ = ["export", "import_", "warm"]

_PATH = click.Path(readable=False, path_type=Path)
_FILE = click.Path(readable=False, path_type=Path, allow_dash=True)
_UNBOUNDED = 1 << 62


@click.command(
    epilog=examples(
        "ucm store export /dev/shm/ucm chat.ucmx --keyspace 3f2a81c0",
        "ucm store export /dev/shm/ucm - | ssh other ucm store import - /dev/shm/ucm",
    )
)
@click.argument("path", type=_PATH)
@click.argument("file", type=_FILE)
@choosing
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@json_option
def export(
    path: Path, file: Path, *, wanted: Wanted, force: bool, as_json: bool
) -> int:
    """
    Write blocks of the slab in PATH into FILE, - for standard output; all, unless told.

    Those used last come first. Each block is verified, and travels with its checksum; the
    file has its name only when it is whole, and only its owner may read it. Exit code 1
    if a block was damaged: it is left out.
    """
    with SlabSurvey(path) as survey, _written(file, force=force) as target:
        outgoing = Outgoing(survey, wanted.choose(survey).mask)
        with progress("exported", outgoing.nbytes) as tell:
            moved = outgoing.write(target, lambda so_far: tell(so_far.read_bytes))
    _tell(moved, "written", as_json=as_json, err=_is_dash(file))
    return NOT_WELL if moved.damaged else 0


@click.command("import", epilog=examples("ucm store import chat.ucmx /dev/shm/ucm"))
@click.argument("file", type=_FILE)
@click.argument("path", type=_PATH)
@click.option("--most", type=SIZE, default=_UNBOUNDED, help="So many bytes at most.")
@json_option
def import_(file: Path, path: Path, *, most: int, as_json: bool) -> int:
    """
    Store the blocks of an export, - for standard input, in the slab in PATH.

    What is stored already is passed over: do it again to go on where it was broken off.
    Each block counts as used when it was, and no block goes for one that was used before
    it. Exit code 1 if a block was damaged or found no room.
    """
    with contextlib.ExitStack() as stack:
        reader = _opened(file, stack)
        incoming = Incoming(reader, path, stack, most_bytes=most, evicts=True)
        return _bring(incoming, reader, as_json=as_json)


@click.command(
    epilog=examples(
        "ucm store warm chat.ucmx /dev/shm/ucm --capacity 100GiB",
        "ucm store warm chat.ucmx /dev/shm/ucm --most 10GiB",
    )
)
@click.argument("file", type=_FILE)
@click.argument("path", type=_PATH)
@click.option("--most", type=SIZE, default=_UNBOUNDED, help="So many bytes at most.")
@click.option(
    "--capacity", type=SIZE, help="Make a slab of that size if there is none."
)
@json_option
def warm(
    file: Path, path: Path, *, most: int, capacity: int | None, as_json: bool
) -> int:
    """
    Fill the free room of the slab in PATH with the blocks of an export, before serving.

    Those used last come first, until there is no room or as much as was asked for. Nothing
    that is stored goes. After a start of the machine there is no slab in memory yet: with
    --capacity, the engine's store.capacity, one is made. Exit code 1 if a block was
    damaged; that there was no room for all is well.
    """
    with contextlib.ExitStack() as stack:
        reader = _opened(file, stack)
        if capacity is None and not path.exists():
            raise StoreUnavailableError(f"{path} is not there: --capacity makes a slab")
        if capacity is not None and not (path / "slab.json").exists():
            stack.enter_context(_made(path, capacity, reader))
        incoming = Incoming(reader, path, stack, most_bytes=most, evicts=False)
        return _bring(incoming, reader, as_json=as_json, fills=True)


def _made(path: Path, capacity: int, reader: ExportReader) -> SlabStore:
    """Make a slab as the engine would whose blocks these are."""
    sizes = [each.block_bytes for each in reader.start.sections]
    if not sizes:
        raise StoreError("the export is empty: nobody knows the size of its blocks")
    try:
        return SlabStore(
            path=str(path), capacity_bytes=capacity, block_bytes=max(sizes)
        )
    except ConfigError as exc:
        raise StoreUnavailableError(str(exc)) from exc


def _bring(
    incoming: Incoming, reader: ExportReader, *, as_json: bool, fills: bool = False
) -> int:
    with progress("stored", reader.start.nbytes) as tell:
        moved = incoming.run(lambda so_far: tell(so_far.read_bytes))
    _tell(moved, "stored", as_json=as_json)
    return NOT_WELL if moved.damaged or (moved.no_room and not fills) else 0


def _tell(moved: Moved, what: str, *, as_json: bool, err: bool = False) -> None:
    answer = attrs.asdict(moved, filter=lambda field, _: field.name != "read_bytes")
    if as_json and not err:
        say_json(answer)
        return
    others = {
        "stored before": moved.present,
        "gone meanwhile": moved.gone,
        "damaged": moved.damaged,
        "without room": moved.no_room,
    }
    text = "".join(f", {number} {name}" for name, number in others.items() if number)
    line = f"{moved.blocks} blocks {what}, {size_text(moved.nbytes)}{text}"
    console(stderr=err).print(line)


# -- files -------------------------------------------------------------------------


def _is_dash(file: Path) -> bool:
    return str(file) == "-"


def _opened(file: Path, stack: contextlib.ExitStack) -> ExportReader:
    if _is_dash(file):
        return ExportReader(sys.stdin.buffer, "standard input")
    return ExportReader(stack.enter_context(file.open("rb")), str(file))


@contextlib.contextmanager
def _written(file: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name when all of it is written."""
    if _is_dash(file):
        if sys.stdout.isatty():  # it would obey what happens to stand in a block
            raise click.UsageError("standard output is a terminal: name a file")
        yield sys.stdout.buffer
        return
    if file.exists() and not file.is_file():  # a device would be gone for everybody
        raise click.UsageError(f"{file} is no plain file; - is standard output")
    if not force and os.path.lexists(file):
        raise click.UsageError(f"{file} is there; --force replaces it")
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with tidily():
        try:
            fd = os.open(temporary, flags, 0o600)
        except OSError as exc:  # that name nobody has given
            raise OSError(exc.errno, exc.strerror, str(file.parent)) from exc
        try:
            with writing(file), open(fd, "wb", buffering=1 << 20) as target:
                yield target
                target.flush()
                os.fsync(fd)
            temporary.replace(file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
