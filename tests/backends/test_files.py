# SPDX-License-Identifier: Apache-2.0
"""Blocks as files on a shared mount: the contract, and what others do there meanwhile."""

import errno
import math
import os
import threading

import anyio
import anyio.lowlevel
import pytest

from tests.native_kit import way  # noqa: F401  a fixture
from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.files import (
    FilesBackend,
    _backend,
    _identity,
    _room,
    _share,
    _writing,
)
from ucm.backends.wrap import DeadlineBackend
from ucm.testing.backend_contract import (
    BLOCK,
    BackendContract,
    fetch,
    fetch_sound,
    seal,
)
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

MOST = 16
KEYS = make_keys(4)


pytestmark = pytest.mark.usefixtures("way")
"""Read by few calls from Python, and by one for each that the system does."""


BY_PYTHON = pytest.mark.parametrize("way", ["python"], indirect=True)


async def open_files(path, /, **settings):
    """Open a files backend that marks each use, and waits for each walk."""
    given = {"path": str(path), "capacity": 1 << 24, "threads": 4, "touch_seconds": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_room, "_PATIENCE_S", 120.0)  # for a machine that is busy
        return await FilesBackend.open_configured(given | settings, "tiers.0")


def find(path, key):
    """Return the file of a block; None if there is none."""
    files = list((path / "blocks").glob(f"*/*/{key.hex()}"))
    return files[0] if files else None


class TestFilesBackend(BackendContract):
    """A directory below the place."""

    async def open(self, place):
        """Open the directory; two at a time share it."""
        return await open_files(place / "share")

    async def open_small(self, place):
        """Open one for sixteen blocks."""
        return await open_files(place / "share", capacity=MOST * (BLOCK + 128))

    def get_raw(self, place, key):
        """Read the file."""
        file = find(place / "share", key)
        return file.read_bytes() if file else None

    def put_raw(self, place, key, raw):
        """Write the file."""
        find(place / "share", key).write_bytes(raw)

    def leftovers(self, place):
        """Look for what is being written."""
        return os.listdir(place / "share" / "writing")


@pytest.fixture
def root(tmp_path):
    """Return where the share is."""
    return tmp_path / "share"


async def put(backend, *keys, nbytes=BLOCK):
    """Put blocks; return what became of them."""
    return await backend.put([seal(key, nbytes) for key in keys])


async def collected(backend):
    """Wait for the collection that opening has begun."""
    await backend._room._collect()
    return await backend.stats()


@pytest.mark.asyncio
class TestOrphans:
    @pytest.mark.parametrize("at", [1.0, 1e10, None])
    @pytest.mark.parametrize("owner", ["dead", "elsewhere", "foreign", "alive"])
    async def test_old_remains_without_a_living_owner_are_removed(
        self, root, owner, at
    ):
        """X-03: at the start, by age on the share's clock, also if that was set back, and never
        a living writer's, or what no writer of ours has named."""
        await (await open_files(root)).aclose()
        me = _identity.identity(os.getpid())
        boot, _, start = me.split(".")
        name = {
            "dead": f"{boot}.{os.getpid()}.1{start}.7",
            "elsewhere": f"{'0' * 32}.1.1.7",
            "foreign": "\x1b[31m.nfs0000",
            "alive": f"{me}.99999",
        }[owner]
        file = root / "writing" / name
        file.write_bytes(b"half")
        if at is not None:
            os.utime(file, (at, at))
        backend = await open_files(root)
        stats = await collected(backend)
        is_gone = at is not None and owner in ("dead", "elsewhere")
        assert (not is_gone, int(is_gone)) == (file.exists(), stats.swept_total)
        await backend.aclose()

    async def test_what_is_not_ours_stays_and_is_no_hindrance(self, root):
        """X-03: a share is collected around what somebody has put there."""
        backend = await open_files(root, capacity=2 * (BLOCK + 128))
        folder = root / "writing" / f"{'0' * 32}.1.1.7"
        folder.mkdir()
        await put(backend, KEYS[0])
        note = find(root, KEYS[0]).with_name("notes.txt")
        note.write_bytes(b"x" * 9 * BLOCK)
        os.utime(folder, (1.0, 1.0))
        os.utime(note, (1.0, 1.0))
        stats = await collected(backend)
        ends = stats.swept_total, stats.evicted_blocks_total
        assert (1, 0, 0) == (stats.blocks, *ends)
        assert (True, 9 * BLOCK) == (folder.is_dir(), note.stat().st_size)
        assert [True] == await fetch_sound(backend, KEYS[:1])
        await backend.aclose()

    async def test_blocks_are_no_orphans(self, root):
        """However old they are."""
        backend = await open_files(root, orphan_seconds=0)
        await put(backend, *KEYS)
        for key in KEYS:
            os.utime(find(root, key), (1.0, 1.0))
        assert 0 == (await collected(backend)).swept_total
        assert [True] * 4 == await fetch_sound(backend, KEYS)
        await backend.aclose()


