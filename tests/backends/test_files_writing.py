# SPDX-License-Identifier: Apache-2.0
"""How files of blocks are written: by few native calls, and by Python's own; both do the same."""

import errno
import os
import stat
from pathlib import Path

import anyio
import numpy as np
import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from tests.backends.test_files import KEYS, collected, find, open_files, put
from tests.kit.hooked import NOTHING, Hooked
from tests.native_kit import build
from ucm import native, xxh3
from ucm.backends._gate import Gate
from ucm.backends.abc import Presence, Verdict
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.files import _writing
from ucm.backends.files._reading import LEFT, WRONG
from ucm.backends.files._writing import DAMAGED, Given, PlainWriter, find_writer
from ucm.backends.wrap import DeadlineBackend
from ucm.testing import faults
from ucm.testing.backend_contract import BLOCK, fetch_sound
from ucm.testing.store_blocks import make_keys

_INTERRUPTED = Path(__file__).parents[1] / "kit" / "interrupted.h"
LENGTHS = (1, 4096, 77777)
SEED = 2**64 - 5
NO_RENAMES = {"renameat2": errno.EINVAL}
"""Of a mount that cannot rename without taking another file's place, as those over a network."""


class Mount(Hooked):
    """What becomes of calls to the system; those of Python and those of native code alike."""

    def be_in_python(self, monkeypatch):
        """Stand before the calls of Python."""

        class System:
            """The module ``os``, of which some calls are hooked."""

            def __getattr__(_, name):  # noqa: N805 - of the class within
                return self._around(name, getattr(os, name))

        monkeypatch.setattr(_writing, "os", System())
        monkeypatch.setattr("ucm.backends._places.os", System())

    def _around(self, name, real):
        if name not in ("open", "stat", "link", "writev", "close", "mkdir"):
            return real

        def call(*args, **how):
            error = self.meet(name)
            if name == "close":
                real(*args)
            if error == NOTHING:
                return 0
            if error:
                raise OSError(error, os.strerror(error))
            return None if name == "close" else real(*args, **how)

        return call


@pytest.fixture(params=["native", "python"])
def mount(request, tmp_path_factory, monkeypatch):
    """Write by either way, to a mount that a test sets."""
    mount, library = Mount(), None
    if request.param == "native":
        library = mount.build(tmp_path_factory.mktemp("hooked"))
    else:
        mount.be_in_python(monkeypatch)
    monkeypatch.setattr(native, "LIBRARY", library)
    return mount


@pytest.fixture
def writer(mount):
    """Return a writer of each kind."""
    return find_writer(native.LIBRARY, is_lasting=False)


def give(root, name, nbytes=5):
    """Return a file to be written, and make where it is before it has its name."""
    content = np.random.default_rng(nbytes).bytes(HEADER_BYTES + nbytes)
    folder = root / "blocks" / "aa" / "bb"
    for made in ("writing", "blocks"):
        (root / made).mkdir(exist_ok=True)
    names = root / "writing" / name, folder / name
    data = memoryview(content[HEADER_BYTES:])
    checksum = xxh3_64_intdigest(data, SEED)
    return Given(*map(bytes, names), content[:HEADER_BYTES], data, SEED, checksum)


def place(name):
    """Return where a name leads."""
    return Path(os.fsdecode(name))


def is_written(given):
    """Return whether a file has its name, and all its bytes."""
    return place(given.path).read_bytes() == given.header + bytes(given.data)


