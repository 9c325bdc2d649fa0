# SPDX-License-Identifier: Apache-2.0
"""
Backends of tiers: whether they can be used and whether the other side answers.

``PROBES`` says how a type is tried; a type that is not there is opened, and asked for a block
that nobody has. Whoever writes a backend whose opening makes files adds a probe that does
not.
"""

import importlib.util
import mmap
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from ucm.agent.admission import admission_of
from ucm.backends._places import is_claimed
from ucm.backends.abc import Advice, Backend, Presence
from ucm.backends.disk._drive import MANIFEST as DISK
from ucm.backends.disk._drive import Manifest
from ucm.backends.disk._stamp import Geometry
from ucm.backends.files._share import MANIFEST as FILES
from ucm.backends.opening import open_backend
from ucm.blocks import BlockHash, BlockKey, GroupId, ShardId
from ucm.config import UCMConfig
from ucm.decoding import DECODE_ERRORS
from ucm.doctor.findings import Finding, fine, refused, warning, wrong
from ucm.doctor.place import within
from ucm.errors import ConfigError
from ucm.registry import how_to_install, load_class
from ucm.settings import read_section, size_text
from ucm.stores.slab import mount_of

__all__ = ["PROBES", "check_apart", "check_tier", "probe_by_opening", "read_tier"]

_Opener = Callable[[Mapping[str, object], str], Awaitable[Backend]]
_CHECK: Final = "tier"
_PAGE: Final = 4096


def check_tier(
    settings: Mapping[str, object],
    key: str,
    *,
    opener: _Opener = open_backend,
    seconds: float = 5.0,
    block_bytes: int = 0,
) -> Finding:
    """
    Try one tier.

    Args:
        settings: As in ``tiers``.
        key: What they are called, such as ``tiers.0``.
        opener: Opens a backend.
        seconds: Longest time for it to answer.
        block_bytes: Of a model's largest blocks, if they are known.
    """
    try:
        admission_of(settings, key)
        if block_bytes:
            _check_holds(settings, key, block_bytes)
            _check_made(settings, key, block_bytes, seconds)
        probe = PROBES.get(str(settings.get("type")))
        if probe is not None:
            return probe(settings, key, seconds)
        return anyio.run(probe_by_opening, settings, key, opener, seconds)
    except ConfigError as exc:
        return refused(_CHECK, exc)
    except OSError as exc:
        return wrong(_CHECK, f"{key}: {exc}", "Look at its settings and at the mount.")


async def probe_by_opening(
    settings: Mapping[str, object], key: str, opener: _Opener, seconds: float
) -> Finding:
    """
    Open a backend, ask for a block that nobody has, and close it.

    Raises:
        ConfigError: A setting is wrong, or packages are missing.
    """
    name = f"{key} ({settings.get('type')})"
    nobodys = BlockKey(
        secrets.token_bytes(16),
        GroupId(0),
        ShardId(0),
        BlockHash(secrets.token_bytes(32)),
    ).pack()
    backend: Backend | None = None
    advice: Sequence[Advice] = ()
    presence, start = Presence.UNKNOWN, time.perf_counter()
    with anyio.move_on_after(seconds) as scope:
        try:
            backend = await opener(settings, key)
            (presence,) = await backend.exists([nobodys])
            taken = time.perf_counter() - start
            if presence is Presence.ABSENT:  # else there is worse to be told
                advice = await backend.advice()
        finally:
            if backend is not None:
                with anyio.CancelScope(shield=True, deadline=scope.deadline + seconds):
                    await backend.aclose()
    if scope.cancelled_caught and presence is Presence.UNKNOWN:
        return wrong(_CHECK, f"{name} did not answer in {seconds:g} s", _DOWN)
    if presence is Presence.UNKNOWN:
        return wrong(_CHECK, f"{name} is down: it could not be asked", _DOWN)
    if presence is Presence.AWAY:
        return wrong(_CHECK, f"a server of {name} does not answer, others do", _DOWN)
    if presence is Presence.PRESENT:
        text = f"{name} says that it has a block that nobody stored"
        return wrong(_CHECK, text, "Look what answers there; it is no store of blocks.")
    if advice:
        problems = "; ".join(each.problem for each in advice)
        remedies = " ".join(each.remedy for each in advice)
        return warning(_CHECK, f"{name} answers; {problems}", remedies)
    return fine(_CHECK, f"{name} answers; opened and asked in {taken * 1000:.2g} ms")


