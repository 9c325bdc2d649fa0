# SPDX-License-Identifier: Apache-2.0
"""
How a running process is, told through a Unix socket in the slab's directory.

Each process that uses a slab listens on ``status/<role>-<pid>.sock`` below it. Whoever
connects is written one JSON document and nothing is read, so that there is nothing to be
asked wrongly; a client that does not take it within a second is left. Only this user and
root are told. The directory is open to this user only, names in it are looked up relative
to a descriptor, and a number behind the name keeps processes apart whose ids are equal in
containers of their own.

Threading: one thread of ours per server, which sleeps but for a connection, and for a look
of its own now and then where one is wanted. It calls what it was given to tell; the
engine's threads never wait for it.
"""

import contextlib
import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import attrs
import msgspec

from ucm.errors import NoStatusError, UCMError
from ucm.threads import SYSTEM, Threads

__all__ = [
    "NO_FILES",
    "VERSION",
    "Numbers",
    "Status",
    "StatusServer",
    "Statuses",
    "Word",
    "peer_uid",
    "read_statuses",
    "serve_status",
]

VERSION: Final = 1
"""Version of the answer."""
_FOLDER: Final = "status"
_KIND: Final = "ucm-status"
_NAME: Final = re.compile(
    r"[a-z][a-z0-9-]{0,40}-\d{1,10}(?:\.\d{1,3})?\.sock", re.ASCII
)
NO_FILES: Final = errno.EMFILE, errno.ENFILE
_ANSWER_S: Final = 1.0
_ASK_S: Final = 3.0
"""More than what a client before may cost the server."""
_CLOSE_S: Final = 1.0
_STALE_S: Final = 60.0
"""A socket that nobody listens on is younger only while its server starts."""
_MOST_BYTES: Final = 1 << 20
_MOST_SOCKETS: Final = 256
_MOST_ALIKE: Final = 100
_BACKLOG: Final = 8
_CREDENTIALS: Final = struct.Struct("iII")  # of users and groups beyond 2^31, too
_TIMEVAL: Final = struct.Struct("2l")
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Word = Annotated[str, msgspec.Meta(max_length=256)]
_Edge = tuple[float, int, Word, Word]
Numbers = dict[Word, float]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a process says of itself.

    Args:
        kind: Always ``ucm-status``.
        v: Version of the answer.
        role: Such as ``scheduler`` or ``worker-0``.
        pid: Its process id, where it runs.
        name: No other's of this slab, who may have the same id in another container; by its socket.
        engine: The engine's name for itself; the same in all of its processes.
        uptime_s: Seconds since it began to serve.
        problem: Why nothing is served; empty while all is well.
        counters: Totals since the start, by the texts of ``metrics.sample_key``.
        gauges: Likewise.
        sizes: Of containers and queues, by name.
        edges: What the stages of its pipeline did last: how many seconds ago, number of
            the ticket, stage, begin or end.
    """

    kind: Word = _KIND
    v: int = VERSION
    role: Word
    pid: int
    name: Word = ""
    engine: Word = ""
    uptime_s: float = 0.0
    problem: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    counters: Numbers = {}
    gauges: Numbers = {}
    sizes: Numbers = {}
    edges: list[_Edge] = []


class StatusServer:
    """
    Listens in a directory and tells how this process is.

    Args:
        directory: The slab's; None: nobody can ask, and there are own looks only.
        role: Such as ``worker-0``; lower case, digits and dashes.
        tell: Returns what ``Status`` has besides role, process id and time; called on the
            server's thread.
        threads: Where clock and thread come from.
        look: Brings up to date what others tell; called on the server's thread after
            *look_s* seconds in which nobody asked. It makes no answer: that takes a
            millisecond, of an engine that waits for the interpreter lock.
        look_s: None: never.

    Raises:
        OSError: The socket cannot be made there, or no thread started.
    """

    def __init__(
        self,
        directory: Path | None,
        role: str,
        tell: Callable[[], Mapping[str, object]],
        threads: Threads = SYSTEM,
        look: Callable[[], object] = lambda: None,
        look_s: float | None = None,
    ) -> None:
        self._role = role
        self._tell = tell
        self._look = look
        self._look_s = look_s
        self._clock, self._give_way = threads.monotonic, threads.give_way
        self._began = self._clock()
        self._pid = os.getpid()
        self._closed = threads.event()
        self._listener: socket.socket | None = None
        if directory is not None:
            self._listen(directory)
        self._thread = threads.thread(self._serve, "ucm-status")
        try:
            self._thread.start()
        except RuntimeError as exc:
            self.close()
            raise OSError(errno.EAGAIN, str(exc)) from exc

    def _listen(self, directory: Path) -> None:
        with contextlib.ExitStack() as made:
            self._folder = _open_folder(directory, make=True)
            made.callback(os.close, self._folder)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.callback(listener.close)
            os.fchmod(listener.fileno(), 0o600)  # before it has a name
            self._name = self._bind(listener)
            listener.listen(_BACKLOG)
            # Not Python's own timeout: no shutdown would wake who waits so.
            limit = _TIMEVAL.pack(*divmod(int((self._look_s or 0) * 1e6), 1_000_000))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            made.pop_all()
        self._listener = listener
        _remove_stale(self._folder, self._name)

    def _bind(self, listener: socket.socket) -> str:
        for number in range(_MOST_ALIKE):
            name = f"{self._role}-{self._pid}{f'.{number}' if number else ''}.sock"
            try:
                listener.bind(_path_of(self._folder, name))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
            else:
                return name
        raise OSError(errno.EADDRINUSE, f"{_MOST_ALIKE} processes of this name")

    def _serve(self) -> None:
        while not self._closed.is_set():
            connection = self._asked()
            if connection is None:
                continue
            with connection:
                connection.settimeout(_ANSWER_S)
                with contextlib.suppress(OSError):
                    if peer_uid(connection) in (os.geteuid(), 0):
                        connection.sendall(self._answer())

    def _asked(self) -> socket.socket | None:
        """Return who asks; None once there was a look of our own, or trouble."""
        try:
            if self._listener is not None:
                return self._listener.accept()[0]
            self._closed.wait(self._look_s)
        except BlockingIOError:  # nobody asked for so long
            pass
        except OSError:  # closed; or there are no descriptors just now
            self._closed.wait(_ANSWER_S)
            return None
        if not self._closed.is_set():
            with contextlib.suppress(
                UCMError
            ):  # it is being closed, or its store is gone
                self._look()
        return None

    def _answer(self) -> bytes:
        status = {"kind": _KIND, "v": VERSION, "role": self._role, "pid": self._pid}
        status["uptime_s"] = round(self._clock() - self._began, 3)
        try:
            status |= self._tell()
        except UCMError as exc:  # it is being closed, or its store is gone
            status["problem"] = str(exc)
        self._give_way()  # an engine waits for the interpreter lock, nobody for us
        return msgspec.json.encode(status, enc_hook=float)  # numpy's numbers, too

    def close(self) -> None:
        """Stop to listen, and take the socket away. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if os.getpid() != self._pid:  # a fork: the socket is its parent's
            return
        if self._listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
        if self._thread.is_alive():  # or the system started none
            self._thread.join(_CLOSE_S)
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):  # others may be in it
                os.rmdir(f"../{_FOLDER}", dir_fd=self._folder)
            os.close(self._folder)


