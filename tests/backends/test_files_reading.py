# SPDX-License-Identifier: Apache-2.0
"""How files of blocks are read: by few native calls, and by Python's own; both do the same."""

import ctypes
import errno
import os
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.native_kit import build
from ucm import native, xxh3
from ucm.backends._crew import Scratch
from ucm.backends._gate import Gate
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.files._reading import (
    LEFT,
    WRONG,
    Asked,
    Came,
    PlainReader,
    find_reader,
)

_INTERRUPTED = Path(__file__).parents[1] / "kit" / "interrupted.h"
SEED = 2**64 - 5
"""Of a digest, less the length of what is digested."""
LENGTHS = (1, 4096, (1 << 18) - HEADER_BYTES, 1 << 18, (1 << 20) + 77)
"""Of blocks: within a piece, just one, and of several pieces."""


@pytest.fixture(params=["native", "python"])
def reader(request, tmp_path_factory, monkeypatch):
    """Return a reader of each kind."""
    library = None
    if request.param == "native":
        library = build(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(native, "LIBRARY", library)
    return find_reader(library)


def make_file(path, nbytes):
    """Write a file of so many bytes behind a header; return all of them."""
    content = np.random.default_rng(nbytes).bytes(HEADER_BYTES + nbytes)
    path.write_bytes(content)
    return content


def ask(path, nbytes, *, is_marked=False):
    """Ask for a file, into memory of ones."""
    return Asked(
        bytes(path), memoryview(bytearray(b"\1" * nbytes)), is_marked, SEED - nbytes
    )


def came_of(content, *, digested=True):
    """Return what comes of a file's content."""
    header, data = content[:HEADER_BYTES], content[HEADER_BYTES:]
    return Came(
        0, header, xxh3_64_intdigest(data, SEED - len(data)) if digested else None
    )


class TestReading:
    def test_header_and_bytes_arrive(self, reader, tmp_path):
        """Of files of all lengths, many of them by one call."""
        contents = [make_file(tmp_path / str(n), n) for n in LENGTHS]
        asked = [ask(tmp_path / str(n), n) for n in LENGTHS]
        is_native = not isinstance(reader, PlainReader)
        assert [came_of(each, digested=is_native) for each in contents] == reader.read(
            asked, Gate()
        )
        assert [each[HEADER_BYTES:] for each in contents] == [
            bytes(each.target) for each in asked
        ]

    def test_without_functions_of_xxhash_no_digest_is_told(self, tmp_path, monkeypatch):
        """Another build of it may export none; bytes come all the same, and are hashed by others."""
        monkeypatch.setattr(xxh3, "DIGESTER", None)
        reader = find_reader(build(tmp_path))
        content = make_file(tmp_path / "file", LENGTHS[-1])
        asked = ask(tmp_path / "file", LENGTHS[-1])
        assert [came_of(content, digested=False)] == reader.read([asked], Gate())
        assert content[HEADER_BYTES:] == bytes(asked.target)

    def test_without_memory_for_a_digest_nothing_is_read(self, tmp_path, monkeypatch):
        """What would be told of bytes that nobody has hashed could become a seal."""
        digester = xxh3.Digester()
        nothing = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: None)
        digester.addresses[0] = ctypes.cast(nothing, ctypes.c_void_p).value
        monkeypatch.setattr(xxh3, "DIGESTER", digester)
        make_file(tmp_path / "file", 5)
        asked = [ask(tmp_path / "file", 5)] * 2
        assert [Came(errno.ENOMEM)] * 2 == find_reader(build(tmp_path)).read(
            asked, Gate()
        )

    def test_thread_without_memory_reads_nothing(self, reader, tmp_path, monkeypatch):
        """R-51: it raised, which ended the agent as by a bug."""

        def refuse(*args):
            raise OSError(errno.ENOMEM, "no memory")

        make_file(tmp_path / "file", 5)
        monkeypatch.setattr(Scratch, "get", refuse)
        asked = [ask(tmp_path / "file", 5)] * 2
        assert [Came(errno.ENOMEM)] * 2 == reader.read(asked, Gate())

    def test_what_is_no_file_of_that_length_is_told_apart(self, reader, tmp_path):
        """R-51: absent, not ours, and not to be had are three answers; others are read."""
        make_file(tmp_path / "whole", 5)
        make_file(tmp_path / "longer", 6)
        (tmp_path / "cut").write_bytes(bytes(3))
        (tmp_path / "link").symlink_to("whole")
        (tmp_path / "directory").mkdir()
        os.mkfifo(tmp_path / "fifo")
        names = ("absent", "longer", "cut", "directory", "fifo", "link")
        names = (*names, "whole/below", "whole")
        came = reader.read([ask(tmp_path / name, 5) for name in names], Gate())
        assert [
            *(errno.ENOENT, WRONG, WRONG, WRONG, WRONG, errno.ELOOP),
            *(errno.ENOTDIR, 0),
        ] == [each.error for each in came]

    def test_only_what_is_marked_is_used_now(self, reader, tmp_path):
        """A share makes room from the time of a file's last use."""
        for name in ("marked", "other"):
            make_file(tmp_path / name, 5)
            os.utime(tmp_path / name, (1.0, 1.0))
        asked = [
            ask(tmp_path / "marked", 5, is_marked=True),
            ask(tmp_path / "other", 5),
        ]
        reader.read(asked, Gate())
        assert [True, False] == [
            (tmp_path / name).stat().st_mtime > 1.0 for name in ("marked", "other")
        ]

    def test_files_are_looked_for_without_following_links(self, reader, tmp_path):
        """A link to nowhere is there; below a file nothing can be looked for."""
        make_file(tmp_path / "file", 5)
        (tmp_path / "link").symlink_to("nowhere")
        paths = [
            bytes(tmp_path / name) for name in ("file", "absent", "link", "file/x")
        ]
        assert [0, errno.ENOENT, 0, errno.ENOTDIR] == reader.find(paths)

    def test_signal_that_comes_meanwhile_changes_nothing(self, tmp_path):
        """R-51: on a mount over a network each call may be interrupted; a block that is there is
        found and read all the same, and one that is not is absent."""
        library = build(tmp_path, "-include", str(_INTERRUPTED))
        reader = find_reader(library)
        content = make_file(tmp_path / "file", 5)
        names = ("file", "absent")
        came = reader.read([ask(tmp_path / name, 5) for name in names], Gate())
        assert came_of(content) == came[0]
        assert errno.ENOENT == came[1].error
        found = reader.find([bytes(tmp_path / name) for name in names])
        assert [0, errno.ENOENT] == found

    def test_nothing_is_done_for_nobody(self, reader):
        """Of no files."""
        assert ([], []) == (reader.read([], Gate()), reader.find([]))