@pytest.mark.asyncio
class TestShared:
    async def test_room_is_shared(self, root):
        """What another machine puts counts, and the oldest use of all goes first."""
        most = 16 * (BLOCK + 128)
        one, other = [await open_files(root, capacity=most) for _ in range(2)]
        keys = make_keys(20)
        await put(one, *keys[:7])
        await put(other, *keys[7:14])
        for at, key in enumerate(keys[:14]):
            os.utime(find(root, key), (at, at))
        assert [True] == await fetch_sound(other, keys[:1])
        await put(one, *keys[14:])
        stats = await one.stats()
        assert (15, 5) == (stats.blocks, stats.evicted_blocks_total)
        assert 15 == sum(1 for _ in (root / "blocks").glob("*/*/*"))
        there = await fetch_sound(one, keys)
        assert [True, *[False] * 5, *[True] * 14] == there
        await one.aclose()
        await other.aclose()

    async def test_mount_that_is_gone_has_no_answer(self, root):
        """R-51: an empty mount point says of no block that it is not there, and to nobody that
        it is forgotten."""
        backend = await open_files(root)
        await put(backend, *KEYS[:2])
        await backend.delete(KEYS[1:2])
        told = await backend.exists(KEYS[:2])
        assert [Presence.PRESENT, Presence.ABSENT] == told
        root.rename(root.with_name("elsewhere"))
        root.mkdir()
        assert [Presence.UNKNOWN] * 2 == await backend.exists(KEYS[:2])
        ((got, _),) = await fetch(backend, KEYS[:1])
        assert Fetched(Verdict.UNAVAILABLE) == got
        assert [Verdict.UNAVAILABLE] == await backend.delete(KEYS[:1])
        assert [Verdict.UNAVAILABLE] == await put(backend, KEYS[2])
        await backend.aclose()

    @BY_PYTHON
    async def test_file_system_without_links_takes_renames(self, root, monkeypatch):
        """X-02: two writers of one key still leave one whole block, and no remains."""

        def link(*args):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", link)
        backend = await open_files(root)
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(put, backend, *KEYS)
        assert [True] * 4 == await fetch_sound(backend, KEYS)
        await backend.aclose()
        assert [] == os.listdir(root / "writing")

    @BY_PYTHON
    async def test_writers_of_one_key_have_files_of_their_own(self, root, monkeypatch):
        """X-02: two that write at the same time both come to an end, neither in vain."""
        one, other = await open_files(root), await open_files(root)
        both, real = threading.Barrier(2), _writing.write_whole

        def write(*args):
            both.wait(60.0)
            real(*args)

        monkeypatch.setattr(_writing, "write_whole", write)
        verdicts = []

        async def put_by(backend):
            verdicts.extend(await put(backend, KEYS[0]))

        async with anyio.create_task_group() as group:
            group.start_soon(put_by, one)
            group.start_soon(put_by, other)
        assert {Verdict.DONE, Verdict.PRESENT} == set(verdicts)
        assert [True] == await fetch_sound(other, KEYS[:1])
        await one.aclose()
        await other.aclose()
        assert [] == os.listdir(root / "writing")

    @pytest.mark.parametrize("kind", ["fifo", "link", "directory", "huge"])
    async def test_strange_things_in_a_blocks_place_are_garbage(self, root, kind):
        """None hangs, is followed or is read whole."""
        backend = await open_files(root)
        await put(backend, KEYS[0])
        file = find(root, KEYS[0])
        real = file.with_suffix(".real")
        file.rename(real)
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to(real)
        elif kind == "directory":
            file.mkdir()
        else:
            file.touch()
            os.truncate(file, 1 << 40)
        ((got, _),) = await fetch(backend, KEYS[:1])
        assert Verdict.GARBAGE is got.verdict
        await backend.aclose()