def serve_status(
    directory: Path | None,
    role: str,
    tell: Callable[[], Mapping[str, object]],
    threads: Threads = SYSTEM,
    look: Callable[[], object] = lambda: None,
    look_s: float | None = None,
) -> StatusServer | None:
    """
    Serve where there is a directory to do so; nothing is lost where it cannot be.

    Args:
        directory: As all others ``StatusServer``'s.
        role: Likewise.
        tell: Likewise.
        threads: Likewise.
        look: Likewise.
        look_s: Likewise; where nobody can ask, it looks for itself alone.
    """
    for _ in range(2 if directory is not None else 0):
        try:
            return StatusServer(directory, role, tell, threads, look, look_s)
        except FileNotFoundError:  # the last one has just tidied up behind itself
            continue
        except OSError:
            break
    if look_s:
        with contextlib.suppress(OSError):
            return StatusServer(None, role, tell, threads, look, look_s)
    return None


@attrs.define
class Statuses:
    """
    What the processes of a slab say.

    Args:
        answers: Of those that answered.
        silent: Names of sockets whose process did not answer, or not in this language.
    """

    answers: list[Status] = attrs.Factory(list)
    silent: list[str] = attrs.Factory(list)


def read_statuses(directory: Path) -> Statuses:
    """
    Ask all processes that use a slab how they are; for a few seconds each at most.

    Sockets of processes that are gone are passed over.

    Raises:
        NoStatusError: None of the slab has ever told, it is others', or no file is left to ask.
    """
    found = Statuses()
    try:
        with contextlib.ExitStack() as opened:
            folder = _open_folder(directory, make=False)
            opened.callback(os.close, folder)
            for name in _names(folder):
                try:
                    found.answers.append(_ask(folder, name, os.fstat(folder).st_uid))
                except ConnectionRefusedError:
                    continue
                except (OSError, ValueError, RecursionError) as exc:
                    if getattr(exc, "errno", None) in NO_FILES:
                        raise
                    found.silent.append(name)
    except OSError as exc:
        raise NoStatusError(f"nothing runs on {directory} that tells: {exc}") from exc
    return found


