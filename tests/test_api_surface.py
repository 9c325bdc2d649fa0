# SPDX-License-Identifier: Apache-2.0
"""What is public is written down, changes on purpose only, and is all that a user needs."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.api_surface import PAGE, ROOT, render

EXAMPLES = [
    ROOT / "examples" / "embedded_host.py",
    ROOT / "examples" / "own_stage.py",
    ROOT / "examples" / "threaded_host.py",
    *sorted((ROOT / "examples" / "third_party_store").rglob("*.py")),
]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@functools.cache
def public() -> set[str]:
    """Return the full name of all that is public, but for members."""
    names, module = set(), ""
    for line in render().splitlines():
        if line.startswith("# "):
            module = line[2:]
            names.add(module)
        elif line and not line.startswith(" "):
            bare = re.sub(r"^(class|async|abstractmethod) ", "", line)
            names.add(f"{module}.{re.split(r'[^a-zA-Z0-9_]', bare)[0]}")
    return names


def imported(source: str) -> Iterator[str]:
    """Yield the full name of what a file imports of ucm."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ucm."):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name[:4] == "ucm.")


@pytest.mark.slow
def test_surface_is_the_one_that_is_written_down() -> None:
    """A change is made on purpose: run ``python -m scripts.api_surface``, look at what
    has changed in docs/api-surface.txt, and say so in the changelog."""
    assert PAGE.read_text(encoding="utf-8") == render()


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_need_what_is_public_only(path: Path) -> None:
    """Whoever writes a host, store, backend or device by them stands on firm ground."""
    used = set(imported(path.read_text(encoding="utf-8")))
    assert set() == {name for name in used if not name.startswith("ucm_")} - public()


@pytest.mark.slow
def test_reference_has_public_names_only() -> None:
    """What it shows stays as it is; what a host may call by itself is all there."""
    shown = set(re.findall(r"^::: (ucm[\w.]*)", API, re.MULTILINE))
    public_too = {"ucm.awaiting.open"}  # which is ucm.open
    assert set() == shown - public() - public_too
    hosts = {f"ucm.prefixes.{name}" for name in ("PrefixHasher", "Place")}
    assert hosts | {"ucm.blocking.open", "ucm.cache.aio.Cache"} <= shown
