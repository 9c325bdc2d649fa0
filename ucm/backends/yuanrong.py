# SPDX-License-Identifier: Apache-2.0
"""
Blocks as values of yuanrong's data system, by its own client in processes of its own.

The client keeps the interpreter's lock while it waits for a worker, so that threads are of no
use: what calls it is a few processes (``_yuanrong_client.py``), each beside a socket that the
loop reads into where blocks belong. A call that is given up ends its process, which then can
write nowhere; the next call starts another one. A process that has yet to load its client was
asked nothing: it goes on to, and serves a later call. A value is the envelope and then the
block's bytes.
"""

import asyncio
import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.to_thread
import attrs

from ucm.backends import _yuanrong_client
from ucm.backends._address import read_server
from ucm.backends._many import Many, put_missing
from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import HEADER_BYTES, MAX_KEY_BYTES, Envelope, headers_for
from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.registry import how_to_install
from ucm.settings import field, read_section

__all__ = ["YuanrongBackend", "YuanrongSettings"]

_CALL_BLOCKS = 8
_CALL_NAMES = 1000
_LARGEST_BLOCK = 256 << 20
_LONGEST_NAME = 255
_NAME = re.compile(r"[a-zA-Z0-9\-_!@#%^*()+=:;]*")
_OPENING_S = 30.0
_CLOSING_S = 5.0
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_PRESENCE = {"present": Presence.PRESENT, "absent": Presence.ABSENT}
_LOST: Final = (OSError, ValueError, EOFError, ImportError)
"""What a process that has ended, or is about to, looks like."""
_Item = TypeVar("_Item")
_T = TypeVar("_T")
_read_address = partial(read_server, whose="worker", example="10.0.0.1:31501")


def _read_prefix(key: str, value: object) -> str:
    """Read what is in front of a key, of which the client knows but some characters."""
    longest = _LONGEST_NAME - 2 * MAX_KEY_BYTES
    if isinstance(value, str) and len(value) <= longest and _NAME.fullmatch(value):
        return value
    raise ConfigError(
        *(key, value, f"not up to {longest} characters that names may have"),
        "Use letters, digits and - _ ! @ # % ^ * ( ) + = : ; alone.",
    )


@attrs.frozen(kw_only=True)
class YuanrongSettings:
    """Settings of a tier in yuanrong's data system."""

    worker: str = field("127.0.0.1:31501", "This machine's worker.", read=_read_address)
    prefix: str = field("ucm:", "What names of values begin with.", read=_read_prefix)
    ttl: int = field(86400, "Seconds that a block lives; 0: without end.", least=0)
    processes: int = field(2, "Calls at a time, each in a process.", least=1)
    timeout: float = field(
        1.0, "Seconds after which the worker is given up.", least=0.1
    )


