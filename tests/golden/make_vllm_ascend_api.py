# SPDX-License-Identifier: Apache-2.0
"""
Write what vllm-ascend's releases call of a connector, and what ucm changes there, as JSON.

Run ``python -m tests.golden.make_vllm_ascend_api vllm_ascend*.whl >
tests/golden/vllm_ascend_api.json`` with the wheels (or unpacked directories). Reads
sources as syntax trees; imports nothing of them.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.make_torch_npu_api import plain

__all__ = ["make_api"]

_ROOT = "vllm_ascend"
WRAPPERS = (
    f"{_ROOT}/distributed/ucm_connector.py",
    f"{_ROOT}/distributed/kv_transfer/kv_pool/ucm_connector.py",
    f"{_ROOT}/distributed/kv_transfer/kv_pool/ucm_connector/connector.py",
)
"""Where the wrapper was and is."""
UTILS = f"{_ROOT}/attention/utils.py"
HOOKS = (
    "wait_for_kv_layer_from_connector",
    "maybe_save_kv_layer_to_connector",
    "notify_kv_cache_written",
)
CORE = "_forward_core"


def make_api(wheel: Path) -> tuple[str, dict[str, Any]]:
    """Return the version of a wheel, and what was found in it."""
    root: Any = wheel if wheel.is_dir() else zipfile.Path(wheel)
    path = next(path for path in WRAPPERS if (root / path).is_file())
    wrapper = next(
        node
        for node in _tree(root / path).body
        if isinstance(node, ast.ClassDef) and node.name == "UCMConnectorV1"
    )
    return _version(root), {
        "wrapper": path,
        "methods": {
            item.name: {"takes": f"({_bound(item)})", "calls": sorted(_calls(item))}
            for item in wrapper.body
            if isinstance(item, ast.FunctionDef)
        },
        "hooks": {
            node.name: f"({plain(node.args)})"
            for node in _tree(root / UTILS).body
            if isinstance(node, ast.FunctionDef) and node.name in HOOKS
        },
        "written": _written(root / f"{_ROOT}/attention"),
        "core": _core(root),
    }


def _tree(source: Any) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _version(root: Any) -> str:
    text = (root / f"{_ROOT}/_version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = (?:version = )?'([^']+)'", text, re.MULTILINE)
    if found is None:
        raise LookupError("__version__")
    return found[1]


def _bound(function: ast.FunctionDef) -> str:
    return plain(function.args).partition(",")[2].strip()


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what a method of the wrapper calls of ours, and with what."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            target = ast.unparse(node.func)
            if "ucm" in target.lower() or target == "ImplCls":
                yield ast.unparse(node)


def _written(folder: Any) -> dict[str, list[str]]:
    """Return which attention back ends say that a layer's KV is written, and how."""
    found: dict[str, list[str]] = {}
    for entry in sorted(folder.iterdir(), key=lambda one: str(one.name)):
        if entry.name.endswith(".py"):
            calls = {
                ast.unparse(node)
                for node in ast.walk(_tree(entry))
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) == "notify_kv_cache_written"
            }
            if calls:
                found[entry.name] = sorted(calls)
    return found


def _core(root: Any) -> dict[str, str]:
    """Return the classes that are given another core, and what that core takes."""
    found: dict[str, str] = {}
    patches = root / f"{_ROOT}/patch/worker"
    for entry in sorted(patches.iterdir(), key=lambda one: str(one.name)):
        if not entry.name.endswith(".py") or "310" in entry.name:
            continue
        tree = _tree(entry)
        homes = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for name, value in _assigned(tree):
            owner = homes.get(name, name)
            found[owner] = homes.get(value.partition(".")[0], "here")
    source = root / f"{_ROOT}/ops/gdn.py"
    if source.is_file():
        for node in ast.walk(_tree(source)):
            if isinstance(node, ast.FunctionDef) and node.name == CORE:
                found["takes"] = f"({_bound(node)})"
    return found


def _assigned(tree: ast.Module) -> Iterator[tuple[str, str]]:
    names = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
        names[target] = value
        owner, _, attribute = target.rpartition(".")
        if attribute == CORE:
            yield names.get(owner, owner), value


def main(wheels: list[str]) -> dict[str, Any]:
    """Return what was found, by version."""
    return dict(sorted(make_api(Path(wheel)) for wheel in wheels))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:]), indent=1) + "\n")