class TestGate:
    def test_memory_of_a_caller_who_has_gone_is_not_written_to(self, reader, tmp_path):
        """X-14: what comes too late is thrown away."""
        make_file(tmp_path / "file", LENGTHS[-1])
        asked, gate = [ask(tmp_path / "file", LENGTHS[-1])] * 2, Gate()
        gate.leave()
        assert [LEFT] * 2 == [each.error for each in reader.read(asked, gate)]
        assert {1} == set(asked[0].target)

    def test_who_leaves_waits_for_a_copy(self, reader):
        """Behind it the memory is the caller's alone, whoever was just at it."""
        gate, copying, copied = Gate(), threading.Event(), threading.Event()

        def copy() -> bool:
            copying.set()
            return copied.wait(60.0)

        with futures.ThreadPoolExecutor(2) as pool:
            toucher = pool.submit(gate.touch, copy)
            copying.wait(60.0)
            leaver = pool.submit(gate.leave)
            assert futures.wait([leaver], 0.05).not_done
            copied.set()
            assert toucher.result(60.0)
            leaver.result(60.0)
        assert gate.touch(copying.is_set) is None

    def test_who_leaves_waits_for_a_native_copy(self, tmp_path, monkeypatch):
        """The same of threads that hold nothing of Python's."""
        monkeypatch.setattr(native, "LIBRARY", build(tmp_path))
        gate = Gate()
        gate.words[1] = 1  # as while one copies
        with futures.ThreadPoolExecutor(1) as pool:
            leaver = pool.submit(gate.leave)
            try:
                assert futures.wait([leaver], 0.05).not_done
            finally:
                gate.words[1] = 0
            leaver.result(60.0)
        assert [1, 0] == list(gate.words)
