# SPDX-License-Identifier: Apache-2.0
"""Whatever lies where a slab or an export should: one line, and nothing is changed."""

import os
import pty
import sys
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.call import call
from tests.cli.store_kit import CHAT, keys_of, snapshot
from tests.stores.slab_kit import open_slab
from ucm.cli.main import UNREADABLE, USAGE, main
from ucm.testing.store_blocks import make_keys, save

CHATS = keys_of(CHAT, list(range(12)))


@pytest.mark.slow
class TestHostile:
    @given(st.binary(max_size=300))
    @settings(max_examples=30, deadline=None)
    def test_any_bytes_for_a_file_are_one_line(self, tmp_path_factory, data):
        """Whatever is in a file that is no export: exit code 3, and the slab as it was."""
        folder = tmp_path_factory.mktemp("fuzz")
        file = folder / "file"
        file.write_bytes(data)
        open_slab(folder / "slab").close()
        before = snapshot(folder)
        called = call("store", "import", file, folder / "slab")
        assert (UNREADABLE, 1) == (called.code, called.err.count("\n"))
        assert before == snapshot(folder)

    @pytest.mark.parametrize("name", ["slab.json", "data", "arena", "index"])
    @given(drawn=st.data())
    @settings(max_examples=15, deadline=None)
    def test_damaged_slab_is_one_line_and_never_a_traceback(
        self, tmp_path_factory, name, drawn
    ):
        """Each file of a slab cut, flipped or replaced: all commands answer in a line."""
        folder = tmp_path_factory.mktemp("fuzz")
        with open_slab(folder / "slab") as store:
            save(store, CHATS)
        (path,) = (folder / "slab").glob(f"{name}*")
        data = bytearray(path.read_bytes())
        kind = drawn.draw(st.sampled_from(["cut", "flip", "junk", "empty"]))
        if kind == "flip":
            for _ in range(20):
                data[drawn.draw(st.integers(0, len(data) - 1))] ^= 255
        elif kind == "cut":
            data = data[: drawn.draw(st.integers(0, len(data) - 1))]
        elif kind == "junk":
            data = bytearray(os.urandom(len(data)))
        else:
            data = bytearray()
        path.write_bytes(data)
        before = snapshot(folder)
        for words in (("ls",), ("ls", "--keys"), ("stat",), ("verify",)):
            called = call("store", words[0], folder / "slab", *words[1:])
            told = called.code, called.err.count("\n")
            assert told in {(0, 0), (0, 1), (1, 0), (3, 1)}
        assert before == snapshot(folder)

    @pytest.mark.parametrize("command", ["ls", "stat", "verify", "rm", "compact"])
    @given(
        names=st.dictionaries(
            st.sampled_from(
                ["slab.json", "slab.json.tmp", "data", "arena", "index-4096.0", "x"]
            ),
            st.binary(max_size=200),
            min_size=1,
        )
    )
    @settings(max_examples=15, deadline=None)
    def test_directory_of_somebody_else_stays_as_it_is(
        self, tmp_path_factory, command, names
    ):
        """A directory that is no slab of ours is read at most, and never written to."""
        folder = tmp_path_factory.mktemp("fuzz")
        for name, data in names.items():
            (folder / name).write_bytes(data)
        before = snapshot(folder)
        more = ("--all", "--yes") if command == "rm" else ()
        called = call("store", command, folder, *more)
        assert (UNREADABLE, 1) == (called.code, called.err.count("\n"))
        assert before == snapshot(folder)


class TestTarget:
    @pytest.mark.parametrize("more", [(), ("--force",)], ids=["asked", "forced"])
    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
    def test_export_takes_the_place_of_no_device(self, tmp_path, make, more):
        """Root who wrote to a device by --force had a file in its place: the machine was
        without it."""
        open_slab(tmp_path / "slab").close()
        make(tmp_path / "target")
        before = snapshot(tmp_path)
        called = call(
            *("store", "export", tmp_path / "slab", tmp_path / "target", *more)
        )
        assert (USAGE, True) == (
            called.code,
            "no plain file; - is standard" in called.err,
        )
        assert before == snapshot(tmp_path)

    def test_export_into_no_directory_names_the_directory(self, tmp_path):
        """And no name of a file that nobody has given."""
        open_slab(tmp_path / "slab").close()
        file = tmp_path / "missing" / "file"
        called = call("store", "export", tmp_path / "slab", file)
        told = f"ucm: {file.parent}: No such file or directory\n"
        assert (UNREADABLE, told) == (called.code, called.err)


@pytest.mark.parametrize(
    "words",
    [
        ("store", "ls"),
        ("store", "rm", "--all", "--yes"),
        ("top",),
        ("bench",),
        ("replay",),
        ("trace", "stats", "--log"),
    ],
    ids=" ".join,
)
def test_what_this_user_may_not_read_is_unreadable(words):
    """Exit code 3 as the page says, and not 2, which blames the call."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        os.mkdir(f"{name}/others", 0o700)
        os.chmod(name, 0o755)
        owner = os.geteuid()
        call(*words, f"{name}/others")  # what it imports may be another's, too
        if not owner:
            os.seteuid(65534)
        else:
            os.chmod(f"{name}/others", 0)
        try:
            called = call(*words, f"{name}/others")
        finally:
            os.seteuid(owner)
            os.chmod(f"{name}/others", 0o700)
    assert (UNREADABLE, "others" in called.err) == (called.code, True), called.err
    assert "Traceback" not in called.err


def test_export_is_not_written_to_a_terminal(tmp_path, monkeypatch):
    """It obeys what stands in the bytes of a block, and nobody reads them there."""
    with open_slab(tmp_path / "slab") as store:
        save(store, make_keys(1))
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code = main(["store", "export", str(tmp_path / "slab"), "-"])
    os.close(ours)
    assert USAGE == code
