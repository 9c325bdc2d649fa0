# SPDX-License-Identifier: Apache-2.0
"""
LoRA adapters by content: block hashes that say what an adapter holds.

The engine's hashes name an adapter and its path, so that one that was trained further
under the same path hits old blocks. A request with an adapter gets hashes of ours: the
engine's, keyed by a digest of the adapter's files. All that is looked up, loaded and
saved for it goes by these.

The digest must be of what the engine *loaded*, and it does not say when it does: on
request, at first use, or again after it needed the room. So an adapter counts as known
only if nothing of it was changed since this engine started: whenever the engine read it,
it read this. Another one is passed over until the engine starts again, unless the
operator promises that a path is never written again. The engine also takes an adapter that
it has for any other of the same number (``lora_int_id``), until it needs the room or is
told to load in place: a number that was seen with two paths is passed over from then on.
What is not seen: files that change
between this look and the engine's, within one step; a file system whose clock is behind
this machine's by more than the margin, or that keeps no time of change; an adapter that is
loaded in place while requests run with it, which go on with what is new and are saved under
what was.

Threading: all but ``_read`` and what it calls runs on the engine's scheduler thread, and
waits for nothing: files are read on a thread of their own, which starts with the first
request that has an adapter. A look-up is put off for a short time until they are.
"""

import hashlib
import operator
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, overload

import attrs

from ucm.integration.changes import links_made_ns
from ucm.metrics import Counters
from ucm.threads import Aside, Threads
from ucm.tracing import ADAPTER_PASSED, Log

__all__ = ["LATE", "Adapters", "SaltedHashes", "adapter_settings"]

_SUFFIXES = (".json", ".safetensors", ".bin", ".pt")
_MAX_OPEN = 64
_MAX_KNOWN = 1024
_MAX_NUMBERS = 65536
_LONGEST_WAIT_S = 0.05
_STALE_AFTER_S = 1.0
_MARGIN_NS = 250_000_000
_CLOSE_TIMEOUT_S = 1.0
_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_moe_shared_loras",
)

_CHANGED: Final = "changed"
_SHARED: Final = "shared"
_UNREADABLE: Final = "unreadable"
LATE: Final = "late"
"""The problem of an adapter that was not read in time."""
_CROWDED: Final = "crowded"
_REMEDIES = {
    _CHANGED: "Give each version a path of its own and restart the engine, or set "
    "immutable_adapters if no path is ever written again.",
    _SHARED: "Give each adapter, and each version of one, a lora_int_id of its own; which "
    "of them the engine computes with is not known.",
    _UNREADABLE: "Give the adapter as a local directory.",
}


def adapter_settings(lora_config: object) -> str | None:
    """Return what the engine's LoRAConfig says of how adapters apply; None without one."""
    if lora_config is None:
        return None
    return ";".join(f"{name}={getattr(lora_config, name, None)}" for name in _SETTINGS)


class SaltedHashes(Sequence[bytes]):
    """
    A request's block hashes, keyed by what its adapter holds.

    Made as they are asked for. The engine's list may grow, and that of a session may
    lose its end and get another one.

    Args:
        request: vLLM's Request.
        salt: At most 64 bytes.
    """

    __slots__ = ("_made", "_request", "_salt")

    def __init__(self, request: Any, salt: bytes) -> None:  # noqa: ANN401 - vLLM's
        self._request = request
        self._salt = salt
        self._made: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self._at(one) for one in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def _at(self, index: int) -> bytes:
        plain = self._request.block_hashes[index]
        made = self._made.get(index)
        if made is None or made[0] != plain:
            salted = hashlib.blake2b(plain, digest_size=len(plain), key=self._salt)
            made = self._made[index] = plain, salted.digest()
        return made[1]


@attrs.define(eq=False)
class _Look:
    """One look at an adapter's files; its thread sets the outcome, and then the end."""

    request: Any
    """vLLM's LoRARequest."""
    salt: bytes = b""
    problem: str = ""
    is_over: bool = False


