# SPDX-License-Identifier: Apache-2.0
"""The C files beside this one, compiled."""

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["compiled"]


@functools.cache
def compiled(name: str) -> str:
    """Return the path of a file as a library, for this process; empty without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return ""
    home = tempfile.mkdtemp(prefix="ucm-benchmark-")
    atexit.register(shutil.rmtree, home)
    path, source = f"{home}/{name}.so", Path(__file__).with_name(name)
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", path, source], check=True
    )
    return path
