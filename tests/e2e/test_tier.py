# SPDX-License-Identifier: Apache-2.0
"""
A tier of ours below vLLM's own tiering, on the real engine.

All of it is vLLM's but the copy between its blocks and its CPU tier, which it refuses to
make on this platform; see ``host_offloading``.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import prompt
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    run_function,
)
from tests.e2e.forked import forked
from tests.e2e.tier_door import (
    TierDoor,
    forget,
    loaded_blocks,
    settle,
    tiering_config,
)
from ucm.testing.door_contract import Door, DoorContract
from ucm.testing.slab_damage import unsound

READ = "vllm:kv_offload_tiering_read_bytes"
WRITTEN = "vllm:kv_offload_tiering_write_bytes"
PROMPTS = [prompt(4100 + at, 400) for at in range(4)]
TOKENS = 8
NAME = "ucm-e2e-tier"
"""vLLM names the memory of its CPU tier after the engine."""


class TestTier(DoorContract):
    """R-81: what every door passes."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return TierDoor()


@contextmanager
def two_ranks(model: str, slab: str) -> Iterator[Any]:
    """Run an engine of two tensor ranks, whose parts lie in one chunk."""
    config = tiering_config(Path(slab)) | {"engine_id": f"{NAME}-{os.getpid()}"}
    with in_process_engine(
        Path(model),
        kv_transfer_config=config,
        multiprocess=True,
        tensor_parallel_size=2,
    ) as llm:
        yield llm


def store_and_wait_to_be_killed(model: str, slab: str) -> None:
    """Generate, say so once all is stored, and go on until somebody ends this process."""
    with two_ranks(model, slab) as llm:
        result = generate(llm, PROMPTS, TOKENS)
        chunk = 2 * 128 * 1024
        await_counter(llm, WRITTEN, 12 * chunk)
        sys.stdout.write(f"{json.dumps(result.token_ids)}\n")
        sys.stdout.flush()
        for seed in range(10_000):
            generate(llm, [prompt(20_000 + seed, 400)], 2)


def ask_again(model: str, slab: str) -> dict[str, Any]:
    """Generate the same in an engine that has just started."""
    with two_ranks(model, slab) as llm:
        result = generate(llm, PROMPTS, TOKENS)
        return {
            "token_ids": result.token_ids,
            "external_tokens": result.external_tokens,
            "read": counter(llm, READ),
        }


@pytest.mark.usefixtures("killed")
def test_ranks_that_are_killed_leave_what_the_next_ones_find(
    llama: Path, tmp_path: Path
) -> None:
    """R-81: SIGKILL amid saves of two tensor ranks; a new engine loads the chunks of
    both, and its answer is that of the first, which had no cache."""
    slab = tmp_path / "slab"
    arguments = {"model": str(llama), "slab": str(slab)}
    try:
        with forked(store_and_wait_to_be_killed, **arguments) as process:
            tokens = json.loads(process.first_line("[[", 300.0))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60.0)
    finally:
        for left in Path("/dev/shm").glob(f"vllm_offload_{NAME}*"):
            left.unlink()  # vLLM's own, which a killed engine leaves
    assert [] == unsound(slab)
    again = run_function(ask_again, **arguments)
    assert tokens == again["token_ids"]
    assert 4 * 384 == again["external_tokens"]
    assert 0 < again["read"]


@pytest.mark.parametrize("name", ["gemma3", "deepseek"])
def test_other_kinds_of_attention_are_exact(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """R-81: windows beside full attention in chunks of two blocks each, and latent
    attention, come back from our store as they were."""
    model = request.getfixturevalue(name)
    prompts = [prompt(1, 700), prompt(2, 555), [*prompt(1, 400), *prompt(3, 200)]]
    with in_process_engine(model) as llm:
        expected = generate(llm, prompts, TOKENS).token_ids
    config = tiering_config(tmp_path / "slab")
    config["kv_connector_extra_config"]["blocks_per_chunk"] = 2
    with in_process_engine(model, kv_transfer_config=config) as llm:
        cold = generate(llm, prompts, TOKENS)
        settle(llm)
        forget(llm)
        before = loaded_blocks(llm)
        warm = generate(llm, prompts, TOKENS)
        assert expected == cold.token_ids == warm.token_ids
        assert 1000 < warm.external_tokens
        assert before < loaded_blocks(llm)
