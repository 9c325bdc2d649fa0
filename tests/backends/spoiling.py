# SPDX-License-Identifier: Apache-2.0
"""
What stands between an agent and a Valkey server, and spoils what the server says.

A process of its own, told by a file what to do with the answers that come from then on::

    python -m tests.backends.spoiling PORT SERVER_PORT FILE
"""

import argparse
import asyncio
import contextlib
import enum
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from tests.ports import free_ports
from ucm.backends.envelope import HEADER_BYTES

__all__ = ["Spoiler", "Way", "spoiled"]

NONSENSE = (
    *(b"\x00\xff no word\r\n", b":ten\r\n", b"$ten\r\n", b"*ten\r\n", b"\r\n"),
    *(b"%1\r\n", b"~1\r\n*0\r\n", b"_\r\n", *[b":7\r\n"] * 5, *[b"*0\r\n"] * 5),
)
"""What no server says, or not to such a question."""
_MAGIC = b"UCMB"
"""What a block's head begins with."""
_NONSENSE, _REFUSED = itertools.cycle(NONSENSE), itertools.cycle((True, False))
_LOOK_S, _MOST_LOOKS = 0.02, 3000
"""A slow answer is held for a minute, or until answers are no longer slow."""
_READY, _DONE = "ready", b"+OK\r\n"


class Way(enum.StrEnum):
    """What becomes of answers."""

    FORWARD = ""
    SLOW = "slow"
    GARBAGE = "garbage"
    """They are none, each in another manner."""
    DAMAGED = "damaged"
    """One bit in each block is another."""
    PARTIAL = "partial"
    """Every second block of a batch is refused."""


class Spoiler:
    """
    The end of a test: says what becomes of answers.

    Args:
        port: Where it listens.
        file: That it is told by.
    """

    def __init__(self, port: int, file: Path) -> None:
        self.port = port
        self._file = file

    def do(self, way: Way) -> None:
        """Have all answers go this way from now on."""
        aside = self._file.with_suffix(".new")
        aside.write_text(way)
        aside.replace(self._file)


@contextlib.contextmanager
def spoiled(folder: Path, server_port: int) -> Iterator[Spoiler]:
    """Run it before a server for the length of the block."""
    (port,) = free_ports(1)
    made = Spoiler(port, folder / "way")
    made.do(Way.FORWARD)
    command = [sys.executable, "-m", __name__, str(port), str(server_port)]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [*command, str(folder / "way")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        assert process.stdout is not None
        assert _READY == process.stdout.readline().decode().strip()
        yield made
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# -- in the process of its own -------------------------------------------------------


async def answers(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield a server's answers, one by one; a list's head and its items are some."""
    while line := await reader.readline():
        nbytes = int(line[1:]) if line[:1] == b"$" else -1
        yield line + (await reader.readexactly(nbytes + 2) if nbytes >= 0 else b"")


def _is_of_block(answer: bytes) -> bool:
    """Return whether it is a value, and no block's head without its bytes."""
    value = answer.partition(b"\r\n")[2].removesuffix(b"\r\n")
    is_head = value.startswith(_MAGIC) and len(value) == HEADER_BYTES
    return bool(value) and not is_head


def spoil(answer: bytes, way: Way) -> bytes:
    """Return what becomes of an answer; no two are treated alike in a row."""
    is_block = _is_of_block(answer)
    if way is Way.GARBAGE:
        return next(_NONSENSE)
    if way is Way.DAMAGED and is_block:
        return answer[:-3] + bytes([answer[-3] ^ 1]) + answer[-2:]
    if way is Way.PARTIAL and (is_block or answer == _DONE) and next(_REFUSED):
        return b"-BUSY not now\r\n"
    return answer


async def _serve(port: int, server_port: int, file: Path) -> None:
    def way() -> Way:
        return Way(file.read_text())

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection(
                "127.0.0.1", server_port, limit=1 << 24
            )
            with contextlib.closing(to_server):
                async with asyncio.TaskGroup() as tasks:
                    asking = tasks.create_task(_forward(reader, to_server))
                    await _answer(from_server, writer, way)
                    asking.cancel()

    server = await asyncio.start_server(meet, "127.0.0.1", port)
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    way: Callable[[], Way],
) -> None:
    with contextlib.suppress(OSError, EOFError):
        async for answer in answers(reader):
            for _ in range(_MOST_LOOKS):
                if way() is not Way.SLOW:
                    break
                await asyncio.sleep(_LOOK_S)
            writer.write(spoil(answer, way()))
            await writer.drain()


def main() -> None:
    """Stand between until killed."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("port", type=int)
    parser.add_argument("server_port", type=int)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    asyncio.run(_serve(given.port, given.server_port, given.file))


if __name__ == "__main__":
    main()
