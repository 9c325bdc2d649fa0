# SPDX-License-Identifier: Apache-2.0
"""
Pack wheels into one small archive, for a machine with a GPU and no package index.

Compiled libraries bring code for many GPUs. What is not for the one that is named is zeroed
where it lies, so that nothing else moves, and packs to nothing: 500 MB of vLLM and what it
imports become 50. An archive also tells of ucm's own stores and devices, which are found by
what is installed. ``benchmarks/gpu_all.sh`` unpacks it from ``.whl/``.

Run ``python -m benchmarks.gpu_carry WHEELS .whl/site.tar.xz``; see docs/gpu.md.
"""

import argparse
import fnmatch
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

__all__ = ["pack", "thin"]

_REGION = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""How a region of CUDA's fat binaries begins: magic number, version, size of its header."""
_ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, size of header and of payload, and architecture."""
_CUBIN = 2
_SMALL = 6


def thin(library: bytes, architecture: int) -> bytes:
    """
    Return a library of the same size without code for other GPUs.

    Text that a driver compiles stays where there is no code for the GPU beside it.

    Args:
        library: ELF with fat binaries, or without any.
        architecture: Of the code that stays: 90 for sm_90 and sm_90a.
    """
    thinned = bytearray(library)
    region = -1
    while (region := library.find(_REGION, region + 1)) >= 0:
        entries = list(_entries(library, region))
        has_code = any(each[:2] == (_CUBIN, architecture) for each in entries)
        for kind, found, at, size in entries:
            is_code = kind == _CUBIN and found == architecture
            if not (is_code or (kind != _CUBIN and not has_code)):
                thinned[at : at + size] = bytes(size)
    return bytes(thinned)


def _entries(library: bytes, region: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, and place and size of the payload, of each entry."""
    start = region + len(_REGION) + 8
    if start > len(library):
        return
    (nbytes,) = struct.unpack_from("<Q", library, start - 8)
    at, end = start, min(start + nbytes, len(library))
    while at + _ENTRY.size <= end:
        kind, _, header, size, found = _ENTRY.unpack_from(library, at)
        at += header + size
        if header < _ENTRY.size or at > end:
            return  # the number was one by chance
        yield kind, found, at - size, size


def pack(
    wheels: Path, archive: Path, *, architecture: int, without: Sequence[str]
) -> None:
    """Write what is in wheels, and what tells of ucm, into one archive."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (
        lzma.open(archive, "wb", preset=_SMALL) as file,
        tarfile.open(fileobj=file, mode="w|") as tar,
    ):
        for wheel in sorted(wheels.glob("*.whl")):
            print(wheel.name, flush=True)
            with zipfile.ZipFile(wheel) as content:
                for info in content.infolist():
                    name = info.filename
                    if not any(fnmatch.fnmatch(name, each) for each in without):
                        data = content.read(name)
                        if ".so" in name:
                            data = thin(data, architecture)
                        _add(tar, name, data, info.external_attr >> 16 & 0o755)
        for name in ("METADATA", "entry_points.txt"):
            text = distribution("ucm").read_text(name)
            _add(tar, f"ucm-carried.dist-info/{name}", (text or "").encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0) -> None:
    if not name.endswith("/"):
        member = tarfile.TarInfo(name)
        member.mode = mode or 0o644
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--without", action="append", default=[])
    given = parser.parse_args()
    pack(
        given.wheels,
        given.archive,
        architecture=given.architecture,
        without=given.without,
    )
