# SPDX-License-Identifier: Apache-2.0
"""
Compile ``ucm/devices/digest.cu`` to PTX, which drivers compile for the GPU they have.

Needs NVRTC, which needs no GPU: ``pip install nvidia-cuda-nvrtc-cu11``. Of an old CUDA, so
that old drivers take what it says too: PTX is for whatever came later.

    python -m scripts.digest_ptx .../nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2
"""

import argparse
import ctypes
import os
import sys
from pathlib import Path

from xxhash import xxh3_64_hexdigest

import ucm.devices

_SOURCE = Path(ucm.devices.__file__).with_name("digest.cu")
_OPTIONS = [b"--gpu-architecture=compute_70"]
"""Volta, of 2017, and everything since."""


def compiled(library: ctypes.CDLL, source: bytes) -> str:
    """Return the PTX of a source; exit with the compiler's words where it has some."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    name = _SOURCE.name.encode()
    if library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None):
        sys.exit("NVRTC makes no program")
    options = (ctypes.c_char_p * len(_OPTIONS))(*_OPTIONS)
    failed = library.nvrtcCompileProgram(program, len(_OPTIONS), options)
    which = "ProgramLog" if failed else "PTX"
    getattr(library, f"nvrtcGet{which}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    if getattr(library, f"nvrtcGet{which}")(program, text):
        sys.exit(f"NVRTC has no {which}")
    if failed:
        sys.exit(text.value.decode())
    return text.value.decode().rstrip("\n") + "\n"


def main() -> None:
    """Write the PTX beside its source, with the source's checksum at the start."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("library", type=Path, help="libnvrtc.so")
    path = parser.parse_args().library
    for other in sorted(path.parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(os.fspath(other), ctypes.RTLD_GLOBAL)
    source = _SOURCE.read_bytes()
    code = compiled(ctypes.CDLL(os.fspath(path)), source)
    told = f"of {xxh3_64_hexdigest(source)} it made {xxh3_64_hexdigest(code.encode())}"
    head = f"// {_SOURCE.name}, compiled by scripts/digest_ptx.py:\n// {told}\n"
    _SOURCE.with_suffix(".ptx").write_text(head + code, encoding="ascii")


if __name__ == "__main__":
    main()
