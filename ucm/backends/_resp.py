# SPDX-License-Identifier: Apache-2.0
"""
RESP, the protocol of Valkey and Redis, for values that go where they belong. Pure.

Commands are encoded without a copy of the memory that they carry, and answers are read from bytes as
they come, in whatever pieces, each value into the memory that its command names
(https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

import msgspec
from redis.exceptions import ResponseError

__all__ = ["Answer", "Answers", "Bulk", "Command", "Word", "encoded"]

_MOST_SKIPPED = 1 << 20
"""Of a value too long for its memory; rather than reading more the connection is given up."""
_CRLF = b"\r\n"

Word: TypeAlias = "bytes | tuple[bytes | memoryview, ...]"
"""Of a command, in one piece or several."""


class Bulk(msgspec.Struct, frozen=True):
    """
    A value that has come, and is where its command wanted it.

    Args:
        nbytes: Its length, whatever of it had room.
    """

    nbytes: int


Answer: TypeAlias = "Bulk | bytes | int | ResponseError | None"
"""A value, a status, a number, an error, or that there is no such value."""


class Command(msgspec.Struct, frozen=True):
    """
    What is asked.

    Args:
        words: Name and arguments.
        into: What a value fills from its beginning, one memory after the other.
    """

    words: tuple[Word, ...]
    into: tuple[memoryview, ...] = ()

    @property
    def room(self) -> int:
        """Bytes that a value fills at most."""
        return sum(map(len, self.into))

    @property
    def nbytes(self) -> int:
        """Bytes of values, there and back."""
        nbytes = self.room
        for word in self.words:
            if isinstance(word, tuple):
                nbytes += sum(map(len, word))
        return nbytes

    def plain(self) -> list[str | bytes]:
        """Return the words as redis-py wants them, each in one piece."""
        name, *words = [
            word if isinstance(word, bytes) else b"".join(word) for word in self.words
        ]
        return [name.decode(), *words]

    def take(self, value: bytes) -> Bulk:
        """Put a value where it belongs that came by another way."""
        rest = memoryview(value)
        for part in self.parts(len(value)):
            part[:] = rest[: len(part)]
            rest = rest[len(part) :]
        return Bulk(len(value))

    def parts(self, nbytes: int) -> list[memoryview]:
        """Return the memory that a value of so many bytes fills."""
        found = []
        for memory in self.into:
            if part := memory[:nbytes]:
                found.append(part)
            nbytes -= len(part)
        return found


class Answers:
    """
    Reads the answers to a pipeline from bytes as they come. Pure.

    Args:
        commands: What was asked, in order.
        scratch: Memory of the connection; nothing is held in it.
    """

    def __init__(self, commands: Sequence[Command], scratch: memoryview) -> None:
        self._commands = commands
        self._scratch = scratch
        self._start = self._stop = 0
        """What is held in it."""
        self._parts: list[memoryview] = []
        """What the value that just comes goes to."""
        self._num_skipped = 0
        """Bytes behind them that go nowhere."""
        self._bulk: Bulk | None = None
        """The value whose end has not come."""
        self.told: list[Answer] = []
        self.is_cut = False
        """A value is not worth reading to its end."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is awaited."""
        return self.is_cut or len(self.told) == len(self._commands)

    @property
    def is_amid_value(self) -> bool:
        """Whether all of ``memory`` is filled next, and nothing else."""
        return bool(self._parts)

    def values(self, most: int) -> Sequence[Command]:
        """Return up to *most* commands whose answers come next, and are values unless there is none."""
        if self._bulk is not None or self.is_cut:
            return ()
        start = len(self.told)
        left = self._commands[start : start + most]
        return list(takewhile(lambda command: command.into and all(command.into), left))

    def held(self) -> tuple[memoryview, int]:
        """Return memory that begins with what came and was not read, and how much that is."""
        nbytes = len(self._scratch) - len(self.memory())
        return self._scratch, nbytes

    def filled(self, count: int, num_held: int) -> None:
        """Note that so many ``values`` came, each as long as its memory; and what is ``held``."""
        start = len(self.told)
        self.told += [
            Bulk(command.room) for command in self._commands[start : start + count]
        ]
        self._start, self._stop = 0, num_held

    def memory(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        if self._parts:
            return self._parts[0]
        held = self._stop - self._start
        self._scratch[:held] = bytes(self._scratch[self._start : self._stop])
        self._start, self._stop = 0, held
        return self._scratch[held:]

    def come(self, nbytes: int) -> None:
        """
        Note how many bytes have come to ``memory``.

        Raises:
            ValueError: They are no answers to what was asked.
        """
        if self._parts:
            self._filled(nbytes)
        else:
            self._stop += nbytes
        while self._start < self._stop and not self.is_cut:
            held = self._scratch[self._start : self._stop]
            if self._parts:
                part = self._parts[0][: len(held)]
                part[:] = held[: len(part)]
                self._start += len(part)
                self._filled(len(part))
            elif self._num_skipped:
                nbytes = min(len(held), self._num_skipped)
                self._start += nbytes
                self._num_skipped -= nbytes
            elif self.is_over:
                raise ValueError("an answer to nothing")
            else:
                line, found, _ = bytes(held).partition(_CRLF)
                if not found:
                    if len(held) == len(self._scratch):
                        raise ValueError("a line without an end")
                    break
                self._start += len(line) + len(_CRLF)
                self._read(line[:1], line[1:])

    def _filled(self, nbytes: int) -> None:
        self._parts[0] = self._parts[0][nbytes:]
        if not self._parts[0]:
            del self._parts[0]

    def _read(self, kind: bytes, text: bytes) -> None:
        """Read a line that is no value's."""
        if self._bulk is not None:
            if kind:
                raise ValueError("a value without an end")
            self.told.append(self._bulk)
            self._bulk = None
            return
        match kind:
            case b"_":
                self.told.append(None)
            case b"$" if text == b"-1":
                self.told.append(None)
            case b"$" if text.isdigit():
                self._begin(Bulk(int(text)))
            case b":":
                self.told.append(int(text))
            case b"+":
                self.told.append(text)
            case b"-":
                self.told.append(ResponseError(text.decode("latin-1")))
            case _:
                raise ValueError("an answer of an unknown kind")

    def _begin(self, bulk: Bulk) -> None:
        """Have room for a value; one that is much too long is told at once."""
        parts = self._commands[len(self.told)].parts(bulk.nbytes)
        over = bulk.nbytes - sum(map(len, parts))
        if over > _MOST_SKIPPED:
            self.told.append(bulk)
            self.is_cut = True
        else:
            self._bulk, self._parts, self._num_skipped = bulk, parts, over


def encoded(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Return what is sent: small pieces joined, memory as it is."""
    chunks: list[bytes | memoryview] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command.words))
        for word in command.words:
            if isinstance(word, bytes):
                small.append(b"$%d\r\n%b\r\n" % (len(word), word))
                continue
            small.append(b"$%d\r\n" % sum(map(len, word)))
            for piece in word:
                if isinstance(piece, memoryview):
                    chunks += (b"".join(small), piece)
                    small.clear()
                else:
                    small.append(piece)
            small.append(_CRLF)
    return [*chunks, b"".join(small)]
