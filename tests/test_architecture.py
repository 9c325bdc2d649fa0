# SPDX-License-Identifier: Apache-2.0
"""Rules about the shape of the code that no linter knows. Floors: ``lint-imports``."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "ucm").rglob("*.py"))
EVERYTHING = [
    path
    for folder in ("ucm", "tests", "examples", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MAX_LINES = 400

BROAD_HANDLERS: dict[str, int] = {
    "ucm/agent/__main__.py": 1,  # tells what ended the agent
    "ucm/agent/calls.py": 1,  # hands an error to whoever awaits the call
    "ucm/backends/_crew.py": 1,  # hands an error to whoever awaits the batch
    "ucm/backends/object.py": 1,  # tells a panic of native code as a wrong setting
    "ucm/backends/wrap.py": 1,  # a backend of others may raise anything, amid those of all tiers
    "ucm/cache/calls.py": 1,  # tells what a host's own call raised
    "ucm/cache/host_loop.py": 1,  # hands an error to whoever awaits the call
    "ucm/cache/questions.py": 1,  # hands an error to whoever awaits the answer
    "ucm/devices/selection.py": 1,  # a device of others may raise anything, in an engine's hook
    "ucm/errors.py": 1,  # a host's error may not be able to say what it is
    "ucm/devices/_staged.py": 1,  # a fence that fails, where parts are under way
    "ucm/devices/accelerator.py": 1,  # so where a copy may be, whatever came behind it
    "ucm/integration/vllm/stats.py": 1,  # as of ``stores/bypass.py``, on the status thread
    "ucm/integration/vllm/worker.py": 1,  # as of ``devices/selection.py``
    "ucm/loop.py": 1,  # tells who joins that a start which raised is over
    "ucm/pipeline/guard.py": 1,  # a device's error must not keep a ticket from its end
    "ucm/pipeline/load.py": 1,  # keeps an error until the copy beside it is over
    "ucm/pipeline/pipeline.py": 1,  # ends the loop with what went wrong on it
    "ucm/pipeline/runner.py": 4,  # ends a ticket with its stage's error: thread, loop
    "ucm/pipeline/stage.py": 1,  # tells what would end the thread, of a host's own stage
    "ucm/pipeline/workers.py": 1,  # what gives slots back must not end its thread
    "ucm/line_writer.py": 1,  # the host's own standard error may raise anything
    "ucm/registry.py": 1,  # tells what a plug-in raises as it is imported
    "ucm/scheduler/misses.py": 1,  # as the next one
    "ucm/stores/bypass.py": 2,  # a store of others may raise anything, in the engine's thread
    "ucm/spans.py": 1,  # the host's own processors of spans may raise anything
    "ucm/tracing.py": 2,  # the host's own log may raise anything, in the engine's thread
    "tests/kit/simulation.py": 1,  # hands a simulated thread's error to the run
}
"""Supervision points: file to number of handlers that may catch every error."""

HEAVY = {"anyio", "structlog", "torch", "torch_npu", "vllm"}
"""What ``import ucm`` must not bring in."""

DOORS = {
    "hicache": ("sglang/engine", "sglang/hicache", "sglang/pages"),
    "linker": ("sglang/engine", "sglang/linker", "sglang/pages"),
    "continuous": tuple(
        f"transformers/{name}" for name in ("continuous", "model", "prompts", "staging")
    ),
    "dynamic": tuple(
        f"transformers/{name}"
        for name in ("awaiting", "dynamic", "model", "prompts", "staging")
    ),
    "tier": ("vllm/tier", "vllm/tier_lookups", "vllm/tier_setup"),
}
"""Doors that stand on the library, and what is their own."""
MAX_DOOR_LINES = 600
MACHINERY = {"asyncio", "concurrent", "multiprocessing", "queue", "sched", "tenacity"}
"""What a door would have a queue, a pool or a retry of its own with."""


def relative(path: Path) -> str:
    """Return the name of a file as a person would say it."""
    return path.relative_to(ROOT).as_posix()


def exported(tree: ast.Module) -> list[str] | None:
    """Return the value of ``__all__``, or none if the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for target in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the module defines; type variables and loggers are tools."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign) and not is_tool(node.value):
            yield from (item.id for item in node.targets if isinstance(item, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def is_tool(value: ast.expr) -> bool:
    """Tell whether a top-level value serves its own module only."""
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).split(".")[-1]
    return name in {"TypeVar", "get_logger", "init_logger"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the module imports at its top."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def imported_anywhere(tree: ast.Module) -> Iterator[str]:
    """Yield the full names of all that the module imports, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes_set(tree: ast.Module) -> set[str]:
    """Return the attributes that objects set on themselves."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def attributes_read(tree: ast.Module) -> set[str]:
    """Return the attributes that are read, of whatever object."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def names_everything(kind: ast.expr | None) -> bool:
    """Tell whether a handler of *kind* catches every error."""
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(names_everything(item) for item in kind.elts)
    return isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}


def broad_handlers(tree: ast.Module) -> int:
    """Count handlers, and uses of ``suppress``, that catch every error."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            found += names_everything(node.type)
        elif isinstance(node, ast.Call):
            callee = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += callee == "suppress" and any(map(names_everything, node.args))
    return found


def lines_of_code(tree: ast.Module) -> int:
    """Count lines that hold a statement; docstrings and comments hold none."""
    held: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            inner = getattr(node, "body", None)
            stop = inner[0].lineno if inner else (node.end_lineno or node.lineno) + 1
            held |= set(range(node.lineno, stop))
    return len(held)


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def order(name: str) -> tuple[int, str]:
    """Sort constants first, then classes, then the rest, as ruff does."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


class TestExports:
    @pytest.mark.parametrize("path", PACKAGE, ids=relative)
    def test_all_is_sorted_and_complete(self, path: Path) -> None:
        """A module with ``__all__`` lists each public name of its own, in order."""
        tree = parse(path)
        names = exported(tree)
        if names is None:
            return
        own, borrowed = set(defined(tree)), set(imported(tree))
        public = own | (borrowed if path.name == "__init__.py" else set())
        unlisted = {name for name in public if name[0] != "_"} - set(names)
        assert sorted(names, key=order) == names
        assert set() == unlisted
        assert set() == set(names) - own - borrowed


class TestSize:
    @pytest.mark.parametrize("path", EVERYTHING, ids=relative)
    def test_module_is_not_over_its_cap(self, path: Path) -> None:
        """A module that wants to grow over the cap is split first."""
        assert MAX_LINES >= len(path.read_text(encoding="utf-8").splitlines())


class TestHandlers:
    @pytest.mark.parametrize("path", PACKAGE, ids=relative)
    def test_every_handler_names_its_types(self, path: Path) -> None:
        """X-13: only a listed supervision point may catch every error."""
        assert BROAD_HANDLERS.get(relative(path), 0) == broad_handlers(parse(path))

    @pytest.mark.parametrize(
        "code",
        [
            "try: pass\nexcept: pass",
            "try: pass\nexcept Exception: pass",
            "try: pass\nexcept (KeyError, BaseException): pass",
            "with contextlib.suppress(Exception): pass",
        ],
    )
    def test_scan_sees_each_form_of_a_broad_handler(self, code: str) -> None:
        """X-13: the scan itself is not blind to any way of catching everything."""
        assert 1 == broad_handlers(ast.parse(code))


class TestScope:
    @pytest.mark.parametrize(
        "path",
        [path for path in PACKAGE if path.parent.name in ("pipeline", "scheduler")],
        ids=relative,
    )
    def test_machinery_does_not_know_what_a_fence_stands_behind(
        self, path: Path
    ) -> None:
        """S0-45: the pipeline takes fences; which event made one is chosen elsewhere,
        and either side can change alone."""
        names = set(imported_anywhere(parse(path)))
        chosen = {name for name in names if name.startswith("ucm.devices.selection")}
        assert set() == chosen | (names & {"ucm.devices.abc.EventRef"})

    def test_scan_sees_each_form_of_an_import(self) -> None:
        """S0-45: the scan itself is not blind to any way of importing a module."""
        code = "import a.b\ndef f():\n    from a import b\n    from a.b import c as d"
        assert ["a.b", "a.b", "a.b.c"] == sorted(imported_anywhere(ast.parse(code)))


class TestDoors:
    @pytest.mark.parametrize("door", DOORS)
    def test_door_is_small_and_has_no_machinery_of_its_own(self, door: str) -> None:
        """R-81: it says the engine's words in ours; queues, threads and deadlines are the
        library's."""
        doors = ROOT / "ucm" / "integration"
        trees = [parse(doors / f"{name}.py") for name in DOORS[door]]
        assert MAX_DOOR_LINES >= sum(map(lines_of_code, trees))
        for tree in trees:
            roots = {name.partition(".")[0] for name in imported_anywhere(tree)}
            assert set() == roots & MACHINERY
            assert "Thread(" not in ast.unparse(tree)

    def test_scan_counts_lines_that_hold_something(self) -> None:
        """R-81: neither words nor blank lines, and each line of what is long."""
        code = '"""Words."""\n\n# more\ndef f(\n    a,\n):\n    """W."""\n    return (\n        a\n    )\n'
        assert 6 == lines_of_code(ast.parse(code))


class TestAttributes:
    @pytest.mark.slow
    def test_every_attribute_that_is_set_is_read(self) -> None:
        """S0-44: nothing of the package keeps a value in which nobody is interested."""
        code = map(parse, EVERYTHING)
        read = set().union(*map(attributes_read, code))
        for path in PACKAGE:
            if "testing" not in path.parts:
                unread = attributes_set(parse(path)) - read
                assert set() == unread, relative(path)

    def test_scan_tells_setting_from_reading(self) -> None:
        """S0-44: adding to an attribute is not reading it, and handing it on is."""
        tree = ast.parse("self.a = 1\nself.b += 1\nself.c: int = self.d\nx.e = 2")
        assert {"a", "b", "c"} == attributes_set(tree)
        assert {"d"} == attributes_read(tree)


class TestImport:
    @pytest.mark.slow
    def test_import_brings_in_values_only(self) -> None:
        """S3-15: ``import ucm`` works alone and imports no engine, device or loop."""
        code = "import sys, ucm; print(*{name.split('.')[0] for name in sys.modules})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert set() == HEAVY & set(done.stdout.split())
