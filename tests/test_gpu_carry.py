# SPDX-License-Identifier: Apache-2.0
"""What is packed for a machine without a package index is what it needs."""

import struct
import tarfile
import zipfile

import pytest

from benchmarks.gpu_carry import pack, thin


def make_entry(kind, architecture, payload):
    """Return an entry of a fat binary: 1 is PTX, 2 machine code."""
    head = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), architecture)
    return head.ljust(64, b"\1") + payload


def make_library():
    """Return a library with code for two GPUs, and its text."""
    entries = make_entry(2, 80, b"old." * 8) + make_entry(2, 90, b"new." * 8)
    entries += make_entry(1, 90, b"text" * 8)
    region = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    return b"\x7fELF" + region + b"end"


def test_code_for_other_gpus_is_zeroed_in_place():
    """Headers stay, and nothing moves: the library is loaded as before."""
    library = make_library()
    thinned = thin(library, 90)
    expected = library.replace(b"old." * 8, bytes(32)).replace(b"text" * 8, bytes(32))
    assert expected == thinned
    assert b"new." * 8 in thinned


def test_text_stays_where_there_is_no_code():
    """The driver compiles it: without it a kernel would be missing."""
    entries = make_entry(2, 80, b"old." * 8) + make_entry(1, 80, b"text" * 8)
    library = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    assert library.replace(b"old." * 8, bytes(32)) == thin(library, 90)


@pytest.mark.parametrize("behind", [b"", b"\0" * 400, b"\xff" * 400])
def test_number_that_is_there_by_chance_begins_nothing(behind):
    """What is no fat binary stays as it is."""
    library = b"\x7fELF" + struct.pack("<IHH", 0xBA55ED50, 1, 16) + behind
    assert library == thin(library, 90)


def test_archive_has_wheels_and_what_tells_of_ucm(tmp_path):
    """Stores are found by their names there, and what is left out is not packed."""
    with zipfile.ZipFile(tmp_path / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/kernels.so", make_library())
        wheel.writestr("some/code.py", "old = 1")
        tool = zipfile.ZipInfo("some/tool")
        tool.external_attr = 0o100755 << 16
        wheel.writestr(tool, "run")
        wheel.writestr("some/large.so", "large")
    archive = tmp_path / "made" / "site.tar.xz"
    pack(tmp_path, archive, architecture=90, without=["*large*"])
    with tarfile.open(archive) as packed:
        modes = {each.name: each.mode for each in packed}
        content = {each.name: packed.extractfile(each).read() for each in packed}
    assert thin(make_library(), 90) == content["some/kernels.so"]
    assert b"old = 1" == content["some/code.py"]
    assert "some/large.so" not in content
    assert modes["some/tool"] == 0o755
    assert b"ucm.stores.slab" in content["ucm-carried.dist-info/entry_points.txt"]
