# SPDX-License-Identifier: Apache-2.0
"""
Where SGLang is: a directory beside the environment, made once for its pins.

It has SGLang and what it imports that vLLM's environment lacks; torch, numpy, transformers
and all else are those of that environment, and ``stubs.py`` stands in for the rest. SGLang
asks for other releases of some of them, among them torch 2.14: what runs here is its code,
not its distribution.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints" / "sglang.txt"
CACHE = ROOT / ".cache"
_LIMIT_S = 300


def environment() -> Path:
    """
    Return the directory, making it first if it is not there.

    Safe to call from several processes at once: it appears whole. Skips the test that
    asks where the packages cannot be had.
    """
    release = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(PINS.read_bytes() + release.encode()).hexdigest()[:12]
    target = CACHE / f"sglang-{digest}"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "sglang.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process
        if not target.is_dir():
            _make(target)
    return target


def _make(target: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".sglang-", dir=CACHE))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    pip += ["--only-binary", ":all:", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*pip, "--target", str(draft), "-r", str(PINS)],
            check=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        os.rename(draft, target)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"SGLang cannot be had: {exc.stderr.strip()[-500:]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"SGLang cannot be had within {_LIMIT_S} s")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
