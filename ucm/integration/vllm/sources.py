# SPDX-License-Identifier: Apache-2.0
"""
Reads what a release of vLLM offers to a connector, and asks of it.

Reads sources as syntax trees, and imports nothing of them: it can tell of a release
that is not installed. Three kinds of names: ``Class`` with its bases, ``Class.member``
with its parameters (or its type, for a field), and ``call hook`` with the arguments of
each call that the engine makes.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CALL", "HOOK_OWNERS", "read_api"]

_Path = Path | zipfile.Path

CALL = "call "
"""Before the name of a hook that the engine calls."""
_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_SOURCES = {
    f"{_V1}/base.py": "*",
    f"{_V1}/metrics.py": "KVConnectorStats KVConnectorPromMetrics",
    "vllm/v1/kv_cache_interface.py": "*",
    "vllm/v1/core/sched/output.py": "*",
    "vllm/v1/core/kv_cache_manager.py": "KVCacheBlocks",
    "vllm/v1/outputs.py": "KVConnectorOutput",
    "vllm/v1/request.py": "Request",
    "vllm/v1/metrics/cache_hit_source.py": "CacheHitSource",
    "vllm/forward_context.py": "ForwardContext",
    "vllm/config/cache.py": "CacheConfig",
    "vllm/config/device.py": "DeviceConfig",
    "vllm/config/kv_transfer.py": "KVTransferConfig",
    "vllm/config/model.py": "ModelConfig",
    "vllm/config/parallel.py": "ParallelConfig",
    "vllm/config/speculative.py": "SpeculativeConfig",
    "vllm/config/vllm.py": "VllmConfig",
}
"""Where the classes are that a connector is given or derives from."""
_UTILS = "vllm/v1/core/kv_cache_utils.py"
_LOOSE = ("resolve_kv_cache_block_sizes", "DEFAULT_NONE_HASH_SEED")
"""What is looked for outside of classes, there."""
_CALLERS = (
    "vllm/v1/core/sched",
    "vllm/v1/engine",
    "vllm/v1/executor",
    "vllm/v1/worker",
    "vllm/distributed/kv_transfer",
    "vllm/model_executor/layers/attention",
)
"""Where hooks are called from."""
HOOK_OWNERS = ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorWorkerMetadata")
_RECEIVER = re.compile(
    r"(?<!ec_)(?<!aux_output_)connector\b|connector_cls|kv_transfer_group|^c$"
)
_NOT_ENGINE = re.compile(
    r"kv_connector/v1/(?!multi_connector)|ec_connector|cpu_offload"
)


def read_api(wheel: Path) -> tuple[str, dict[str, set[str]]]:
    """
    Return the version of a wheel, and its names with all that is said of each.

    Args:
        wheel: The wheel, or the folder that has ``vllm`` in it.

    Raises:
        LookupError: It does not say which version it is.
        OSError: It cannot be read.
        SyntaxError: It is written for another Python.
    """
    root: _Path = wheel if wheel.is_dir() else zipfile.Path(wheel)
    found: dict[str, set[str]] = {}
    for path, wanted in _SOURCES.items():
        for name, text in _classes(root / path, wanted):
            found.setdefault(name, set()).add(text)
    found |= {name: {text} for name, text in _loose(root / _UTILS)}
    hooks = {
        name.partition(".")[2]
        for name in found
        if name.partition(".")[0] in HOOK_OWNERS and "." in name
    }
    for start in _CALLERS:
        for source in _modules(root / start):
            for name, text in _calls(_tree(source), hooks):
                found.setdefault(CALL + name, set()).add(text)
    return _version(root), found


def _classes(source: _Path, wanted: str) -> Iterator[tuple[str, str]]:
    """Yield the members of a module's classes; of settings, those that are public."""
    for node in _tree(source).body if source.is_file() else ():
        if not isinstance(node, ast.ClassDef):
            continue
        if wanted == "*" or node.name in wanted.split():
            for name, text in _members(node):
                if "config/" not in str(source) or not _is_private(name):
                    yield name, text


def _is_private(name: str) -> bool:
    return name.partition(".")[2].startswith(("_", "validate"))


def _loose(source: _Path) -> Iterator[tuple[str, str]]:
    for node in _tree(source).body if source.is_file() else ():
        if isinstance(node, ast.FunctionDef) and node.name in _LOOSE:
            yield node.name, f"({_plain(node.args)})"
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _LOOSE:
            yield ast.unparse(node.targets[0]), "constant"


def _version(root: _Path) -> str:
    for node in _tree(root / "vllm/_version.py").body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__version__"
        ):
            version: str = ast.literal_eval(node.value)
            return version
    raise LookupError("__version__")


def _tree(source: _Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _modules(folder: _Path) -> Iterator[_Path]:
    if not folder.is_dir():
        return
    entries: list[_Path] = [*folder.iterdir()]
    for entry in sorted(entries, key=lambda one: str(one.name)):
        # A wheel's folders end with a slash.
        if _NOT_ENGINE.search(str(entry).rstrip("/")):
            continue
        if entry.is_dir():
            yield from _modules(entry)
        elif entry.name.endswith(".py"):
            yield entry


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    yield node.name, ", ".join(ast.unparse(base) for base in node.bases)
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            yield (
                f"{node.name}.{ast.unparse(item.target)}",
                ast.unparse(item.annotation),
            )
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            yield f"{node.name}.{item.targets[0].id}", "constant"
        elif isinstance(item, ast.FunctionDef):
            yield from _function(node.name, item)


def _function(owner: str, item: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    if any("property" in ast.unparse(one) for one in item.decorator_list):
        returns = "" if item.returns is None else ast.unparse(item.returns)
        yield f"{owner}.{item.name}", f"-> {returns}"
        return
    if item.name == "__init__":
        for node in ast.walk(item):
            name = _own_attribute(node)
            if name is not None:
                yield f"{owner}.{name}", "attribute"
    bound = _plain(item.args).partition(",")[2].strip()
    yield f"{owner}.{item.name}", f"({bound})"


def _plain(args: ast.arguments) -> str:
    """Return parameters as text, without their types."""
    for node in ast.walk(args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(args)


def _own_attribute(node: ast.AST) -> str | None:
    is_own = (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    )
    return node.attr if is_own and isinstance(node, ast.Attribute) else None


def _calls(tree: ast.Module, hooks: set[str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = "__init__"
        receiver = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute):
            name, receiver = node.func.attr, ast.unparse(node.func.value)
        elif receiver != "connector_cls":
            continue
        if name in hooks and _RECEIVER.search(receiver):
            yield name, _arguments(node)


def _arguments(call: ast.Call) -> str:
    """Return a call's arguments as text, each value written as ``_``."""
    parts = ["*_" if isinstance(arg, ast.Starred) else "_" for arg in call.args]
    parts += ["**_" if word.arg is None else f"{word.arg}=_" for word in call.keywords]
    return f"({', '.join(parts)})"
