# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a slab a subcommand is about: by key, prefix, key space or prompt."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

import attrs
import click
import msgspec
import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace, keyspace_prefix
from ucm.decoding import DECODE_ERRORS
from ucm.errors import KeyFormatError, StoreError
from ucm.prefixes import ALGORITHM, PrefixHasher
from ucm.stores.slab import Blocks, SlabSurvey

__all__ = ["Choice", "Mask", "Wanted", "choosing", "hex_bytes", "keyspace_named"]

_MOST_KEY_BYTES = 85
_HASH_AT = 21
_DIGEST_BYTES = 16
_LEAST_DIGITS = 4
_MOST_PROMPT = 64 << 20

_T = TypeVar("_T")
Mask = npt.NDArray[np.bool_]


@attrs.frozen
class Choice:
    """
    Blocks that satisfy each kind of condition that is given, one of those of a kind.

    Args:
        keys: Packed keys.
        prefixes: Beginnings of them.
        keyspace: The beginning that all keys of one key space have; empty: any.
        hashes: Block hashes, of any group and shard; None: any.
    """

    keys: tuple[bytes, ...] = ()
    prefixes: tuple[bytes, ...] = ()
    keyspace: bytes = b""
    hashes: tuple[bytes, ...] | None = None

    @property
    def is_all(self) -> bool:
        """Whether nothing was said."""
        return self == Choice()

    def mask(self, blocks: Blocks) -> Mask:
        """Return which of these blocks it is about."""
        fields = blocks.fields
        chosen = _starts(fields, self.keyspace)
        if self.prefixes:
            chosen &= np.any([_starts(fields, each) for each in self.prefixes], axis=0)
        if self.keys:
            width = fields.shape[1]
            wanted = [
                key.ljust(width - 1, b"\0") + bytes([len(key)]) for key in self.keys
            ]
            chosen &= _is_one(fields, wanted)
        if self.hashes is not None:
            by_size = {len(each) for each in self.hashes}
            found = np.zeros(len(blocks), dtype=np.bool_)
            for nbytes in by_size:
                hashes = [each for each in self.hashes if len(each) == nbytes]
                is_long = fields[:, -1] == _HASH_AT + nbytes
                found |= is_long & _is_one(
                    fields[:, _HASH_AT : _HASH_AT + nbytes], hashes
                )
            chosen &= found
        return chosen


def _starts(fields: npt.NDArray[np.uint8], prefix: bytes) -> Mask:
    wanted = np.frombuffer(prefix, dtype=np.uint8)
    same: Mask = (fields[:, : len(wanted)] == wanted).all(axis=1)
    return same & (fields[:, -1] >= len(wanted))


def _is_one(columns: npt.NDArray[np.uint8], wanted: Sequence[bytes]) -> Mask:
    """Return which rows are one of some texts of their length."""
    width = columns.shape[1]
    rows = np.ascontiguousarray(columns).view(f"S{width}")[:, 0]
    return np.isin(rows, np.array(wanted, dtype=f"S{width}"))


def hex_bytes(text: str, what: str) -> bytes:
    """
    Return bytes that were given as hexadecimal digits.

    Raises:
        click.UsageError: They are none, or too many.
    """
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if not 1 <= len(found) <= _MOST_KEY_BYTES or not text.isalnum():
        raise click.UsageError(
            f"{what} {text[:40]!r}: give 1 to {_MOST_KEY_BYTES} bytes in hex"
        )
    return found


def keyspace_named(survey: SlabSurvey, digits: str) -> tuple[bytes, KeySpace | None]:
    """
    Return the digest that begins so, and its text if it is described.

    Raises:
        click.UsageError: That is no digest, or several of those described begin so.
    """
    known, _ = survey.keyspaces()
    begins = [
        digest for digest in known if digest.hex().startswith(digits.lower() or "-")
    ]
    if len(begins) == 1 and len(digits) >= _LEAST_DIGITS:
        return begins[0], known[begins[0]]
    if len(digits) != 2 * _DIGEST_BYTES:
        raise click.UsageError(
            f"key space {digits[:40]!r}: give all 32 digits, or of one that is described 4 or "
            "more, so that no other begins so"
        )
    return hex_bytes(digits, "key space"), None


@attrs.frozen
class Wanted:
    """What was given to the options of ``choosing``."""

    key: Sequence[str]
    prefix: Sequence[str]
    keyspace: str | None
    prompt: BinaryIO | None
    salt: str | None

    def choose(self, survey: SlabSurvey) -> Choice:
        """
        Make a choice of it.

        Raises:
            click.UsageError: It makes none.
            StoreError: The prompt cannot be read.
        """
        digest, text = b"", None
        if self.keyspace is not None:  # empty is none of ours, not all
            digest, text = keyspace_named(survey, self.keyspace)
        if self.prompt is None and self.salt is not None:
            raise click.UsageError("--salt is of a --prompt")
        if self.salt == "":  # such as of a variable that is not set
            raise click.UsageError("--salt is empty: leave it out if there is none")
        hashes = None
        if self.prompt is not None:
            hashes = _hashes_of(self.prompt, text, os.fsencode(self.salt or ""))
        return Choice(
            tuple(hex_bytes(each, "key") for each in self.key),
            tuple(hex_bytes(each, "prefix") for each in self.prefix),
            keyspace_prefix(digest) if digest else b"",
            hashes,
        )


def choosing(command: Callable[..., _T]) -> Callable[..., _T]:
    """Give a subcommand options that say which blocks, as the argument ``wanted``."""

    @functools.wraps(command)
    def wrapped(
        *,
        key: Sequence[str],
        prefix: Sequence[str],
        keyspace: str | None,
        prompt: BinaryIO | None,
        salt: str | None,
        **others: object,
    ) -> _T:
        wanted = Wanted(key, prefix, keyspace, prompt, salt)
        return command(wanted=wanted, **others)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


_OPTIONS = (
    click.option("--key", multiple=True, help="The block of this packed key; hex."),
    click.option("--prefix", multiple=True, help="Those whose key begins so; hex."),
    click.option("--keyspace", help="Those of a key space: its digest."),
    click.option(
        "--prompt",
        type=click.File("rb"),
        help="Blocks of this prompt: a file with its token ids as a JSON list, - for "
        "standard input. Needs --keyspace, and keys made by ucm.PrefixHasher.",
    ),
    click.option("--salt", help="Salt of the --prompt, if it has one."),
)


def _hashes_of(
    prompt: BinaryIO, text: KeySpace | None, salt: bytes
) -> tuple[bytes, ...]:
    if text is None:
        raise click.UsageError(
            "--prompt needs the --keyspace of its blocks, one that is described"
        )
    if text.hash_algorithm != ALGORITHM:
        raise click.UsageError(
            f"--prompt: keys of this key space are made by "
            f"{text.hash_algorithm[:40]!r}, not by {ALGORITHM!r}; name them with --key"
        )
    data = prompt.read(_MOST_PROMPT + 1)
    try:
        if len(data) > _MOST_PROMPT:
            raise StoreError(f"the prompt has more than {_MOST_PROMPT} bytes")
        tokens = msgspec.json.decode(data, type=list[int])
        return tuple(PrefixHasher(text, text.block_tokens).keys(tokens, salt=salt))
    except (*DECODE_ERRORS, KeyFormatError) as exc:
        raise StoreError(f"the prompt is no JSON list of token ids: {exc}") from exc
