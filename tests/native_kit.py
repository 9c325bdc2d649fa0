# SPDX-License-Identifier: Apache-2.0
"""``ucm/native.c`` and ``native_slab.c``, compiled for a test."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ucm import native


@pytest.fixture(params=["native", "python"])
def way(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Do what can be done so by native code, and by Python; for tests that import it."""
    library = None
    if request.param == "native":
        library = build(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(native, "LIBRARY", library)


@pytest.fixture
def by_native(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> native.Native:
    """Do it by native code; the test is skipped where there is no compiler."""
    library = build(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(native, "LIBRARY", library)
    return library


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do it by Python, the calls of which a test puts something in the way of."""
    monkeypatch.setattr(native, "LIBRARY", None)


def build(directory: Path, *more: str) -> native.Native:
    """Compile it, with *more* flags; the test is skipped where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    sources = sorted(Path(native.__file__).parent.glob("native*.c"))
    target = directory / "_native.so"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *more)
    subprocess.run([compiler, *flags, "-o", target, *sources], check=True, timeout=60)
    found = native.find_native(directory)
    assert found is not None
    return found
