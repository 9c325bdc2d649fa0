# SPDX-License-Identifier: Apache-2.0
"""
Write what torch_npu's own Python sources offer under ``torch_npu.npu``, as JSON.

Run ``python tests/golden/make_torch_npu_api.py torch_npu-*.whl >
tests/golden/torch_npu_api.json`` with the wheels of all versions that are to be
supported. Reads the wheels; needs neither torch nor CANN, and imports nothing of them.

Of what is written in C there is no signature: a few names are looked for in the wheel's
libraries and noted as ``native``, which proves that the word is there and no more.
"""

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NATIVE", "make_api", "parse_signature"]

NATIVE = "native"
"""In place of a signature."""
NATIVE_NAMES = (
    "torch_npu.get_npu_format",
    "torch_npu.npu.Event.device",
    "torch_npu.npu.Event.npu_event",
    "torch_npu.npu.Stream.npu_stream",
    "torch_npu._C._npurt.npuHostRegister",
    "torch_npu._C._npurt.npuHostUnregister",
)


def parse_signature(text: str) -> inspect.Signature:
    """Return the signature that stands between the parentheses of a definition."""
    parsed = ast.parse(f"def _({text}): ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    args, kinds = parsed.args, inspect.Parameter
    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    defaults = [kinds.empty] * required + [ast.unparse(node) for node in args.defaults]
    found = [
        kinds(arg.arg, kind, default=default)
        for (kind, arg), default in zip(
            [(kinds.POSITIONAL_ONLY, arg) for arg in args.posonlyargs]
            + [(kinds.POSITIONAL_OR_KEYWORD, arg) for arg in args.args],
            defaults,
            strict=True,
        )
    ]
    if args.vararg:
        found.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        value = kinds.empty if default is None else ast.unparse(default)
        found.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=value))
    if args.kwarg:
        found.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


class Sources:
    """The Python sources and the libraries of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)

    def tree(self, module: str) -> ast.Module:
        """Return the syntax tree of a module."""
        path = "torch_npu/" + module.replace(".", "/")
        names = {f"{path}.py", f"{path}/__init__.py"} & set(self._wheel.namelist())
        return ast.parse(self._wheel.read(names.pop()))

    def words(self, wanted: set[str]) -> set[str]:
        """Return which words stand at the end of a text in a library."""
        found: set[str] = set()
        for name in self._wheel.namelist():
            if name.endswith(".so"):
                library = self._wheel.read(name)
                found |= {word for word in wanted if f"{word}\0".encode() in library}
        return found


def make_api(wheel: Path) -> tuple[str, dict[str, str]]:
    """Return the version of a wheel, and its public names with their signatures."""
    sources = Sources(wheel)
    version = ast.literal_eval(assigned(sources.tree("version"), "__version__"))
    names = {"torch_npu.__version__": NATIVE}
    package = dict(definitions(sources, "npu"))
    for name in ast.literal_eval(assigned(sources.tree("npu"), "__all__")):
        names |= dict(signatures(f"torch_npu.npu.{name}", package.get(name)))
    utils = dict(definitions(sources, "npu.utils"))
    for name in ast.literal_eval(assigned(sources.tree("npu.utils"), "__all__")):
        names |= dict(signatures(f"torch_npu.npu.utils.{name}", utils.get(name)))
    words = sources.words({last_part(name) for name in NATIVE_NAMES})
    names |= {name: NATIVE for name in NATIVE_NAMES if last_part(name) in words}
    return version, names


def last_part(name: str) -> str:
    """Return what stands behind the last dot."""
    return name.rsplit(".", 1)[-1]


def assigned(tree: ast.Module, name: str) -> ast.expr:
    """Return what a module assigns to *name*."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(name)


def definitions(sources: Sources, module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions and classes of a module, and those it takes from below it."""
    for node in sources.tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            taken = {alias.name for alias in node.names}
            for found in sources.tree(f"{module}.{node.module}").body:
                if isinstance(found, ast.FunctionDef | ast.ClassDef) and (
                    found.name in taken or "*" in taken
                ):
                    yield found.name, found


def signatures(name: str, node: ast.stmt | None) -> Iterator[tuple[str, str]]:
    """Yield the signature of a function; of a class, its constructor's and methods'."""
    if isinstance(node, ast.FunctionDef):
        yield name, plain(node.args)
    elif isinstance(node, ast.ClassDef):
        yield name, NATIVE
        for item in node.body:
            if not isinstance(item, ast.FunctionDef):
                continue
            bound = plain(item.args).partition(",")[2].strip()
            if item.name in ("__new__", "__init__"):
                yield name, bound
            elif not item.name.startswith("_"):
                yield f"{name}.{item.name}", bound


def plain(args: ast.arguments) -> str:
    """Return parameters as text, without their types."""
    for node in ast.walk(args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(args)


def main(wheels: list[str]) -> dict[str, dict[str, str]]:
    """Return name, then signature, then the versions that have it, oldest first."""
    found: dict[str, dict[str, list[str]]] = {}
    made = sorted(
        (make_api(Path(wheel)) for wheel in wheels),
        key=lambda api: [int(part) for part in re.findall(r"\d+", api[0])],
    )
    for version, names in made:
        for name, signature in names.items():
            found.setdefault(name, {}).setdefault(signature, []).append(version)
    return {
        name: {signature: " ".join(versions) for signature, versions in kinds.items()}
        for name, kinds in sorted(found.items())
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:]), indent=1) + "\n")
