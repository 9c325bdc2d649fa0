# SPDX-License-Identifier: Apache-2.0
"""
A host of our own over the library, as the contract of doors drives it.

Its "model" chains digests: what it says next depends on every byte of its blocks. Some
hosts here are wrong in one way each; the contract must notice.
"""

import contextlib
import hashlib
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import ucm
from tests.cache.test_tiers import until
from ucm.testing.door import ROOM, Ability, Door, Prompts, Setting

__all__ = ["TOKENS", "SmallDoor", "SmallHost"]

TOKENS, NUM_BLOCKS, LAYERS, PAGE = 16, 128, 2, 4096
_NAMES = [f"layer.{at}" for at in range(LAYERS)]
_LAYOUT = ucm.paged_layout(dict.fromkeys(_NAMES, PAGE), block_tokens=TOKENS)
_NO_PREEMPTION = "requests of this host have their blocks to their end"


class SmallHost:
    """
    One prompt after the other; saves go on beside the next ones.

    Args:
        slab: Directory of the store; none: no cache.
        setting: What kind of engine.
    """

    def __init__(self, slab: str, setting: str, *tiers: dict[str, object]) -> None:
        self.loaded = 0
        self.model = "other" if setting == Setting.FOREIGN else "model"
        self.pool = np.zeros((LAYERS, NUM_BLOCKS, PAGE), np.uint8)
        self._saves: list[Any] = []
        self._next = 0
        self._opened = contextlib.ExitStack()
        self.cache: Any = None
        if slab:
            keyspace = ucm.keyspace_of(
                _LAYOUT, model=self.named(), weights="1", kv_dtype="u1", engine="small"
            )
            self._hasher = ucm.PrefixHasher(keyspace, TOKENS)
            room = ROOM if setting == Setting.SMALL else 1024
            capacity = room * _LAYOUT.max_block_bytes
            self.cache = self._opened.enter_context(
                ucm.blocking.open(
                    {
                        "store": {"path": slab, "capacity": capacity},
                        "tiers": list(tiers),
                        "timeout": {"fetch": 60.0},  # of a busy machine
                    },
                    layout=_LAYOUT,
                    device=dict(zip(_NAMES, self.pool, strict=True)),
                    keyspace=keyspace,
                )
            )
            if tiers:
                until(lambda: self.cache._core.fetches.is_served)

    def named(self) -> str:
        """Return what it calls its model."""
        return self.model

    def generate(self, prompts: Prompts, num_tokens: int) -> Prompts:
        """Answer prompts."""
        return [self._answer(prompt, num_tokens) for prompt in prompts]

    def abandon(self, prompts: Prompts) -> None:
        """Load, compute and save, and give up the saves amid that."""
        for prompt in prompts:
            self._answer(prompt, 1)
            for save in self._saves:
                save.cancel()

    def settle(self) -> None:
        """Wait for all saves."""
        self.cache.flush()
        self._saves.clear()

    def left(self) -> dict[str, int]:
        """Return what is open."""
        self.cache.flush()
        pending = sum(not save.is_over for save in self._saves)
        return {"saves": pending} if pending else {}

    def fetched(self) -> int:
        """Return how many blocks tiers have brought."""
        counters = self.cache.measure().counters
        return int(counters.get("ucm_fetched_parts_total|files", 0))

    def close(self) -> None:
        """End it."""
        self._opened.close()

    def finds(self, keys: list[bytes]) -> int:
        """Return how many blocks it asks for."""
        return int(self.cache.prefetch(keys).found)

    def trusts(self, found: int, leading: int) -> int:
        """Return how many blocks it does not compute."""
        return leading

    def counts(self, found: int, leading: int) -> int:
        """Return how many blocks it counts as loaded."""
        return leading

    def stores(self, keys: list[bytes], blocks: list[int], done: int) -> None:
        """Have saved what was computed."""
        place = ucm.Place(first=done)
        self._saves.append(self.cache.save(keys[done:], blocks[done:], place=place))

    def _answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        blocks = self._take(len(prompt) // TOKENS)
        done = 0
        if self.cache is not None and blocks:
            keys = self._hasher.keys(prompt)
            found = self.finds(keys)
            leading = self.cache.load(keys[:found], blocks[:found]).leading
            done = self.trusts(found, leading)
            self.loaded += self.counts(found, leading)
        self._compute(prompt, blocks, done)
        if self.cache is not None and len(blocks) > done:
            self.stores(keys, blocks, done)
        said = hashlib.sha256(self.pool[:, blocks].tobytes())
        said.update(repr(prompt[len(blocks) * TOKENS :]).encode())
        return [*hashlib.shake_128(said.digest()).digest(num_tokens)]

    def _take(self, count: int) -> list[int]:
        """Return blocks that no save reads, from all over the pool."""
        if self._next + count > NUM_BLOCKS:
            for save in self._saves:
                save.wait_released()
            self._next = 0
        self._next += count
        return list(range(self._next - count, self._next))

    def _compute(self, prompt: list[int], blocks: list[int], done: int) -> None:
        for at in range(done, len(blocks)):
            state = hashlib.sha256(self.model.encode())
            if at:
                state.update(self.pool[:, blocks[at - 1]].tobytes())
            state.update(repr(prompt[at * TOKENS : (at + 1) * TOKENS]).encode())
            drawn = hashlib.shake_128(state.digest()).digest(LAYERS * PAGE)
            self.pool[:, blocks[at]] = np.frombuffer(drawn, np.uint8).reshape(
                LAYERS, PAGE
            )


class SmallDoor(Door):
    """
    The host in a process of its own, which may be killed, or in this one.

    Args:
        host: Of which kind.
        is_apart: Whether it has a process of its own.
    """

    block_tokens = TOKENS
    cannot: Mapping[Ability, str] = MappingProxyType({Ability.PREEMPT: _NO_PREEMPTION})

    def __init__(
        self, host: type[SmallHost] = SmallHost, *, is_apart: bool = True
    ) -> None:
        self._kind = host
        self._is_apart = is_apart
        self._host: Any = None

    def start(self, slab: Path, setting: Setting) -> None:
        """Start it."""
        kind = _Apart if self._is_apart else _Here
        self._host = kind(self._kind, str(slab), str(setting), *self.tiers)

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Ask it."""
        said: Prompts = self._host.call("generate", list(prompts), num_tokens)
        return said

    def loaded_blocks(self) -> int:
        """Ask it."""
        return int(self._host.call("loaded"))

    def fetched_blocks(self) -> int:
        """Ask it."""
        return int(self._host.call("fetched"))

    def settle(self) -> None:
        """Have it wait."""
        self._host.call("settle")

    def forget(self) -> None:
        """Nothing: it has no cache of its own."""

    def stop(self) -> None:
        """End it."""
        self._host.call("close")
        self._host.end()

    def kill(self) -> None:
        """End its process."""
        self._host.kill()

    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Ask one without a cache."""
        return self._kind("", str(setting)).generate(list(prompts), num_tokens)

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Have it cancel its saves."""
        self._host.call("abandon", list(prompts))

    def left(self) -> Mapping[str, int]:
        """Ask it."""
        left: Mapping[str, int] = self._host.call("left")
        return left


class _Here:
    """A host in this process."""

    def __init__(self, kind: type[SmallHost], *given: Any) -> None:
        self._host = kind(*given)

    def call(self, name: str, *given: object) -> Any:
        attribute = getattr(self._host, name)
        return attribute(*given) if callable(attribute) else attribute

    def end(self) -> None:
        """Nothing is left."""


class _Apart:
    """A host in a process of its own."""

    def __init__(self, kind: type[SmallHost], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, kind, *given))
        self._process.start()
        there.close()

    def call(self, *asked: object) -> Any:
        self._here.send(asked)
        return self._here.recv()

    def end(self) -> None:
        self._here.close()
        self._process.join()
        assert 0 == self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._here.close()


def _serve(there: Connection, kind: type[SmallHost], *given: Any) -> None:
    host = _Here(kind, *given)
    with contextlib.suppress(EOFError):
        while True:
            there.send(host.call(*there.recv()))
