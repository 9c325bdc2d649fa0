# SPDX-License-Identifier: Apache-2.0
"""
The texts of key spaces beside a slab's blocks: for people, and bounded.

Each reset of an engine's weights makes a new key space, so the newest are kept only.
Nothing but ``Store.keyspaces`` reads them.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator

import attrs
import msgspec

from ucm.blocks import KeySpace
from ucm.decoding import DECODE_ERRORS
from ucm.errors import (
    ConfigError,
    KeyFormatError,
    StoreError,
    StoreUnavailableError,
)
from ucm.stores.slab._files import Directory

__all__ = ["describe", "read_all"]

_NAME = "keyspaces"
_MOST_FILES = 64


def describe(directory: Directory, keyspace: KeySpace) -> None:
    """
    Keep one text, as the newest, all of it or nothing.

    Raises:
        StoreUnavailableError: It cannot be written.
    """
    name = f"{keyspace.digest.hex()}.json"
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_NAME, 0o700, dir_fd=directory.fd)
        with _entered(directory) as inner:
            try:
                inner.write(temporary, msgspec.json.encode(attrs.asdict(keyspace)))
                inner.rename(temporary, name)
            finally:
                inner.remove(temporary)
            inner.remove(*_superfluous(inner, name))
    except (OSError, ConfigError) as exc:
        raise StoreUnavailableError(f"{name} cannot be written: {exc}") from exc


def read_all(directory: Directory) -> dict[bytes, KeySpace]:
    """
    Return every key space that is kept, by digest.

    Raises:
        StoreError: A file is damaged, or named after another key space.
        StoreUnavailableError: A file cannot be read.
    """
    found = {}
    try:
        with _entered(directory) as inner:
            for name in inner.names():
                path = inner.root / name
                if path.suffix != ".json":
                    continue
                with contextlib.suppress(FileNotFoundError):  # no longer the newest
                    keyspace = msgspec.json.decode(inner.read(name), type=KeySpace)
                    if keyspace.digest.hex() != path.stem:
                        raise StoreError(f"{path} is named after another; remove it")
                    found[keyspace.digest] = keyspace
    except FileNotFoundError:
        return {}
    except (OSError, ConfigError) as exc:
        raise StoreUnavailableError(f"key spaces cannot be read: {exc}") from exc
    except (*DECODE_ERRORS, KeyFormatError) as exc:
        raise StoreError(f"{path} is no key space; remove it: {exc}") from exc
    return found


@contextlib.contextmanager
def _entered(directory: Directory) -> Iterator[Directory]:
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_NAME, flags, dir_fd=directory.fd)
    try:
        inner = Directory(directory.root / _NAME, fd)
        inner.check()
        yield inner
    finally:
        os.close(fd)


def _superfluous(inner: Directory, newest: str) -> list[str]:
    written = []
    for name in inner.names() - {newest}:
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=inner.fd, follow_symlinks=False)
            written.append((info.st_mtime_ns, name))
    return [name for _, name in sorted(written, reverse=True)[_MOST_FILES - 1 :]]
