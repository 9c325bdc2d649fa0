# SPDX-License-Identifier: Apache-2.0
"""
The order of hooks of the engine's own model runners, against what the fake host does.

The second runner cannot run without Triton: its connector object is driven directly, and
what calls that is read in the source. A release that orders things otherwise fails here.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm.v1.worker.gpu import kv_connector as second

HOOKS = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv"),
    *("wait_for_save", "get_transfer_results", "clear_connector_metadata"),
)


RESULTS = SimpleNamespace(
    finished_sending=None, finished_recving=None, failed_recving=set()
)


class Listener(KVConnectorBase_V1):
    """A connector that does nothing and writes down which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []


def listening(name: str) -> Callable[..., object]:
    """Return a method that does nothing else."""

    def hook(listener: Listener, *_: object, **__: object) -> object:
        if name in HOOKS:
            listener.called.append(name)
        return RESULTS if name == "get_transfer_results" else None

    return hook


for _name in dir(KVConnectorBase_V1):
    if not _name.startswith("_"):
        setattr(Listener, _name, listening(_name))
Listener.__abstractmethods__ = frozenset()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    """Return a connector that both runners take for the engine's."""
    made = Listener()
    for module in (mixin, second):
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: made)
        monkeypatch.setattr(module, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
    monkeypatch.setattr(second, "is_forward_context_available", lambda: True)
    return made


def output(*, sync: bool) -> SimpleNamespace:
    """Return as much of a SchedulerOutput as the runners' connector parts read."""
    return SimpleNamespace(
        kv_connector_metadata=object(), has_sync_kv_loads=sync, finished_req_ids=set()
    )


class TestSecondRunner:
    @pytest.mark.parametrize("sync", [False, True])
    def test_hooks_come_as_in_the_fake_host(self, listener: Listener, sync: bool):
        """R-01: fence and bind before the forward pass, loads that feed it too; behind it
        all other loads, saves, results and the end of the step."""
        connector = second.ActiveKVConnector(None, {})
        del listener.called[:]
        connector.pre_forward(output(sync=sync))
        before, listener.called[:] = listener.called.copy(), []
        connector.post_forward(set())
        load = ["start_load_kv"]
        assert [*HOOKS[:2], *load * sync] == before
        assert [*load * (not sync), *HOOKS[3:]] == listener.called


class TestFirstRunner:
    @pytest.mark.parametrize("defers", [False, True])
    def test_hooks_come_as_in_the_fake_host(self, listener: Listener, defers: bool):
        """R-02, R-04: with speculation results are asked for before the saves, which come
        only when somebody finishes the step."""
        runner = mixin.KVConnectorModelRunnerMixin
        with runner._get_kv_connector_output(output(sync=False), defer_finalize=defers):
            assert ["bind_connector_metadata"] == listener.called
        seen = [name for name in listener.called if name in HOOKS[2:]]
        if defers:
            assert ["start_load_kv", "get_transfer_results"] == seen
            runner.finalize_kv_connector()
        assert {"wait_for_save", "clear_connector_metadata"} <= set(listener.called)

    def test_forward_pass_that_raises_is_followed_by_all_hooks(
        self, listener: Listener
    ):
        """R-02: an engine asks for saves also of a pass that has failed."""
        runner = mixin.KVConnectorModelRunnerMixin
        with (
            pytest.raises(ZeroDivisionError),
            runner._get_kv_connector_output(output(sync=False)),
        ):
            raise ZeroDivisionError
        assert "wait_for_save" in listener.called


def source_of(module: str) -> ast.Module:
    """Return a module of the engine, which need not be importable here."""
    return ast.parse((Path(vllm.__file__).parent / module).read_text(encoding="utf-8"))


def calls(module: str, function: str) -> list[str]:
    """Return the methods and functions that a method calls, in the order of its text."""
    (found,) = (
        node
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.FunctionDef) and function == node.name
    )
    named = (
        (node.lineno, node.col_offset, ast.unparse(node.func).split(".")[-1])
        for node in ast.walk(found)
        if isinstance(node, ast.Call)
    )
    return [name for _, _, name in sorted(named)]


FIRST_SOURCE = "v1/worker/gpu_model_runner.py"
SECOND_SOURCE = "v1/worker/gpu/model_runner.py"


class TestSource:
    @pytest.mark.parametrize(
        ("module", "function", "wanted"),
        [
            (SECOND_SOURCE, "execute_model", ("update_requests", "no_forward")),
            (SECOND_SOURCE, "execute_model", ("update_requests", "pre_forward")),
            (SECOND_SOURCE, "execute_model", ("preprocess_state", "pre_forward")),
            (FIRST_SOURCE, "execute_model", ("handle_preemptions", "_update_states")),
            (
                FIRST_SOURCE,
                "execute_model",
                ("_update_states", "maybe_get_kv_connector_output", "_model_forward"),
            ),
            (
                FIRST_SOURCE,
                "sample_tokens",
                ("propose_draft_token_ids", "finalize_kv_connector"),
            ),
        ],
    )
    def test_steps_of_a_runner_come_in_this_order(self, module, function, wanted):
        """R-01, R-04: the second runner overwrites before it fences, the first behind; a
        drafter of the first runs before the step is finished."""
        found = (name for name in calls(module, function) if name in wanted)
        assert list(wanted) == list(dict.fromkeys(found))

    def test_second_runner_clears_and_copies_where_it_updates_requests(self):
        """R-01: both overwrites are launched in ``update_requests``."""
        wanted = {"zero_block_ids", "copy_kv_cache_blocks_inplace"}
        assert wanted <= set(calls(SECOND_SOURCE, "update_requests"))
        assert wanted.isdisjoint(calls(SECOND_SOURCE, "execute_model"))

    def test_stages_of_the_second_runner_copy_states_of_drafts_with_a_later_step(self):
        """Those before the last end a step before they know which drafts were accepted."""
        late, copies = "update_pp_decode_requests", "postprocess_sampled"
        ends = "post_forward"
        assert copies in calls(SECOND_SOURCE, late)
        found = calls(SECOND_SOURCE, "execute_model")
        assert found.index(late) < found.index("update_requests")
        found = calls(SECOND_SOURCE, "sample_tokens")
        assert [ends, copies, ends] == [n for n in found if n in (copies, ends)]

    def test_second_runner_ends_a_step_when_it_samples(self):
        """R-01, R-02: results are asked for outside of the forward pass's context, also by
        stages before the last, which therefore come to the end of each step."""
        found = calls(SECOND_SOURCE, "sample_tokens")
        assert 2 == found.count("post_forward")
        assert "post_forward" not in calls(SECOND_SOURCE, "execute_model")
        assert ["propose", "post_forward"] == [
            name for name in found if name in ("propose", "post_forward")
        ][-2:]