class TestWriting:
    def test_header_and_bytes_are_there_for_nobody_else(self, writer, tmp_path):
        """Of files of all lengths by one call, though the system takes few bytes at a time; folders
        are made where there are none, and nothing is left where they were written."""
        given = [give(tmp_path, str(n), n) for n in LENGTHS]
        assert [0] * 3 == writer.write(given, Gate())
        assert [True] * 3 == list(map(is_written, given))
        assert [] == os.listdir(tmp_path / "writing")
        modes = [os.stat(each.path).st_mode for each in given]
        assert {0o600} == set(map(stat.S_IMODE, modes))
        assert 0o700 == stat.S_IMODE(os.stat(place(given[0].path).parent).st_mode)

    def test_folders_are_nobody_else_s_whatever_others_may(self, writer, tmp_path):
        """R-24: where the process lets all write to what it makes, nobody can put blocks there."""
        given = give(tmp_path, "one")
        before = os.umask(0)
        try:
            assert [0] == writer.write([given], Gate())
        finally:
            os.umask(before)
        folder = place(given.path).parent
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)]
        assert [0o700] * 2 == modes

    def test_block_that_is_there_stays_and_nothing_is_written(
        self, mount, writer, tmp_path
    ):
        """X-02: whatever lies there, a link to nowhere as well; others are written."""
        given = [give(tmp_path, name) for name in ("there", "link", "new")]
        place(given[0].path).parent.mkdir(parents=True)
        place(given[0].path).write_text("old")
        place(given[1].path).symlink_to("nowhere")
        told = writer.write(given, Gate())
        assert [errno.EEXIST, errno.EEXIST, 0] == told
        assert 1 == mount.calls.count("open")
        assert ("old", True) == (place(given[0].path).read_text(), is_written(given[2]))

    @pytest.mark.parametrize("errors", [{}, NO_RENAMES], ids=["renames", "links"])
    def test_later_writer_leaves_the_first_ones_block(
        self, mount, writer, tmp_path, errors
    ):
        """X-02: who comes second, having seen nothing, is told so and cleans up."""
        given = give(tmp_path, "one")

        def race(name):
            if name in ("link", "renameat2") and not place(given.path).exists():
                place(given.path).parent.mkdir(parents=True)
                place(given.path).write_text("first")

        mount.before = race
        mount.errors |= errors
        assert [errno.EEXIST] == writer.write([given], Gate())
        assert "first" == place(given.path).read_text()
        assert [] == os.listdir(tmp_path / "writing")

    def test_mount_without_such_renames_takes_links(self, mount, writer, tmp_path):
        """R-51: a block has one name then, too."""
        given = give(tmp_path, "one")
        mount.errors |= NO_RENAMES
        assert [0] == writer.write([given], Gate())
        assert is_written(given)
        assert [] == os.listdir(tmp_path / "writing")

    @pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_file_system_without_links_takes_renames(
        self, mount, writer, tmp_path, error
    ):
        """X-02: into folders that are there and such as are not."""
        mount.errors |= {"link": error, "renameat2": error}
        given = [give(tmp_path, name) for name in ("one", "other")]
        assert [0, 0] == writer.write(given, Gate())
        assert [True, True] == list(map(is_written, given))
        assert [] == os.listdir(tmp_path / "writing")

    @pytest.mark.parametrize("call", ["open", "writev", "close", "link", "mkdir"])
    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ESTALE])
    def test_error_of_each_call_is_told_and_leaves_nothing(
        self, mount, writer, tmp_path, call, error
    ):
        """R-51: of a mount that is full, too, which some tell when a file is closed."""
        mount.errors |= {call: error, **NO_RENAMES}
        given = give(tmp_path, "one")
        assert [error] == writer.write([given], Gate())
        assert not place(given.path).exists()
        assert [] == os.listdir(tmp_path / "writing")

    def test_damaged_bytes_get_no_name(self, writer, tmp_path):
        """A byte is not what the checksum says, in whichever piece: others are written all the same."""
        lengths = (1, 5, 1_300_000, 1_300_000)
        given = [give(tmp_path, str(at), n) for at, n in enumerate(lengths)]
        for at, which in ((0, 0), (2, 0), (3, -1)):
            damaged = bytearray(given[at].data)
            damaged[which] ^= 1
            given[at] = replace(given[at], data=memoryview(damaged))
        wanted = [DAMAGED, 0, DAMAGED, DAMAGED]
        assert wanted == writer.write(given, Gate())
        assert [not told for told in wanted] == [
            place(each.path).exists() for each in given
        ]
        assert [] == os.listdir(tmp_path / "writing")

    def test_mount_that_takes_nothing_is_not_asked_for_ever(
        self, mount, writer, tmp_path
    ):
        """R-51: one that tells no error either fails."""
        mount.errors["writev"] = NOTHING
        given = give(tmp_path, "one")
        assert [errno.EIO] == writer.write([given], Gate())
        assert 1 == mount.calls.count("writev")

    def test_name_that_somebody_has_taken_is_not_followed(self, writer, tmp_path):
        """R-24: a link in place of a file that is being written has nothing written to its target."""
        given, victim = give(tmp_path, "one"), tmp_path / "victim"
        victim.write_text("theirs")
        place(given.temporary).symlink_to(victim)
        assert [WRONG] == writer.write([given], Gate())
        assert ("theirs", False) == (victim.read_text(), place(given.path).exists())

    def test_file_in_a_folders_place_is_no_block(self, writer, tmp_path):
        """R-51: nobody says of a block that it is there, which is not."""
        given = give(tmp_path, "one")
        place(given.path).parent.parent.touch()
        (told,) = writer.write([given], Gate())
        assert told not in (0, errno.EEXIST)

    def test_signal_that_comes_meanwhile_changes_nothing(self, tmp_path):
        """R-51: on a mount over a network each call may be interrupted."""
        writer = find_writer(
            build(tmp_path, "-include", str(_INTERRUPTED)), is_lasting=False
        )
        given = give(tmp_path, "one")
        assert [0] == writer.write([given], Gate())
        assert is_written(given)

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
    def test_error_of_a_rename_is_told_and_leaves_nothing(self, tmp_path, error):
        """R-51: only what says that a mount has no such renames has another way tried."""
        (tmp_path / "built").mkdir()
        mount = Mount()
        mount.errors["renameat2"] = error
        writer = find_writer(mount.build(tmp_path / "built"), is_lasting=False)
        given = give(tmp_path, "one")
        assert [error] == writer.write([given], Gate())
        assert "link" not in mount.calls
        assert not place(given.path).exists()
        assert [] == os.listdir(tmp_path / "writing")

    def test_digests_that_are_not_known_are_compared_by_python(self, monkeypatch):
        """Where xxhash is another build, no file is written that nobody has compared."""
        monkeypatch.setattr(xxh3, "DIGESTER", None)
        assert isinstance(find_writer(native.LIBRARY, is_lasting=False), PlainWriter)

    def test_nothing_is_done_for_nobody(self, writer):
        """Of no files."""
        assert [] == writer.write([], Gate())

    def test_what_is_to_outlast_power_is_flushed(self):
        """By the way that does."""
        assert isinstance(find_writer(native.LIBRARY, is_lasting=True), PlainWriter)


