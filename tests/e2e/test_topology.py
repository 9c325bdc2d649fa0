# SPDX-License-Identifier: Apache-2.0
"""Several ranks: what each stores, and what a restart finds of it."""

from pathlib import Path
from typing import Any

from tests.e2e.connector import LOADED, SAVED, prompt, ucm_config
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
    run_function,
)
from tests.stores.slab_kit import index_path
from ucm.stores.slab import SlabStore

PROMPTS = [prompt(n, 300) for n in range(6100, 6102)]
STAGES = {
    # The engine makes the buffers of later stages while it warms up, and on CPU it
    # warms up only what is compiled.
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}


def run_ranks(model: str, slab: str, *, saves: int, **parallel: Any) -> dict[str, Any]:
    """
    Run an engine of several ranks cold, or on what another one has stored.

    Args:
        model: Directory.
        slab: Directory.
        saves: Blocks to be saved; none are expected to be found then.
        parallel: Sizes, and other arguments of the engine.
    """
    with in_process_engine(
        Path(model),
        kv_transfer_config=ucm_config(Path(slab)),
        multiprocess=True,
        **parallel,
    ) as llm:
        first = generate(llm, PROMPTS, 8)
        await_counter(llm, SAVED, saves)
        reset_prefix_cache(llm)
        again = generate(llm, PROMPTS, 8)
        slot_bytes = int(index_path(Path(slab)).stem.removeprefix("index-"))
        with SlabStore(
            path=slab, capacity_bytes=1 << 20, block_bytes=slot_bytes, index_only=True
        ) as store:
            stored = store.stats().committed_blocks
        return {
            "tokens": [first.token_ids, again.token_ids],
            "found": [first.external_tokens, again.external_tokens],
            "saved": counter(llm, SAVED),
            "loaded": counter(llm, LOADED),
            "stored": stored,
        }


def run_twice(
    model: Path, slab: Path, saves: int, parts: int, *shapes: dict[str, Any]
) -> list[dict[str, Any]]:
    """
    Run engines of these shapes one after the other; the last one saves nothing.

    A block counts once, however many *parts* of it are stored.
    """
    first, second = (
        run_function(
            run_ranks,
            model=str(model),
            slab=str(slab),
            saves=wanted,
            **shape,
        )
        for wanted, shape in zip((saves, 0), shapes, strict=True)
    )
    assert [0, first["found"][1]] == first["found"]
    assert [first["found"][1]] * 2 == second["found"]
    assert [first["tokens"][0]] * 2 == first["tokens"] == second["tokens"]
    assert 0 == second["saved"]
    assert saves == first["saved"]
    assert parts * saves == first["stored"] == second["stored"]
    return [first, second]


class TestRanks:
    def test_tensor_ranks_store_each_their_own_heads(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """S4-17: two ranks store two parts of each block; after a reset and after a
        restart both are loaded, with equal tokens."""
        shape = {"tensor_parallel_size": 2}
        first, second = run_twice(llama, tmp_path / "slab", 4, 2, shape, shape)
        assert 2 * 256 == first["found"][1]
        assert (4, 8) == (first["loaded"], second["loaded"])

    def test_latents_are_stored_once_for_all_ranks(
        self, deepseek: Path, tmp_path: Path
    ) -> None:
        """S4-17: a latent that both ranks hold is stored once; both load it, and so
        does an engine with one rank."""
        first, second = run_twice(
            deepseek,
            tmp_path / "slab",
            2 * 19,
            1,
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 1},
        )
        assert 2 * 288 == first["found"][1]
        assert 36 == first["loaded"]
        assert 2 * 36 == second["loaded"]

    def test_pipeline_stages_store_each_their_own_layers(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Two stages, which agree on one key space with the scheduler, store two parts
        of each block; reset and restart find both, with equal tokens."""
        shape = {"pipeline_parallel_size": 2, **STAGES}
        first, second = run_twice(llama, tmp_path / "slab", 4, 2, shape, shape)
        assert 2 * 256 == first["found"][1]
        assert (4, 8) == (first["loaded"], second["loaded"])
