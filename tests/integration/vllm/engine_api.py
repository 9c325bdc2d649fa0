# SPDX-License-Identifier: Apache-2.0
"""What each release of vLLM offers, and what the door's sources read of it."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tests.golden.make_vllm_api import unfold
from ucm.integration.vllm.sources import CALL

__all__ = [
    "VERSIONS",
    "Reads",
    "api_of",
    "calls_of",
    "family_of",
    "made",
    "missing",
    "reads_of",
]

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "vllm_api.json"
_LOADED = json.loads(GOLDEN.read_text(encoding="utf-8"))
VERSIONS: list[str] = _LOADED["versions"]
NAMES: dict[str, dict[str, str]] = _LOADED["names"]
CLASSES = {
    name
    for name in NAMES
    if "." not in name and not name.startswith((CALL, "KVConnectorW"))
}

Read = tuple[str, str]
"""A class of the engine and an attribute of it."""
Reads = dict[Read, str]
"""Where each read stands, as ``module:line``."""

_COMMENT = re.compile(r"vLLM's (\w+)")
_ARGUMENTS = {
    "vllm_config": "VllmConfig",
    "kv_cache_config": "KVCacheConfig",
    "scheduler_output": "SchedulerOutput",
    "connector_output": "KVConnectorOutput",
    "request": "Request",
}
"""What arguments, and attributes of ours, of these names are, whatever is said beside them."""


@cache
def api_of(version: str) -> dict[str, set[str]]:
    """Return each name of one release with all that is said of it."""
    found: dict[str, set[str]] = {}
    for name, texts in NAMES.items():
        for text, spans in texts.items():
            if version in unfold(spans, VERSIONS):
                found.setdefault(name, set()).add(text)
    return found


def calls_of(version: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield each hook that a release calls, and how."""
    for name, texts in api_of(version).items():
        if name.startswith(CALL):
            for text in sorted(texts):
                call = ast.parse(f"_{text}", mode="eval").body
                assert isinstance(call, ast.Call)
                yield name.removeprefix(CALL), call


def made(version: str, name: str, **values: object) -> SimpleNamespace:
    """Return an object with those of *values* that the class has in a release."""
    known = api_of(version)
    has = {key: value for key, value in values.items() if f"{name}.{key}" in known}
    return SimpleNamespace(**has)


def missing(reads: Reads, version: str) -> set[Read]:
    """Return reads of what neither the class of a release has nor one derived from it."""
    known = api_of(version)
    return {
        (owner, member)
        for owner, member in reads
        if not any(f"{one}.{member}" in known for one in family_of(owner, version))
    }


def family_of(owner: str, version: str) -> set[str]:
    """Return a class with those that it derives from, or that derive from it."""
    known = api_of(version)
    family = {owner}
    for _ in range(4):
        for name in CLASSES & set(known):
            bases = {base for text in known[name] for base in text.split(", ")}
            if bases & family:
                family.add(name)
            if name in family:
                family |= bases & CLASSES
    return family


class _Function(ast.NodeVisitor):
    """Follows values of the engine through one function."""

    def __init__(self, module: str, lines: list[str], reads: Reads) -> None:
        self._module = module
        self._lines = lines
        self._reads = reads
        self._types: dict[str, str] = {}

    def take_arguments(self, function: ast.FunctionDef) -> None:
        """Learn what the arguments are, from annotations, comments or names."""
        for arg in (*function.args.args, *function.args.kwonlyargs):
            annotation = "" if arg.annotation is None else ast.unparse(arg.annotation)
            said = _COMMENT.search(self._lines[arg.lineno - 1])
            if annotation.strip("'\"") in CLASSES:
                self._types[arg.arg] = annotation.strip("'\"")
            elif arg.arg in _ARGUMENTS:
                self._types[arg.arg] = _ARGUMENTS[arg.arg]
            elif annotation == "Any" and said and said[1] in CLASSES:
                self._types[arg.arg] = said[1]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a read, when it is of the engine."""
        owner = self._type(node.value)
        if owner in CLASSES:
            self._reads.setdefault((owner, node.attr), f"{self._module}:{node.lineno}")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Learn what the assigned names are."""
        for target in node.targets:
            values: list[ast.expr] = [node.value]
            targets: list[ast.expr] = [target]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = target.elts, node.value.elts
            for name, value in zip(targets, values, strict=True):
                if isinstance(name, ast.Name):
                    self._types[name.id] = self._type(value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Learn what a loop's names are."""
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Learn what a comprehension's names are."""
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        """Look at the loops first."""
        self._loops_first(node)

    visit_SetComp = visit_ListComp  # noqa: N815 - ast's names
    visit_GeneratorExp = visit_ListComp  # noqa: N815 - ast's names
    visit_DictComp = visit_ListComp  # noqa: N815 - ast's names

    def _loops_first(self, node: ast.expr) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                self.visit(child)
        self.generic_visit(node)

    def _loop(self, target: ast.expr, source: ast.expr) -> None:
        if isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate":
            source = source.args[0]
            if isinstance(target, ast.Tuple):
                target = target.elts[1]
        if isinstance(target, ast.Name):
            self._types[target.id] = _item(self._type(source))

    def _type(self, node: ast.expr) -> str:
        """Return the type of an expression as text; empty if it is not the engine's."""
        if isinstance(node, ast.Name):
            return self._types.get(node.id, "")
        if isinstance(node, ast.Subscript):
            return _item(self._type(node.value))
        if isinstance(node, ast.Attribute):
            owner = self._type(node.value)
            if owner not in CLASSES:
                return _ARGUMENTS.get(node.attr, "")
            texts = NAMES.get(f"{owner}.{node.attr}", {})
            return _plain(next(iter(texts), ""))
        return ""


def _plain(text: str) -> str:
    return re.sub(r"^-> |\s*\| None|['\"]", "", text).strip()


def _item(text: str) -> str:
    found = re.fullmatch(r"(?:list|tuple|dict)\[(?:\w+, )?(\w+)(?:, \.\.\.)?\]", text)
    return found[1] if found else ""


def reads_of(path: Path, source: str) -> Reads:
    """Return what a module reads of the engine."""
    reads: Reads = {}
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            function = _Function(path.name, lines, reads)
            function.take_arguments(node)
            for statement in node.body:
                function.visit(statement)
    return reads
