# SPDX-License-Identifier: Apache-2.0
"""The mutants fit the tree, and the script that tries them out can be believed."""

import ast
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import attrs
import pytest

from tests.mutations import run
from tests.mutations.mutants import MUTANTS, ROOT, Mutant, StaleError
from tests.mutations.run import BaselineError, Outcome, Trees, try_out


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text())


def program(code: CodeType) -> tuple[object, ...]:
    """Return what code does, without where it stands; a syntax tree is slower to compare."""
    constants = tuple(
        program(each) if isinstance(each, CodeType) else (type(each), each)
        for each in code.co_consts
    )
    variables = (code.co_varnames, code.co_cellvars, code.co_freevars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    begun = (code.co_name, code.co_flags, code.co_exceptiontable)
    return (*begun, *variables, *counts, code.co_names, code.co_code, constants)


@functools.cache
def program_of(file: str) -> tuple[object, ...]:
    """Return what a module does."""
    return program(compile((ROOT / file).read_text(), file, "exec", dont_inherit=True))


def imported_from(module: ast.Module, name: str) -> Path | None:
    """Return the file of this tree from which a module takes a name."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            path = ROOT / f"{node.module.replace('.', '/')}.py"
            if any(name == alias.name for alias in node.names) and path.exists():
                return path
    return None


def functions_in(path: Path, class_name: str | None) -> set[str]:
    """Return the functions of a file, or of a class in it and its bases."""
    module = parsed(path)
    body, bases = module.body, []
    if class_name is not None:
        classes = [each for each in body if isinstance(each, ast.ClassDef)]
        found = [each for each in classes if class_name == each.name]
        if not found:
            source = imported_from(module, class_name)
            return functions_in(source, class_name) if source else set()
        body, bases = found[0].body, found[0].bases
    names = {
        each.name
        for each in body
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    for base in bases:
        if isinstance(base, ast.Name):
            names |= functions_in(path, base.id)
    return names


class TestMutants:
    def test_names_are_unique(self) -> None:
        """``--only`` and the table name one mutant each."""
        names = [mutant.name for mutant in MUTANTS]
        assert sorted(set(names)) == sorted(names)

    @pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
    def test_edit_fits_the_file_and_changes_its_program(self, mutant: Mutant) -> None:
        """The text is there once; what comes out is another program that compiles."""
        edited = mutant.apply(ROOT)
        if not mutant.file.endswith(".py"):
            return  # what is text there is once
        after = compile(edited, mutant.file, "exec", dont_inherit=True)
        assert program_of(mutant.file) != program(after)

    @pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
    def test_killers_exist(self, mutant: Mutant) -> None:
        """Each mutant names tests that are there, and none of the real engine."""
        assert mutant.killers
        for killer in mutant.killers:
            file, *inside = killer.split("::")
            assert not file.startswith("tests/e2e")
            class_name = inside[0] if len(inside) > 1 else None
            name, _, _ = inside[-1].partition("[")  # one case of several
            assert name in functions_in(ROOT / file, class_name)

    def test_text_that_moved_on_is_stale(self) -> None:
        """A mutant whose text is gone, or there twice, is refused."""
        for find in ("no such text", "self"):
            with pytest.raises(StaleError, match="rank_forgotten"):
                attrs.evolve(RELEASED_EARLY, find=find).apply(ROOT)


RELEASED_EARLY = next(each for each in MUTANTS if each.name == "rank_forgotten")


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    """Return one copy of the tree."""
    with Trees(ROOT, 1) as trees:
        yield trees


@pytest.mark.slow
class TestRun:
    def test_mutant_is_killed_and_the_copy_put_right(self, trees: Trees) -> None:
        """A killer that fails kills; neither the copy nor the tree stays changed."""
        (path,) = trees.paths
        before = (ROOT / RELEASED_EARLY.file).read_text()
        result = try_out(RELEASED_EARLY, path)
        assert Outcome.KILLED is result.outcome, result.told
        assert before == (path / RELEASED_EARLY.file).read_text()
        assert before == (ROOT / RELEASED_EARLY.file).read_text()

    @pytest.mark.parametrize(
        ("find", "replace"),
        [
            ("# SPDX-License-Identifier: Apache-2.0", "# A comment."),
            ("import attrs\n", "import attrs\nimport no_such_module\n"),
            ("import attrs\n", "import attrs\nraise SystemExit(1)\n"),
        ],
        ids=["comment", "import", "exit"],
    )
    def test_killer_that_does_not_fail_kills_nothing(
        self, trees: Trees, find: str, replace: str
    ) -> None:
        """A test that passes, or that cannot even be collected, proves nothing."""
        mutant = attrs.evolve(RELEASED_EARLY, find=find, replace=replace)
        assert Outcome.SURVIVED is trees.run(mutant).outcome

    def test_killer_that_hangs_is_ended(self, trees: Trees) -> None:
        """A mutant whose test does not end is told apart and costs its deadline."""
        mutant = attrs.evolve(
            RELEASED_EARLY,
            replace="while True:\n            continue\n        if True:",
        )
        result = try_out(mutant, trees.paths[0], deadline=3.0)
        assert Outcome.HUNG is result.outcome
        assert result.seconds < 10

    def test_killer_that_ends_its_process_is_told_apart(self, trees: Trees) -> None:
        """A mutant that reads memory which is not there is seen as well."""
        mutant = attrs.evolve(
            RELEASED_EARLY,
            replace="__import__('ctypes').string_at(0)\n        if True:",
        )
        assert Outcome.CRASHED is try_out(mutant, trees.paths[0]).outcome

    def test_all_killers_have_to_fail(self, trees: Trees) -> None:
        """One killer of two that passes lets the mutant survive."""
        (killer,) = RELEASED_EARLY.killers
        other = killer.rpartition("::")[0] + "::test_holds_of_tells_lives_apart"
        killers = (killer, other)
        mutant = attrs.evolve(RELEASED_EARLY, killers=killers)
        (path,) = trees.paths
        assert Outcome.SURVIVED is try_out(mutant, path).outcome

    def test_stale_mutant_is_told(self, trees: Trees) -> None:
        """A mutant that does not fit the copy any more is a failure of its own."""
        assert (
            Outcome.STALE is trees.run(attrs.evolve(RELEASED_EARLY, find="-")).outcome
        )

    def test_killers_must_pass_without_an_edit(self, trees: Trees) -> None:
        """A killer that is missing, or fails anyway, stops the run before it begins."""
        mutant = attrs.evolve(RELEASED_EARLY, killers=("tests/test_plan.py::missing",))
        with pytest.raises(BaselineError, match="missing"):
            trees.check_baseline([mutant])

    def test_result_is_printed_and_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The script ends well when all are noticed, with a table and a file."""
        path = tmp_path / "result.json"
        options = ["--only", RELEASED_EARLY.name, "--jobs", "1", "--json", str(path)]
        assert 0 == run.main(options)
        (told,) = json.loads(path.read_text())["mutants"]
        assert (RELEASED_EARLY.name, "killed") == (told["name"], told["outcome"])
        assert "1 killed" in capsys.readouterr().out

    def test_another_ucm_is_not_tested(self, tmp_path: Path) -> None:
        """Where the copy's own package would not be imported, nothing runs."""
        assert run._FOREIGN == run._pytest(tmp_path, ["--version"], 30.0)[0]
