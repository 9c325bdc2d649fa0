# SPDX-License-Identifier: Apache-2.0
"""
Puts and deletes blocks in a process of its own for each call to the system, and dies at that call.

``python -m tests.backends.dying_child KIND DIRECTORY [STEP]`` does so at each call, or each so many, and prints a
line of JSON for each death: what was told as put and as deleted before it, and what the next process finds.
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ucm import native
from ucm.backends.abc import Backend, Presence, Verdict
from ucm.backends.opening import open_backend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

_CALLS = "open pwrite writev pwritev preadv pread fsync rename link unlink mkdir utime ftruncate posix_fallocate"
_KEYS, _SIZES = make_keys(8), (4096, 20480)
_DIED = 77


def _size(at: int) -> int:
    return _SIZES[at % 2]


def _die_at(number: int) -> None:
    """Have the process die before a call of those that change files."""
    count, lock = itertools.count(1), threading.Lock()

    def hooked(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            with lock:
                if next(count) == number:
                    os._exit(_DIED)
            return real(*args, **named)

        return call

    for name in _CALLS.split():
        setattr(os, name, hooked(getattr(os, name)))


async def _open(kind: str, path: str) -> Backend:
    given = {"type": kind, "path": path, "capacity": 1 << 20, "threads": 2}
    more = {"orphan_seconds": 0.0} if kind == "files" else {}
    return await open_backend(given | more, "tiers.0")


async def _work(kind: str, path: str, number: int, told: int) -> None:
    def say(word: str, at: int) -> None:
        os.write(told, f"{word} {at}\n".encode())

    _die_at(number)
    backend = await _open(kind, path)
    for some in ((0, 1, 2), (3, 4, 1), (5, 6, 7)):
        blocks = [seal(_KEYS[at], _size(at)) for at in some]
        for at in some:
            say("putting", at)
        for at, verdict in zip(some, await backend.put(blocks), strict=True):
            if verdict in (Verdict.DONE, Verdict.PRESENT):
                say("put", at)
        say("deleting", some[1])
        await backend.delete([_KEYS[some[1]]])
        say("deleted", some[1])
    await backend.aclose()


async def _look(kind: str, path: str, told: int) -> None:
    backend = await _open(kind, path)
    there = [one is Presence.PRESENT for one in await backend.exists(_KEYS)]
    sound = [
        (await fetch_sound(backend, [key], _size(at)))[0]
        for at, key in enumerate(_KEYS)
    ]
    blocks = [seal(key, _size(at)) for at, key in enumerate(_KEYS)]
    put = [one in (Verdict.DONE, Verdict.PRESENT) for one in await backend.put(blocks)]
    await backend.aclose()
    found = {"there": there, "sound": sound, "put": put}
    os.write(told, json.dumps(found).encode())


def _forked(run: Callable[[int], Coroutine[Any, Any, None]]) -> tuple[int, str]:
    """Run in a process of its own; return its code and what it told."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            asyncio.run(run(writer))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as lines:
        told = lines.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def main(kind: str, home: str, step: str = "1") -> None:
    """Die at each call, or each so many, until there are no more of them."""
    native.LIBRARY = None  # else the calls are not Python's
    for number in itertools.count(1, int(step)):
        path = f"{home}/{number}"
        code, told = _forked(lambda fd: _work(kind, path, number, fd))  # noqa: B023 - at once
        looked, found = _forked(lambda fd: _look(kind, path, fd))  # noqa: B023 - at once
        assert (code, looked) in ((_DIED, 0), (0, 0)), (number, code, looked)
        left = len(list(Path(path).glob("writing/*")))
        line = [number, told.splitlines(), json.loads(found), left]
        sys.stdout.write(json.dumps(line) + "\n")
        if not code:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