@attrs.define
class _Use:
    """
    What a request knows of its adapter.

    Args:
        look: The last look at it.
        since: When that began.
        hashes: The request's, once it is known; none if it has to do without.
        is_spent: The engine has begun to compute with it.
        problem: Why it has to do without.
    """

    look: _Look
    since: float
    hashes: Sequence[bytes] | None = None
    is_spent: bool = False
    problem: str = ""


class Adapters:
    """
    Block hashes of requests, by what their adapters hold.

    Args:
        settings: How the engine applies adapters (``adapter_settings``); None: it has
            none, and the hashes of all requests are its own.
        is_immutable: The operator promises that an adapter's path is never written
            again once the engine has read it.
        counters: Counts look-ups that do without.
        log: Told once of each path that is passed over.
        threads: Where clock, thread and queue come from.
        started_ns: When the engine had loaded no adapter yet, by the clock of files;
            now if not given.
    """

    def __init__(
        self,
        settings: str | None,
        *,
        is_immutable: bool,
        counters: Counters,
        log: Log,
        threads: Threads,
        started_ns: int | None = None,
    ) -> None:
        now_ns = time.time_ns() if started_ns is None else started_ns
        self.are_there = settings is not None
        """Whether anything but ``hashes_of`` need be asked."""
        self.hashes_of: Callable[[Any], Sequence[bytes]] = (
            self._hashes_of if self.are_there else operator.attrgetter("block_hashes")
        )
        """The hashes that a request is loaded and saved under; maybe none."""
        self._files = _Files(
            settings or "", None if is_immutable else now_ns - _MARGIN_NS
        )
        self._counters = counters
        self._log = log
        self._threads = threads
        self._uses: dict[str, _Use] = {}
        self._told: set[str] = set()
        self._paths: dict[int, str] = {}
        self._open: list[_Look] = []
        self._aside = Aside("ucm-adapters", self._read, threads)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._uses)

    def may_match(self, request: Any) -> bool:  # noqa: ANN401 - vLLM's Request
        """
        Return whether *request* can be looked up; False: ask again, it is not long.

        Looks at the adapter anew each time that the request is about to begin.
        """
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return True
        now = self._threads.monotonic()
        use = self._uses.get(request.request_id)
        is_over = use is not None and use.hashes is not None
        if (
            use is None
            or use.is_spent
            or (is_over and now > use.since + _STALE_AFTER_S)
        ):
            use = self._uses[request.request_id] = _Use(self._look(adapter), now)
        if use.hashes is not None:
            return True
        if not use.look.is_over and now < use.since + _LONGEST_WAIT_S:
            return False
        problem = use.look.problem if use.look.is_over else LATE
        use.problem = problem
        use.hashes = () if problem else SaltedHashes(request, use.look.salt)
        if problem:
            self._pass_over(adapter, problem)
        return True

    def _hashes_of(self, request: Any) -> Sequence[bytes]:  # noqa: ANN401 - vLLM's Request
        """Return the hashes that a request is loaded and saved under; maybe none."""
        if getattr(request, "lora_request", None) is None:
            hashes: Sequence[bytes] = request.block_hashes
            return hashes
        use = self._uses.get(request.request_id)
        return () if use is None or use.hashes is None else use.hashes

    def problem_of(self, request_id: str) -> str:
        """Return why a request has no hashes; empty if it has, or needs none of ours."""
        use = self._uses.get(request_id)
        return "" if use is None else use.problem

    def begun(self, request_id: str) -> None:
        """Take note that the engine gave a request blocks: it keeps what it knows."""
        if (use := self._uses.get(request_id)) is not None:
            use.is_spent = True

    def forget(self, request_id: str) -> None:
        """Let go of a request that is finished."""
        self._uses.pop(request_id, None)

    def close(self) -> None:
        """End the thread; one that hangs in a file system is left behind. Idempotent."""
        self._is_closed = True
        self._aside.close(_CLOSE_TIMEOUT_S)

    def _look(self, adapter: Any) -> _Look:  # noqa: ANN401 - vLLM's LoRARequest
        look = _Look(adapter)
        self._open = [one for one in self._open if not one.is_over]
        if self._is_shared(adapter):
            look.problem, look.is_over = _SHARED, True
            return look
        if self._is_closed or len(self._open) >= _MAX_OPEN:
            look.problem, look.is_over = _CROWDED, True
            if not self._is_closed:
                self._aside.begin()  # or none that waits would ever be over
            return look
        self._open.append(look)
        self._aside.put(look)
        return look

    def _is_shared(self, adapter: Any) -> bool:  # noqa: ANN401 - vLLM's LoRARequest
        """Return whether an adapter's number was seen with another path as well."""
        number, path = adapter.lora_int_id, str(adapter.lora_path)
        if number not in self._paths and len(self._paths) >= _MAX_NUMBERS:
            del self._paths[next(iter(self._paths))]
        if self._paths.setdefault(number, path) != path:
            self._paths[number] = ""  # of nobody, for good
        return not self._paths[number]

    def _pass_over(self, adapter: Any, problem: str) -> None:  # noqa: ANN401 - vLLM's
        self._counters.add("ucm_unkeyed_lookups_total", 1, reason=problem)
        path = str(adapter.lora_path)
        if problem not in _REMEDIES or path in self._told:
            return
        if len(self._told) < _MAX_KNOWN:
            self._told.add(path)
            self._log.warning(
                ADAPTER_PASSED, path=path, reason=problem, remedy=_REMEDIES[problem]
            )

    # On the thread.

    def _read(self, look: _Look) -> None:
        try:
            look.salt = self._files.salt_of(look.request)
        except _PassedOverError as exc:
            look.problem = str(exc)
        except (OSError, RuntimeError, ValueError):
            look.problem = _UNREADABLE  # RuntimeError: a home of nobody
        look.is_over = True


