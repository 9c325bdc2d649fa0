# SPDX-License-Identifier: Apache-2.0
"""
SGLang's pages on their way: saved from its pool, loaded into host memory of ours.

SGLang aborts a request whose load fails, and gives the memory of a load that lasts to
others. So loads end in memory that is ours (``ucm.cache.staged``): what is staged cannot
fail any more, and a copy that is stuck overwrites nothing of the engine's.

Threading: saves on any thread; all else by one thread at a time.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch

from ucm import blocking
from ucm.cache.fetches import Fetched
from ucm.cache.staged import Staged
from ucm.cache.sync import Save
from ucm.configuration.sources import load
from ucm.errors import UCMError
from ucm.integration.sglang.engine import Doubt, Theirs, are_replicas, named, refuse
from ucm.reasons import Reason
from ucm.settings import read_size
from ucm.threads import SYSTEM

__all__ = ["Pages", "left", "within"]

_STAGE_BYTES: Final = "1GiB"
_LOOKS: Final = 4
"""Of a model's chunk, at which there are states, so many pages of a sensible size are part."""


class Pages:
    """
    Pages of one rank.

    Args:
        args: SGLang's ServerArgs.
        extra: Settings of ours, and ``stage_bytes``.
        rows: The engine's pool.
        ranks: Which rank this is, and of how many. What all of them have alike is
            stored once.
        longest: Seconds that a save or a load takes at most, whatever settings say.
        parts: Blocks of ours that a page is: so many follow each other in the rows.
    """

    def __init__(
        self,
        args: Theirs,
        extra: Mapping[str, object],
        rows: Mapping[str, torch.Tensor],
        ranks: tuple[int, int],
        longest: float = math.inf,
        parts: int = 1,
    ) -> None:
        extra = dict(extra)
        nbytes = read_size("stage_bytes", extra.pop("stage_bytes", _STAGE_BYTES))
        config = load(extra, name="the settings of SGLang's door").config
        limits = config.timeout
        bounds = {"save": min(limits.save, longest), "load": min(limits.load, longest)}
        config = attrs.evolve(config, timeout=attrs.evolve(limits, **bounds))
        layout, keyspace = named(args, rows, config.weights_revision, ranks[1], parts)
        self._parts = parts
        page_bytes = layout.max_block_bytes * parts
        self.room = nbytes // page_bytes
        """Pages that are staged at once."""
        if not self.room:
            why = f"a page has {page_bytes} bytes"
            refuse("stage_bytes", nbytes, why, "Have prompts fit in.")
        num_slots = self.room * parts
        memory = {
            name: torch.empty(num_slots, *row.shape[1:], dtype=row.dtype)
            for name, row in rows.items()
        }
        self.limit = config.timeout.load
        """Seconds that a load may take."""
        self._fetch_limit = limits.fetch
        self.slots = list(memory.values())
        """What is staged, row by row."""
        self._doubt = Doubt.of_process()
        open_over = functools.partial(
            blocking.open,
            config,
            layout=layout,
            keyspace=keyspace,
            shard=0 if are_replicas(rows) else ranks[0],
        )
        with contextlib.ExitStack() as opened:
            self._pool = opened.enter_context(open_over(device=rows))
            slots = opened.enter_context(open_over(device=memory))
            self.staged = Staged(slots, num_slots)
            self._opened = opened.pop_all()

    def save(
        self,
        hashes: Sequence[str],
        pages: Sequence[int],
        *,
        wait_for_room: bool = False,
    ) -> Save | None:
        """Have pages of the engine saved; None if that is refused. Never blocks."""
        with contextlib.suppress(UCMError):  # such as: it is closed
            if not self._doubt.is_set:
                keys, blocks = self.keys_of(hashes), self.blocks_of(pages)
                return self._pool.save(keys, blocks, wait_for_room=wait_for_room)
        return None

    def num_stored(self, hashes: Sequence[str], until: float) -> int:
        """Return how many pages, from the first on, are stored, tiers asked; any thread."""
        with contextlib.suppress(UCMError):
            if hashes and not self._doubt.is_set:
                return self.whole(self._fetched(hashes, until).found)
        return 0

    def _fetched(self, hashes: Sequence[str], until: float) -> Fetched:
        """Have tiers asked, for half of the time that is left at most: others follow."""
        timeout = min(self._fetch_limit, left(until) / 2)
        fetched = self._pool.prefetch(self.keys_of(hashes), timeout=timeout)
        fetched.give_up()  # another cache loads it; it was used just now
        return fetched

    def bring_last(self, hashes: Sequence[str], until: float) -> None:
        """
        Have tiers bring the last of these pages that they have, if it is among the last four.

        Which they have is told one at a time, each within half of the time that is left;
        who cannot be asked for one is asked for no other. Any thread.
        """
        with contextlib.suppress(UCMError):
            for each in reversed(hashes[-_LOOKS:]):
                if self._doubt.is_set:
                    break
                if self._fetched([each], until).reason is not Reason.ABSENT:
                    break

    def are_stored(self, hashes: Sequence[str], until: float) -> list[bool]:
        """Return of each page whether the slab has it; any thread."""
        with contextlib.suppress(UCMError):
            if hashes and not self._doubt.is_set:
                asked = self.keys_of(hashes, parts=1)
                first = self._pool.contains(asked, timeout=left(until))
                if self._parts == 1 or not any(first):
                    return first
                # Of many tokens few have a state: the others are asked for one part alone.
                some = list(itertools.compress(hashes, first))
                asked = self.keys_of(some)
                parts = iter(self._pool.contains(asked, timeout=left(until)))
                are_whole = map(all, zip(*[parts] * self._parts, strict=True))
                whole = set(itertools.compress(some, are_whole))
                return [each in whole for each in hashes]
        return [False] * len(hashes)

    def stage(self, hashes: Sequence[str], timeout: float) -> int:
        """Return how many pages, from the first on, are staged by then."""
        with contextlib.suppress(UCMError):
            if not self._doubt.is_set:
                return self.whole(self.staged.stage(self.keys_of(hashes), timeout))
        return 0

    def whole(self, blocks: int) -> int:
        """Return how many pages, from the first on, so many blocks are."""
        return blocks // self._parts

    def blocks_of(self, pages: Sequence[int]) -> list[int]:
        """Return the blocks of pages."""
        parts = self._parts
        if parts == 1:
            return list(pages)
        return [page * parts + at for page in pages for at in range(parts)]

    def keys_of(self, hashes: Sequence[str], parts: int = 0) -> list[bytes]:
        """Return keys of the first *parts* blocks of each, or all: hash, and which part."""
        keys = [bytes.fromhex(each) for each in hashes]
        if self._parts == 1:
            return keys
        numbers = range(parts or self._parts)
        return [key + at.to_bytes(2, "big") for key in keys for at in numbers]

    def close(self) -> None:
        """Drain for ``timeout.shutdown``, and let go of all. Idempotent."""
        self._opened.close()


def within(seconds: float) -> float:
    """Return when so many seconds are over, for ``left``."""
    return SYSTEM.monotonic() + seconds


def left(until: float) -> float:
    """Return how many seconds are left."""
    return max(until - SYSTEM.monotonic(), 0.0)
