# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own: several parts, two at once, and sudden death."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import LOADED, SAVED, prompt, ucm_config
from tests.e2e.engine import (
    ROOT,
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
    run_function,
)
from tests.e2e.forked import forked

PROMPTS = [prompt(n, 400) for n in range(700, 704)]
WHOLE = 4 * 384


def run_once(
    model: str,
    slab: str,
    *,
    multiprocess: bool,
    reset: bool = False,
    by_name: bool = False,
) -> dict[str, Any]:
    """
    Start an engine, generate, and say where the tokens came from.

    With *by_name* the connector is named only, and nobody but the engine's own loading
    of plugins has told it where that name leads.
    """
    config = ucm_config(Path(slab))
    if by_name:
        del config["kv_connector_module_path"]
    with in_process_engine(
        Path(model), kv_transfer_config=config, multiprocess=multiprocess
    ) as llm:
        result = generate(llm, PROMPTS, 8)
        if not result.external_tokens:
            await_counter(llm, SAVED, 12)
        warm = None
        if reset:
            reset_prefix_cache(llm)
            warm = generate(llm, PROMPTS, 8)
        return {
            "token_ids": result.token_ids,
            "external_tokens": result.external_tokens,
            "warm_token_ids": warm.token_ids if warm else None,
            "warm_external_tokens": warm.external_tokens if warm else None,
            "saved": counter(llm, SAVED),
            "loaded": counter(llm, LOADED),
        }


def save_and_wait_to_be_killed(model: str, slab: str) -> None:
    """Generate, say so, and go on generating until somebody ends this process."""
    config = ucm_config(Path(slab), capacity="8MiB")
    with in_process_engine(Path(model), kv_transfer_config=config) as llm:
        result = generate(llm, PROMPTS, 8)
        await_counter(llm, SAVED, 12)
        sys.stdout.write(f"{json.dumps(result.token_ids)}\n")
        sys.stdout.flush()
        for seed in range(10_000):
            generate(llm, [prompt(10_000 + seed, 400)], 2)


class TestProcesses:
    def test_scheduler_and_worker_in_processes_of_their_own(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """The halves agree on keys without talking, over a restart and a reset; the
        second engine knows the connector by its name alone, in each process."""
        arguments = {"model": str(llama), "slab": str(tmp_path / "slab")}
        first = run_function(run_once, multiprocess=True, reset=True, **arguments)
        second = run_function(run_once, multiprocess=True, by_name=True, **arguments)
        assert 0 == first["external_tokens"]
        assert WHOLE == first["warm_external_tokens"] == second["external_tokens"]
        assert first["token_ids"] == first["warm_token_ids"] == second["token_ids"]
        assert 12 == first["saved"] == first["loaded"] == second["loaded"]
        assert 0 == second["saved"]

    def test_two_engines_share_one_slab_at_the_same_time(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """What one engine saved the other loads, while both are up."""
        slab = str(tmp_path / "slab")
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            mine = generate(llm, PROMPTS, 8)
            await_counter(llm, SAVED, 12)
            other = run_function(
                run_once, model=str(llama), slab=slab, multiprocess=True
            )
            reset_prefix_cache(llm)
            again = generate(llm, PROMPTS, 8)
        assert mine.token_ids == other["token_ids"] == again.token_ids
        assert WHOLE == other["external_tokens"] == again.external_tokens
        assert 0 == other["saved"]

    @pytest.mark.usefixtures("killed")
    def test_engine_killed_in_the_middle_of_saves_costs_nothing_stored(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Kill -9 while saves and evictions run: the next engine opens the slab, no
        slot is lost, and whatever is found is exact."""
        slab = tmp_path / "slab"
        with forked(
            save_and_wait_to_be_killed, model=str(llama), slab=str(slab)
        ) as process:
            tokens = json.loads(process.first_line("[[", 300.0))
            data = slab / "data"
            before = data.stat().st_mtime_ns
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60.0)
        assert before
        config = ucm_config(slab, capacity="8MiB")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            from tests.e2e.connector import halves

            store = halves(llm)[1]._worker._runtime._store
            assert [] == store.audit()
            assert 0 == store.stats().reserved_blocks
            assert store.stats().committed_blocks > 0
            result = generate(llm, PROMPTS, 8)
            reset_prefix_cache(llm)
            again = generate(llm, PROMPTS, 8)
            assert again.external_tokens > 0
        assert tokens == result.token_ids == again.token_ids
        assert ROOT.is_dir()