class _PassedOverError(Exception):
    """It is not known what the engine loaded; carries the reason."""


_Signature = tuple[tuple[str | int, ...], ...]


class _Files:
    """
    What adapters hold, read again only where something of them has changed.

    Args:
        settings: How the engine applies them.
        before_ns: What was changed later is not known; None: what was seen to change.
    """

    def __init__(self, settings: str, before_ns: int | None) -> None:
        self._settings = settings
        self._before_ns = before_ns
        self._known: dict[Path, tuple[_Signature, bytes]] = {}

    def salt_of(self, adapter: Any) -> bytes:  # noqa: ANN401 - vLLM's LoRARequest
        """
        Return the salt of a request's hashes.

        Raises:
            _PassedOverError: It may not be what the engine loaded.
            OSError: It cannot be read.
        """
        directory = Path(adapter.lora_path).expanduser().absolute()
        if getattr(adapter, "tensorizer_config_dict", None):
            raise _PassedOverError(_UNREADABLE)
        signature, changed_ns = _stamp(directory)
        known = self._known.get(directory)
        if self._before_ns is None:
            is_changed = known is not None and known[0] != signature
        else:
            is_changed = changed_ns >= self._before_ns
        if is_changed:
            raise _PassedOverError(_CHANGED)
        if known is None or known[0] != signature:
            known = signature, _digest(directory)
            if _stamp(directory)[0] != signature:
                raise _PassedOverError(_CHANGED)
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[directory] = known
        salt = hashlib.sha256(known[1])
        salt.update(
            f"{self._settings};{getattr(adapter, 'is_3d_lora_weight', False)}".encode()
        )
        return salt.digest()


def _files(directory: Path) -> list[Path]:
    found = [path for path in directory.iterdir() if path.suffix in _SUFFIXES]
    if not any(path.suffix != ".json" for path in found):
        raise FileNotFoundError(f"{directory} holds no adapter")
    return sorted(found)


def _digest(directory: Path) -> bytes:
    digest = hashlib.sha256()
    for path in _files(directory):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _stamp(directory: Path) -> tuple[_Signature, int]:
    """Return what changes with an adapter's files, and when the last of it did."""
    files = _files(directory)
    stats = [(str(path), os.stat(path)) for path in (directory, *files)]
    signature = tuple(
        (name, one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
        for name, one in stats
    )
    times = [one.st_ctime_ns for _, one in stats]
    return signature, max(times + [at for path in files for at in links_made_ns(path)])