class _Helper:
    """A process that holds a client, and the socket to it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.is_starting = True
        """Nothing was asked of it, nor read from it."""
        self.line, theirs = socket.socketpair()
        self.line.setblocking(False)
        script = str(Path(_yuanrong_client.__file__))
        with theirs:  # -P: what lies beside the script is no module of its own
            self.process = subprocess.Popen(
                [sys.executable, "-P", script, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    async def start(self) -> None:
        """Wait until it serves; given up, it is as if nobody had waited."""
        if self.is_starting:
            await anyio.wait_readable(self.line)
            self.is_starting = False
            if problem := await self.told():
                raise ImportError("".join(problem))

    async def send(self, asked: list[Any], blocks: Sequence[Any] = ()) -> None:
        """Ask, with what comes behind."""
        text = json.dumps(asked).encode()
        loop = asyncio.get_running_loop()
        for piece in (len(text).to_bytes(4) + text, *blocks):
            await loop.sock_sendall(self.line, piece)

    async def told(self) -> list[str]:
        """Wait for an answer, without what comes behind."""
        length = await self._read(bytearray(4))
        return list(json.loads(await self._read(bytearray(int.from_bytes(length)))))

    async def read_into(self, target: memoryview) -> None:
        """Fill *target*."""
        loop, at = asyncio.get_running_loop(), 0
        while at < len(target):
            got = await loop.sock_recv_into(self.line, target[at:])
            if not got:
                raise EOFError
            at += got

    async def _read(self, room: bytearray) -> bytearray:
        await self.read_into(memoryview(room))
        return room


class YuanrongBackend(Backend):
    """
    Blocks as values; made by ``open_configured``.

    Args:
        settings: As read.
    """

    def __init__(self, settings: YuanrongSettings) -> None:
        self._prefix = settings.prefix
        self._many = Many(settings.processes)
        host, _, port = settings.worker.rpartition(":")
        timeout_ms = math.ceil(settings.timeout * 1000)
        self._arguments = [host, port, str(timeout_ms), str(settings.ttl)]
        self._idle: list[_Helper] = []
        self._busy: set[_Helper] = set()
        self._ended: list[subprocess.Popen[bytes]] = []
        self._is_open = True

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Start the first process; a worker that does not answer is unavailable until it does.

        Raises:
            ConfigError: A setting is wrong, or the client is not installed.
        """
        backend = cls(read_section(YuanrongSettings, settings, f"{key}."))
        problem = ""
        try:
            with anyio.move_on_after(_OPENING_S):  # a slow start is no mistake
                await backend._with_helper(_nothing, ())
        except ImportError as exc:
            problem = str(exc)
        except _LOST as exc:
            problem = f"its process ends, {type(exc).__name__}"
        if problem:
            await backend.aclose()
            raise ConfigError(
                f"{key}.type",
                "yuanrong",
                f"its client cannot be imported ({problem})",
                how_to_install("yuanrong"),
            )
        return backend

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of the workers together."""
        return BackendCapabilities(
            medium="yuanrong",
            shared=True,
            durable="process",
            max_block_bytes=_LARGEST_BLOCK,
            batch_blocks=_CALL_BLOCKS * self._many.most,
            in_flight=self._many.most,
        )

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask the worker, which knows of what others hold."""

        async def ask(helper: _Helper, some: Sequence[PackedKey]) -> list[Presence]:
            await helper.send(["exists", self._names(some), []])
            told = await helper.told()
            return [_PRESENCE.get(word, Presence.UNKNOWN) for word in told]

        return await self._in_calls(keys, _CALL_NAMES, ask, Presence.UNKNOWN)

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Read headers and bytes."""
        pairs = list(zip(keys, targets, strict=True))
        return await self._in_calls(pairs, _CALL_BLOCKS, self._get, _UNAVAILABLE)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Write what is not there; of two writers at once the first one's bytes stay."""

        async def write(missing: Sequence[Sealed]) -> list[Verdict]:
            none = Verdict.UNAVAILABLE
            return await self._in_calls(missing, _CALL_BLOCKS, self._put, none)

        return await put_missing(self, blocks, _LARGEST_BLOCK, write)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove values."""

        async def ask(helper: _Helper, some: Sequence[PackedKey]) -> list[Verdict]:
            await helper.send(["delete", self._names(some), []])
            return [Verdict(word) for word in await helper.told()]

        return await self._in_calls(keys, _CALL_NAMES, ask, Verdict.UNAVAILABLE)

    async def aclose(self) -> None:
        """End the processes; calls under way have no answer then."""
        self._is_open = False
        for helper in self._busy:
            helper.process.kill()  # whoever reads from it sees its end
        while self._idle:
            self._end(self._idle.pop())
        with anyio.move_on_after(_CLOSING_S, shield=True):
            while self._reap():  # noqa: ASYNC110 - a process's end is no event
                await anyio.sleep(0.005)

    def _names(self, keys: Sequence[PackedKey]) -> list[str]:
        return [f"{self._prefix}{key.hex()}" for key in keys]

    async def _get(
        self, helper: _Helper, pairs: Sequence[tuple[PackedKey, memoryview]]
    ) -> list[Fetched]:
        sizes = [HEADER_BYTES + len(target) for _, target in pairs]
        await helper.send(["get", self._names([key for key, _ in pairs]), sizes])
        words = await helper.told()
        header, told = memoryview(bytearray(HEADER_BYTES)), []
        for (key, target), word in zip(pairs, words, strict=True):
            if word == "done":
                await helper.read_into(header)
                await helper.read_into(target)
                told.append(Envelope.judge(header, key, len(target)))
            else:
                told.append(Fetched(Verdict(word)))
        return told

    async def _put(self, helper: _Helper, blocks: Sequence[Sealed]) -> list[Verdict]:
        sizes = [HEADER_BYTES + len(one.data) for one in blocks]
        pieces: list[bytes | memoryview] = []
        for header, one in zip(headers_for(blocks), blocks, strict=True):
            pieces += header, one.data
        names = self._names([one.key for one in blocks])
        await helper.send(["put", names, sizes], pieces)
        return [Verdict(word) for word in await helper.told()]

    async def _in_calls(
        self, items: Sequence[_Item], most: int, ask: Callable[..., Any], unknown: _T
    ) -> list[_T]:
        """Ask for as many items at a time as one call may carry; *unknown* if it fails."""
        told = [unknown] * len(items)

        async def one(call: slice) -> None:
            try:
                if self._is_open:
                    told[call] = await self._with_helper(ask, items[call])
            except _LOST:
                return

        calls = [slice(at, at + most) for at in range(0, len(items), most)]
        if self._is_open:
            await self._many.run(calls, one)
        return told

    async def _with_helper(self, ask: Callable[..., Any], some: Sequence[Any]) -> Any:  # noqa: ANN401
        """Ask one of the processes, which is of no more use if that has no good end."""
        helper = self._idle.pop() if self._idle else await self._begin()
        self._busy.add(helper)
        is_well = False
        try:
            await helper.start()
            told = await ask(helper, some)
            is_well = len(told) == len(some)
            return told
        finally:
            self._busy.discard(helper)
            if self._is_open and (is_well or helper.is_starting):
                self._idle.append(helper)
            else:
                self._end(helper)

    async def _begin(self) -> _Helper:
        """Have one more process."""
        self._reap()
        return await anyio.to_thread.run_sync(_Helper, self._arguments)

    def _end(self, helper: _Helper) -> None:
        helper.process.kill()
        helper.line.close()
        self._ended.append(helper.process)

    def _reap(self) -> bool:
        """Return whether processes are left that have been told to end."""
        self._ended = [one for one in self._ended if one.poll() is None]
        return bool(self._ended)


async def _nothing(helper: _Helper, some: Sequence[Any]) -> list[Any]:
    """Ask nothing."""
    return []