def _ask(folder: int, name: str, owner: int) -> Status:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ASK_S)
        connection.connect(_path_of(folder, name))
        if peer_uid(connection) != owner:
            raise PermissionError(f"{name} belongs to somebody else")
        until = SYSTEM.monotonic() + _ASK_S
        told = bytearray()
        while piece := connection.recv(1 << 16):
            told += piece
            left = until - SYSTEM.monotonic()
            if len(told) > _MOST_BYTES or left <= 0:
                raise ValueError("too much, or too slow")
            connection.settimeout(left)
    status = msgspec.json.decode(told, type=Status)
    if (status.kind, status.v) != (_KIND, VERSION):
        raise ValueError("of another release")
    return msgspec.structs.replace(status, name=name.removesuffix(".sock"))


def _open_folder(directory: Path, *, make: bool) -> int:
    """
    Return a descriptor of the directory with the sockets, which nobody else can change.

    Raises:
        OSError: There is none, or it is open to others.
    """
    path = directory / _FOLDER
    if make:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    folder = os.open(path, _FLAGS)
    info = os.fstat(folder)
    is_ours = info.st_uid == os.geteuid() or (not make and os.geteuid() == 0)
    if not is_ours or info.st_mode & _OF_OTHERS:
        os.close(folder)
        raise PermissionError(f"{path} is open to others, or belongs to one")
    return folder


def _path_of(folder: int, name: str) -> str:
    """Return a path of bounded length: a socket's may have 107 bytes only."""
    return f"/proc/self/fd/{folder}/{name}"


def peer_uid(connection: socket.socket) -> int:
    """Return whose process is at the other end of a Unix socket."""
    told = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user: int = _CREDENTIALS.unpack(told)[1]
    return user


def _names(folder: int) -> list[str]:
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)))[:_MOST_SOCKETS]


def _remove_stale(folder: int, own: str) -> None:
    """
    Take sockets away on which nobody listens any more; best effort.

    A refused connection proves that, wherever the process ran: its id says nothing in
    another container. One that starts has its name a moment before it listens.
    """
    with contextlib.suppress(OSError):
        now = os.stat(own, dir_fd=folder).st_ctime
        for name in _names(folder):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            is_ours = stat.S_ISSOCK(info.st_mode) and info.st_uid == os.geteuid()
            if is_ours and now - info.st_ctime > _STALE_S and _is_dead(folder, name):
                os.unlink(name, dir_fd=folder)


def _is_dead(folder: int, name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(_path_of(folder, name))
        except ConnectionRefusedError:
            return True
        except OSError:  # busy, or gone
            return False
    return False
