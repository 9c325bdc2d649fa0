# SPDX-License-Identifier: Apache-2.0
"""The example server over a tier that machines have in common."""

import functools
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from examples.chat_server.chat import Limits, Numbers, Piece
from tests.cache.test_tiers import until
from tests.examples.test_chat import Asking, chatting
from ucm.testing.door_tiers import await_spilled, damage_files, end_agent, tiers_at

pytestmark = pytest.mark.slow

Main = Callable[[Asking], Awaitable[None]]
TOKENS = 20
"""Of an answer: with the prompt's it is more than a block."""


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is, once for all tests."""
    return tmp_path_factory.getbasetemp() / "tiny"


@pytest.fixture
def on_machine(
    tmp_path: Path, directory: Path
) -> Iterator[Callable[[str, Main], None]]:
    """Return what has a chat on a machine, beside its agent."""
    share = tiers_at(tmp_path / "share")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:

        def run(name: str, main: Main) -> None:
            (place := Path(shm) / name).mkdir()

            async def inner(ask: Asking) -> None:
                fetches = ask.chat._prompts.cache._core.fetches
                served = functools.partial(until, lambda: fetches.is_served)
                await anyio.to_thread.run_sync(served)
                await main(ask)

            limits, patient = Limits(), {"fetch": 60.0}  # of a busy machine
            try:
                chatting(place, directory, limits, inner, tiers=share, timeout=patient)
            finally:
                end_agent(place / "slab")

        yield run


async def numbers_of(ask: Asking) -> Numbers:
    """Ask, and return what the answer took."""
    last = await ask(TOKENS)
    assert isinstance(last, Piece)
    return last.numbers


def test_chat_of_one_machine_is_warm_on_another(
    on_machine: Callable[[str, Main], None], tmp_path: Path
) -> None:
    """R-81, R-53: the answer is the same, and comes from the tier as far as it is stored;
    what has rotted there is computed, and the answer the same again."""
    said: list[tuple[str, int]] = []
    share = tmp_path / "share"

    async def first(ask: Asking) -> None:
        numbers = await numbers_of(ask)
        said.append((ask.text, numbers.loaded))
        cache = ask.chat._prompts.cache
        stats = cache.statistics
        await anyio.to_thread.run_sync(until, lambda: stats().saved_blocks > 0)
        await anyio.to_thread.run_sync(cache.flush)
        slab = Path(cache._core._store.directory)
        await anyio.to_thread.run_sync(await_spilled, slab, share)

    async def second(ask: Asking) -> None:
        numbers = await numbers_of(ask)
        said.append((ask.text, numbers.loaded))
        counters = ask.chat._prompts.cache.measure().counters
        fetched = counters["ucm_fetched_parts_total|files"]
        assert fetched * 16 == numbers.loaded

    async def third(ask: Asking) -> None:
        numbers = await numbers_of(ask)
        said.append((ask.text, numbers.loaded))

    on_machine("a", first)
    on_machine("b", second)
    assert damage_files(share) > 0
    on_machine("c", third)
    texts, loaded = zip(*said, strict=True)
    assert 1 == len(set(texts))
    assert (0, 0) == (loaded[0], loaded[2])
    assert loaded[1] > 0