_DOWN: Final = (
    "See whether it runs and whether address, credentials and network are right. An "
    "engine starts without it and joins it when it answers."
)


def read_tier(settings: Mapping[str, object], key: str) -> Any:  # noqa: ANN401 - a class for each type
    """
    Return the settings of a tier as its backend reads them; None if it is none of ours.

    Nothing is opened.

    Args:
        settings: As in ``tiers``.
        key: What they are called, such as ``tiers.0``.

    Raises:
        ConfigError: A setting is wrong, or packages are missing.
    """
    admission_of(settings, key)
    theirs = ("type", "admission")  # the rest is for the backend alone
    rest = {name: settings[name] for name in settings if name not in theirs}
    backend = load_class("ucm.backends", str(settings.get("type")), f"{key}.type")
    if not backend.__module__.startswith("ucm.backends."):
        return None
    name = backend.__name__.removesuffix("Backend") + "Settings"
    read: Any = read_section(
        getattr(sys.modules[backend.__module__], name), rest, f"{key}."
    )
    for needed, remedy in _NEEDED.items():
        if not getattr(read, needed, True):
            raise ConfigError(f"{key}.{needed}", "", "missing", remedy)
    _check_client(str(settings["type"]), key)
    return read


def check_apart(config: UCMConfig) -> None:
    """
    Refuse a directory that two are to fill, of which the agent finds the second taken.

    Raises:
        ConfigError: Two tiers have it, unless both are of files, or a tier and the slab; or a setting of a
            tier is wrong.
    """
    taken = {Path(config.store.path).absolute(): ("store.path", "slab")}
    for number, tier in enumerate(config.tiers):
        key, kind = f"tiers.{number}", str(tier["type"])
        path = getattr(read_tier(tier, key), "path", ())
        for each in (path,) if isinstance(path, Path) else path:
            other, its_kind = taken.setdefault(each, (key, kind))
            if other != key and (kind, its_kind) != ("files", "files"):
                problem, remedy = f"{other} has it, too", "Give each one its own."
                raise ConfigError(f"{key}.path", str(each), problem, remedy)


def _check_client(kind: str, key: str) -> None:
    """
    Refuse a type whose client's package is missing, where its backend imports that late.

    Raises:
        ConfigError: It is.
    """
    module = _CLIENTS.get(kind, "ucm")
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ValueError:  # somebody keeps it from being imported
        is_there = False
    if not is_there:
        problem = f"cannot be imported (No module named {module!r})"
        raise ConfigError(f"{key}.type", kind, problem, how_to_install(kind))


def _check_holds(settings: Mapping[str, object], key: str, nbytes: int) -> None:
    """
    Refuse a tier that is too small for a block.

    Raises:
        ConfigError: It is.
    """
    read = read_tier(settings, key)
    if (most := getattr(read, "max_block_bytes", nbytes)) < nbytes:
        problem = f"it takes blocks of up to {size_text(most)}, and the model's have "
        remedy = "Give so much that many blocks fit, such as 64GiB."
        raise ConfigError(
            f"{key}.capacity", read.capacity, problem + size_text(nbytes), remedy
        )


def _check_made(
    settings: Mapping[str, object], key: str, nbytes: int, seconds: float
) -> None:
    """
    Refuse a drive that was made when its capacity was too small for a block: it stays cut so.

    Raises:
        ConfigError: It was.
    """
    is_disk = settings.get("type") == "disk"
    for path in read_tier(settings, key).path if is_disk else ():
        extent_bytes = within(seconds, partial(_extents_of, path))
        most = Geometry(1, extent_bytes).max_block_bytes if extent_bytes else nbytes
        if most < nbytes:
            problem = f"it was made with less capacity, for blocks of up to {size_text(most)}, and the model's have "
            remedy = "Stop its engines and their agent, and remove the directory."
            raise ConfigError(
                f"{key}.path", str(path), problem + size_text(nbytes), remedy
            )


def _extents_of(path: Path) -> int:
    """Return how many bytes an extent of a drive has; 0 where there is none, which others tell."""
    try:
        text = (path / DISK).read_bytes()
        return msgspec.json.decode(text, type=Manifest).extent_bytes
    except (OSError, *DECODE_ERRORS):
        return 0


_NEEDED: Final = {"path": "Give a directory.", "url": "Give the address of a server."}
"""What a tier cannot be without, if its backend has such a setting."""
_CLIENTS: Final = {"mooncake": "mooncake", "yuanrong": "yr"}
"""Packages that a backend imports only once it is opened, by its type."""