@pytest.mark.asyncio
async def test_call_has_several_files_for_each_thread(mount, tmp_path):
    """As many as serve it best, by one native call each: what a call takes besides is for all of
    them."""
    backend, sizes = await open_files(tmp_path / "share"), []
    write = backend._share._writer.write

    class Writer:
        """Knows how many were written by each call."""

        def write(self, given, gate):
            """Write."""
            sizes.append(len(given))
            return write(given, gate)

    backend._share._writer = Writer()
    keys = make_keys(backend.capabilities.batch_blocks)
    assert {Verdict.DONE} == set(await put(backend, *keys))
    assert [16] * 4 == sizes
    await backend.aclose()


@pytest.mark.asyncio
async def test_directory_may_have_any_bytes_for_a_name(mount, tmp_path):
    """What is no text, too: blocks are put, found, got and deleted."""
    root = tmp_path / os.fsdecode(b"\xff\xe9")
    backend = await open_files(root)
    assert [Verdict.DONE] * 2 == await put(backend, *KEYS[:2])
    assert [Verdict.PRESENT] == await put(backend, KEYS[0])
    assert [True] * 2 == await fetch_sound(backend, KEYS[:2])
    assert [Verdict.DONE] == await backend.delete(KEYS[:1])
    assert [Presence.ABSENT, Presence.PRESENT] == await backend.exists(KEYS[:2])
    await backend.aclose()


class TestGate:
    @pytest.mark.parametrize("call", ["writev", "close"])
    def test_who_leaves_amid_a_write_has_nothing_put(
        self, mount, writer, tmp_path, call
    ):
        """X-14: bytes that may be another block's by then get no name, nor does what would follow."""
        given, gate = [give(tmp_path, name) for name in ("one", "other")], Gate()
        mount.before = lambda name: gate.leave() if name == call else None
        assert [LEFT, LEFT] == writer.write(given, gate)
        assert [False, False] == [place(each.path).exists() for each in given]
        assert 1 == mount.calls.count("open")
        assert [] == os.listdir(tmp_path / "writing")

    def test_who_leaves_amid_a_block_has_no_more_of_it_written(self, tmp_path):
        """X-14: a thread that came back goes through no megabytes that nobody wants, or has any more."""
        (tmp_path / "built").mkdir()
        mount, gate, sizes = Mount(), Gate(), []
        writer = find_writer(mount.build(tmp_path / "built"), is_lasting=False)
        given = give(tmp_path, "one", 3 << 20)

        def leave(name):
            if name == "writev":
                gate.words[0] = 1
            if name == "close":
                sizes.append(os.path.getsize(given.temporary))

        mount.before = leave
        assert [LEFT] == writer.write([given], gate)
        assert [HEADER_BYTES + (1 << 20)] == sizes
        assert [] == os.listdir(tmp_path / "writing")

    @pytest.mark.asyncio
    async def test_put_on_a_hung_mount_ends_at_its_deadline(self, mount, tmp_path):
        """X-14, R-51: no answer in time, and nothing is put late; behind it the mount serves again."""
        root, gate = tmp_path / "share", faults.Gate()
        backend = await open_files(root, threads=2)
        await collected(backend)
        mount.before = lambda name: gate() if name == "writev" else None
        late = DeadlineBackend(backend, 0.05)
        assert [Verdict.UNAVAILABLE] * 2 == await put(late, *KEYS[:2])
        assert 0 < backend._crew.num_hung
        gate.open()
        while backend._crew.num_hung:
            await anyio.lowlevel.checkpoint()
        assert [None, None] == [find(root, key) for key in KEYS[:2]]
        assert [Verdict.DONE] == await put(backend, KEYS[2])
        assert [True] == await fetch_sound(backend, KEYS[2:3])
        await backend.aclose()
        assert [] == os.listdir(root / "writing")

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("error", "refused"), [(errno.ENOSPC, BLOCK), (errno.EFBIG, 0)]
    )
    async def test_mount_that_is_full_is_told_so(self, mount, tmp_path, error, refused):
        """R-51: blocks are refused as full; a file that is too large for it is no lack of room."""
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        seen, room = [], backend._room
        room.refused = seen.append
        mount.errors["writev"] = error
        assert [Verdict.FULL] == await put(backend, KEYS[0])
        assert [refused] * bool(refused) == seen
        await backend.aclose()