class Mount:
    """Calls of the kernel that hang or fail while the mount's server is away."""

    def __init__(self, monkeypatch, *names):
        self.error, self.gate = 0, None
        for name in names:
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self.around(real))

    def around(self, real):
        """Return a call that meets the mount's state first."""

        def call(*args, **kwargs):
            if self.gate is not None:
                self.gate()
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        return call


@BY_PYTHON  # the calls of which are put in the way of
@pytest.mark.asyncio
class TestHung:
    @pytest.mark.parametrize("verb", ["exists", "get", "put", "delete"])
    async def test_call_on_a_hung_mount_ends_at_its_deadline(
        self, root, monkeypatch, verb
    ):
        """X-14, R-51: no answer in time; threads that hang are bounded, and serve again
        when the mount is back; what they did late harms nobody."""
        backend = await open_files(root, threads=2)
        await put(backend, KEYS[0])
        await collected(backend)
        mount = Mount(monkeypatch, "stat", "open", "unlink")
        mount.gate = Gate()
        late = DeadlineBackend(backend, 0.05)
        target = bytearray(BLOCK)
        calls = {
            "exists": (lambda: late.exists(KEYS[:1]), Presence.UNKNOWN),
            "get": (
                lambda: late.get(KEYS[:1], [memoryview(target)]),
                Fetched(Verdict.UNAVAILABLE),
            ),
            "put": (lambda: put(late, KEYS[1]), Verdict.UNAVAILABLE),
            "delete": (lambda: late.delete(KEYS[:1]), Verdict.UNAVAILABLE),
        }
        call, wanted = calls[verb]
        for _ in range(4):
            assert [wanted] == await call()
        hung = 1 if verb == "put" else 2  # and who tells that it was given up
        assert (hung, hung) == (backend._crew.num_hung, late.num_late)
        mount.gate.open()
        while backend._crew.num_hung:
            await anyio.lowlevel.checkpoint()
        assert bytearray(BLOCK) == target
        assert None is find(root, KEYS[1])
        assert [Verdict.DONE] == await put(backend, KEYS[2])
        assert [True] == await fetch_sound(backend, KEYS[2:3])
        await backend.aclose()
        assert [] == os.listdir(root / "writing")

    async def test_mount_that_hangs_at_the_start_is_no_error(self, root, monkeypatch):
        """It has no answers until it is back; nothing waits for it."""
        monkeypatch.setattr(_backend, "_OPENING_S", 0.01)
        gate, real = Gate(), _share.claim
        monkeypatch.setattr(_share, "claim", lambda *args: gate() or real(*args))
        backend = await open_files(root)
        assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
        assert [Verdict.UNAVAILABLE] == await put(backend, KEYS[0])
        gate.open()
        await backend._claim.wait()
        assert [Verdict.DONE] == await put(backend, KEYS[0])
        await backend.aclose()

    async def test_share_whose_server_is_away_joins_by_itself(self, root, monkeypatch):
        """A backend that is merely down when it is opened is tried again."""
        real, is_away = _share.claim, [True]

        def claim(*args):
            if is_away:
                raise OSError(errno.ESTALE, "stale")
            return real(*args)

        monkeypatch.setattr(_share, "claim", claim)
        backend = await open_files(root)
        assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
        is_away.clear()
        while [Presence.UNKNOWN] == await backend.exists(KEYS[:1]):
            await backend._claim.wait()
        assert [Presence.ABSENT] == await backend.exists(KEYS[:1])
        await backend.aclose()

    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (errno.ENOSPC, Verdict.FULL),
            (errno.EDQUOT, Verdict.FULL),
            (errno.EIO, Verdict.UNAVAILABLE),
            (errno.ESTALE, Verdict.UNAVAILABLE),
        ],
    )
    async def test_error_is_told_apart_from_an_answer(
        self, root, monkeypatch, error, verdict
    ):
        """R-51: full is full; what could not be asked is neither there nor absent."""
        backend = await open_files(root)
        await put(backend, KEYS[0])
        await collected(backend)
        mount = Mount(monkeypatch, "stat", "open", "writev")
        mount.error = error
        assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
        ((got, _),) = await fetch(backend, KEYS[:1])
        assert Fetched(Verdict.UNAVAILABLE) == got
        backend._room._short_from = (
            math.inf
        )  # nor is room made yet, for which one would go
        assert [verdict] == await put(backend, KEYS[1])
        mount.error = 0
        assert [True, False] == await fetch_sound(backend, KEYS[:2])
        await backend.aclose()