def _probe_drives(settings: Mapping[str, object], key: str, seconds: float) -> Finding:
    """
    Look at the directories of a ``disk`` tier; opening it would allocate its files.

    Raises:
        ConfigError: A setting is wrong.
    """
    read = read_tier(settings, key)
    share = read.capacity // len(read.path)
    promised = Counter[int]()  # bytes of each file system, to the drives before
    told, cached = [], []
    for path in read.path:
        _check_claim(path, DISK, key, seconds)
        place = path if path.is_dir() else path.parent
        tried = within(seconds, lambda place=place: _try_drive(place))  # type: ignore[misc]  # bound now
        if tried is None or tried.problem:
            why = tried.problem if tried else "it does not answer"
            return wrong(_CHECK, f"{key} (disk): {place}: {why}", "Look at the mount.")
        free, device, own = os.statvfs(place), place.stat().st_dev, _allocated(path)
        left = max(0, free.f_bavail * free.f_frsize - promised[device]) + own
        if left < share:
            text = f"{key} (disk): {path} has room for {size_text(left)} of {size_text(share)}"
            return wrong(
                _CHECK, text, "Set its capacity to less, or use a larger drive."
            )
        promised[device] += max(0, share - own)
        told.append(f"{path} ({tried.kind})")
        cached += [] if tried.takes_direct else told[-1:]
    if cached:
        return warning(
            _CHECK,
            f"{key} (disk): {', '.join(cached)} takes no O_DIRECT",
            "It works by way of the page cache; a local ext4 or xfs is faster.",
        )
    return fine(
        _CHECK, f"{key} (disk): {size_text(read.capacity)} fit in {', '.join(told)}"
    )


class _Drive(NamedTuple):
    """What a directory lies on, whether it takes O_DIRECT, and what prevents files."""

    kind: str = ""
    takes_direct: bool = False
    problem: str = ""


def _try_drive(directory: Path) -> _Drive:
    """Try a directory with a file that has no name; nothing of it stays."""
    try:
        kind = mount_of(directory).kind
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        return _Drive(problem=exc.strerror or "it cannot be asked")
    try:
        return _Drive(kind, _takes_direct(fd))
    finally:
        os.close(fd)


def _takes_direct(fd: int) -> bool:
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _PAGE) as page:  # aligned, as it must be
            return os.pwrite(direct, page, 0) == _PAGE
    except OSError:
        return False
    finally:
        os.close(direct)


def _probe_share(settings: Mapping[str, object], key: str, seconds: float) -> Finding:
    """
    Look at the mount of a ``files`` tier; opening it would make its directories.

    Raises:
        ConfigError: A setting is wrong.
    """
    path: Path = read_tier(settings, key).path
    _check_claim(path, FILES, key, seconds)
    told = within(seconds, lambda: _look_at(path))
    if told is None:
        return wrong(
            _CHECK, f"{key} (files): {path} does not answer", "Look at the mount."
        )
    taken, problem = told
    if problem:
        return wrong(_CHECK, f"{key} (files): {path}: {problem}", "Look at the mount.")
    return fine(_CHECK, f"{key} (files): {path} answers in {taken * 1000:.2g} ms")


def _look_at(path: Path) -> tuple[float, str]:
    """Return how long a mount takes to answer, and what is wrong with it."""
    start = time.perf_counter()
    try:
        place = path if path.is_dir() else path.parent
        os.statvfs(place)
        problem = "" if os.access(place, os.W_OK) else "nobody may write there"
    except OSError as exc:
        problem = exc.strerror or "it cannot be asked"
    return time.perf_counter() - start, problem


def _check_claim(path: Path, manifest: str, key: str, seconds: float) -> None:
    """
    Look at a directory as its backend will; what does not answer is found behind this.

    Raises:
        ConfigError: The backend will refuse it.
    """

    def refusal() -> ConfigError | None:
        try:
            is_claimed(path, manifest, f"{key}.path")
        except ConfigError as exc:
            return exc
        except OSError:
            return None
        return None

    if (found := within(seconds, refusal)) is not None:
        raise found


def _allocated(path: Path) -> int:
    """Return what the tier's own files have already."""
    try:
        with os.scandir(path) as entries:
            return sum(512 * entry.stat().st_blocks for entry in entries)
    except OSError:
        return 0


PROBES: Final[dict[str, Callable[[Mapping[str, object], str, float], Finding]]] = {
    "disk": _probe_drives,
    "files": _probe_share,
}
"""How a type of tier is tried, where opening it would change something."""
