# SPDX-License-Identifier: Apache-2.0
"""What our fakes and our door take SGLang for, held against SGLang itself."""

import ast
from pathlib import Path

import pytest

from tests.integration.sglang import fake
from tests.sglang.environment import environment
from ucm.integration.sglang.engine import (
    _COUNTED,
    _COUNTED_IF_SET,
    _ELSEWHERE,
    _READS,
    _TAKEN,
    _UNLISTED,
    _VARIABLES,
)

pytestmark = pytest.mark.slow
MEM_CACHE = "sglang/srt/mem_cache"


def class_of(name: str, path: str) -> ast.ClassDef:
    """Return a class of SGLang, as it is written; SGLang is not imported."""
    tree = ast.parse((environment() / path).read_text(encoding="utf-8"))
    return next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def methods(node: ast.ClassDef, *, are_abstract: bool) -> dict[str, tuple[str, ...]]:
    """Return methods by name, with their parameters."""
    return {
        each.name: tuple(arg.arg for arg in each.args.args[1:])
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and are_abstract
        == ("abstractmethod" in [getattr(one, "id", "") for one in each.decorator_list])
    }


@pytest.mark.parametrize(
    ("name", "path", "known"),
    [
        (
            "UnifiedCacheLinker",
            f"{MEM_CACHE}/unified_cache/unified_cache_linker.py",
            fake.LINKER,
        ),
        ("HiCacheStorage", f"{MEM_CACHE}/hicache_storage.py", fake.STORAGE),
    ],
)
def test_fakes_have_the_abstract_methods_of_sglang(
    name: str, path: str, known: dict[str, tuple[str, ...]]
) -> None:
    """R-81: all of them, and with the same parameters."""
    assert known == methods(class_of(name, path), are_abstract=True)


def test_other_methods_of_the_storage_have_the_parameters_of_sglang() -> None:
    """R-81: those that the door overrides."""
    storage = class_of("HiCacheStorage", f"{MEM_CACHE}/hicache_storage.py")
    found = methods(storage, are_abstract=False)
    assert fake.OPTIONAL == {name: found[name] for name in fake.OPTIONAL}


def test_everything_that_writes_weights_asks_for_its_runners_first() -> None:
    """R-81: what the door listens to is there, wherever weights change."""
    updater = class_of(
        "SchedulerWeightUpdaterManager",
        "sglang/srt/managers/scheduler_components/weight_updater.py",
    )
    writers = [
        each
        for each in updater.body
        if isinstance(each, ast.FunctionDef)
        and each.name.startswith(("update_weights", "begin_weight", "end_weight"))
    ]
    assert 6 == len(writers)
    for each in writers:
        assert "self._select_runners(" in ast.unparse(each), each.name
    (check,) = (
        each for each in updater.body if getattr(each, "name", "") == "check_weights"
    )
    assert isinstance(check, ast.FunctionDef)  # which the door knows by its code
    assert ["self", "recv_req"] == [arg.arg for arg in check.args.args]
    assert not check.decorator_list
    (asks,) = (each for each in ast.walk(check) if isinstance(each, ast.For))
    assert "self._select_runners(recv_req.selector)" == ast.unparse(asks.iter)
    checker = class_of("WeightChecker", "sglang/srt/utils/weight_checker.py")
    (handle,) = (one for one in checker.body if getattr(one, "name", "") == "handle")
    actions = {
        node.comparators[0].value
        for node in ast.walk(handle)
        if isinstance(node, ast.Compare)
    }
    assert {*_READS, "reset_tensors"} == actions


def test_threads_of_a_storage_get_the_time_that_the_door_takes_them_for() -> None:
    """R-81: ten seconds each; a call that lasts longer ends SGLang."""
    controller = class_of(
        "HiCacheController", "sglang/srt/managers/cache_controller.py"
    )
    (stop,) = (
        each
        for each in controller.body
        if isinstance(each, ast.FunctionDef) and each.name == "_stop_storage_threads"
    )
    assert "t.join(timeout=10)" in ast.unparse(stop)


def test_states_of_sglang_have_the_parts_that_are_saved() -> None:
    """R-81: a part that were left out would be another request's."""
    pool = class_of("MambaPoolHost", f"{MEM_CACHE}/pool_host/mamba.py")
    (parts,) = (
        each
        for each in pool.body
        if isinstance(each, ast.FunctionDef) and each.name == "get_hybrid_pool_buffer"
    )
    # The last of them are no layer's, and refused.
    told = "[self.temporal_buffer, *self.conv_buffer, *self.slot_state_buffers]"
    assert ast.unparse(parts.body[-1]) == f"return {told}"


def test_settings_that_count_are_settings_of_sglang() -> None:
    """R-81: none of another name is taken for not set."""
    fields: set[str] = set()
    for path in Path(environment() / "sglang/srt/arg_groups/fields").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        fields |= {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    saver = {"enable_memory_saver", "enable_weights_cpu_backup"}
    counted = {*_COUNTED, *_COUNTED_IF_SET}
    assert set() == {*counted, *_ELSEWHERE, *_TAKEN, *saver} - fields


def test_variables_that_count_are_those_of_sglang() -> None:
    """R-81: with what they are where nobody sets them."""
    variables = class_of("Envs", "sglang/srt/environ.py")
    found = {
        node.targets[0].id: ast.literal_eval(node.value.args[0])
        for node in variables.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and node.targets[0].id in _VARIABLES
    }
    assert _VARIABLES == found


def test_variables_that_count_and_sglang_does_not_list_are_read_by_it() -> None:
    """R-81: and whatever is in its list is asked for by that."""
    files = (environment() / "sglang" / "srt").rglob("*.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [] == [name for name in _UNLISTED if f'"{name}"' not in text]
    variables = class_of("Envs", "sglang/srt/environ.py")
    listed = {node.id for node in ast.walk(variables) if isinstance(node, ast.Name)}
    assert set() == listed & _UNLISTED
