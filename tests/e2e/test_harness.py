# SPDX-License-Identifier: Apache-2.0
"""The harness itself, proven with the engine's own example of a connector."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import (
    EXTERNAL_HITS,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
    run_function,
)
from tests.e2e.forked import live_members
from tests.e2e.server import serve

PROMPT = [3 + (7 * index + index // 11) % 500 for index in range(300)]
OTHER = [3 + (13 * index + 5) % 500 for index in range(300)]
WHOLE_BLOCKS = 256


def example_connector(store: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's example, which keeps files per prompt."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }


def generate_once(model: str, store: str) -> dict[str, Any]:
    """Start an engine whose parts are processes and generate once."""
    with in_process_engine(
        Path(model),
        kv_transfer_config=example_connector(Path(store)),
        multiprocess=True,
    ) as llm:
        result = generate(llm, [PROMPT], max_tokens=8)
    return {
        "pid": os.getpid(),
        "token_ids": result.token_ids,
        "external_tokens": result.external_tokens,
    }


class TestInProcess:
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_second_run_hits_own_cache_and_repeats_tokens(
        self, name: str, request: pytest.FixtureRequest
    ) -> None:
        """The engine repeats its tokens and takes whole blocks from its own cache."""
        with in_process_engine(request.getfixturevalue(name)) as llm:
            first = generate(llm, [PROMPT, OTHER], max_tokens=16)
            second = generate(llm, [PROMPT, OTHER], max_tokens=16)
        assert [0, 0] == first.cached_tokens
        assert [WHOLE_BLOCKS, WHOLE_BLOCKS] == second.cached_tokens
        assert 2 * WHOLE_BLOCKS == second.local_tokens
        assert 0 == second.external_tokens
        assert first.token_ids == second.token_ids
        assert first.token_ids[0] != first.token_ids[1]

    def test_early_token_changes_the_output(self, llama: Path) -> None:
        """The models are sharp: another first token gives another continuation."""
        changed = [4, *PROMPT[1:]]
        with in_process_engine(llama) as llm:
            result = generate(llm, [PROMPT, changed], max_tokens=8)
        assert result.token_ids[0] != result.token_ids[1]

    @pytest.mark.parametrize("name", ["llama", "deepseek"])
    def test_hit_after_reset_comes_from_the_connector(
        self, name: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        """After a reset the tokens come through the connector and are the same."""
        with in_process_engine(
            request.getfixturevalue(name),
            kv_transfer_config=example_connector(tmp_path),
        ) as llm:
            cold = generate(llm, [PROMPT], max_tokens=16)
            assert 0 == counter(llm, EXTERNAL_HITS)
            reset_prefix_cache(llm)
            warm = generate(llm, [PROMPT], max_tokens=16)
        assert 0 == cold.external_tokens
        assert 0 == warm.local_tokens
        assert 0 < warm.external_tokens == warm.cached_tokens[0]
        assert cold.token_ids == warm.token_ids


class TestProcesses:
    def test_function_in_fresh_processes_shares_the_store(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Two engines of several processes, one after the other, share one store."""
        arguments = {"model": str(llama), "store": str(tmp_path)}
        cold = run_function(generate_once, **arguments)
        warm = run_function(generate_once, **arguments)
        assert os.getpid() not in {cold["pid"], warm["pid"]}
        assert 0 == cold["external_tokens"]
        assert WHOLE_BLOCKS == warm["external_tokens"]
        assert cold["token_ids"] == warm["token_ids"]

    def test_failing_function_reports_its_error(self) -> None:
        """An error in the other process fails the caller and shows its traceback."""
        with pytest.raises(AssertionError, match="FileNotFoundError"):
            run_function(os.listdir, path="/nonexistent")

    def test_server_answers_counts_and_ends(self, llama: Path, tmp_path: Path) -> None:
        """A real server serves through the connector and leaves no process behind."""
        log = tmp_path / "server.log"
        store = tmp_path / "store"
        with serve(
            llama,
            log=log,
            kv_transfer_config=example_connector(store),
            is_forked=True,
        ) as server:
            cold = server.complete(PROMPT, max_tokens=8)
            server.post("/reset_prefix_cache")
            warm = server.complete(PROMPT, max_tokens=8)
            hits = server.counter(EXTERNAL_HITS)
            group = server.pid
            assert group in live_members(group)
        assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
        assert WHOLE_BLOCKS == hits
        details = warm["usage"]["prompt_tokens_details"]
        assert WHOLE_BLOCKS == details["cached_tokens"]
        assert [] == live_members(group)
