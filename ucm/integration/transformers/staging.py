# SPDX-License-Identifier: Apache-2.0
"""
Memory between a model's caches, which grow, and blocks, which stay where they are.

A *lane* is a run of neighbouring blocks that one restore or save has for itself. Bytes
are copied twice on their way, here and between lane and store: here by one call for each
tensor and part of a prompt, never block by block.

Threading: any thread.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import attrs
import torch

from ucm.cache.sync import Save
from ucm.integration.transformers.model import Shape

__all__ = ["Lane", "Staging", "States"]

States = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""For each layer keys and values, ``[batch, heads, tokens, dim]``."""


@attrs.define(eq=False)
class Lane:
    """
    Blocks of the pool.

    Args:
        blocks: Their indexes, which are neighbours.
        is_lost: Whether a copy may use them for ever; then nobody may again.
        read_by: A save that reads them. Who is interrupted while waiting for it, as by
            Ctrl-C, leaves it behind: until it is over they are nobody's.
    """

    blocks: range
    is_lost: bool = False
    read_by: Save | None = None


class Staging:
    """
    The pool that a cache is opened over, and the ways into it and out of it.

    Args:
        shape: Of what the model keeps.
        block_tokens: Tokens of a block.
        lanes: How many there are.
        lane_blocks: Blocks of each.
    """

    def __init__(
        self, shape: Shape, *, block_tokens: int, lanes: int, lane_blocks: int
    ) -> None:
        self._shape = shape
        self._tokens = block_tokens
        self.lane_blocks = lane_blocks
        size = (lanes * lane_blocks, block_tokens * shape.token_elements)
        with torch.inference_mode(False):  # or nobody outside of it could write there
            self.pool = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            """``[num_blocks, elements]``: what is registered with a device."""
            self._pages = list(self._find_pages())
        starts = range(0, len(self.pool), lane_blocks)
        self._free = deque(Lane(range(at, at + lane_blocks)) for at in starts)
        self._turns = threading.Semaphore(lanes)

    @contextlib.contextmanager
    def lane(self, timeout: float) -> Iterator[Lane]:
        """Have a lane for oneself; a lost one where none is free in time."""
        if not self._turns.acquire(timeout=timeout):
            yield Lane(range(0), is_lost=True)
            return
        lane = self._free.popleft()
        try:
            yield lane
        finally:
            if not lane.is_lost:
                self._give_back(lane)

    def _give_back(self, lane: Lane) -> None:
        """Let others have a lane, as soon as nothing reads it."""
        save, lane.read_by = lane.read_by, None
        if save is not None:
            save.when_over(lambda: self._give_back(lane))
            return
        self._free.append(lane)
        self._turns.release()

    def new_states(self, batch: int, tokens: int) -> States:
        """Return states of no tokens: zeros, which are masked."""

        def zeros(heads: int, dim: int) -> torch.Tensor:
            shape, like = (batch, heads, tokens, dim), self._shape
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        return [
            (zeros(heads, key), zeros(heads, value))
            for heads, key, value in self._shape.layers
        ]

    def copy_in(self, states: States, row: int, first: int, blocks: range) -> None:
        """Copy whole blocks, from token *first* of a row on, to the pool."""
        for tokens, pages in self._pairs(states, row, first, blocks):
            pages.copy_(tokens)
        self.wait()

    def copy_out(self, states: States, row: int, first: int, blocks: range) -> None:
        """Copy blocks of the pool to a row, from token *first* on."""
        for tokens, pages in self._pairs(states, row, first, blocks):
            tokens.copy_(pages)
        self.wait()

    @torch.no_grad()
    def _pairs(
        self, states: States, row: int, first: int, blocks: range
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``[heads, blocks, tokens, dim]`` of each tensor, and of its pages."""
        self.wait()  # another stream may have written the states
        stop, size = first + len(blocks) * self._tokens, (len(blocks), self._tokens)
        flat = [each.detach()[row, :, first:stop] for pair in states for each in pair]
        part = slice(blocks.start, blocks.stop)
        return [
            (
                tokens.view(len(tokens), *size, tokens.shape[2]),
                pages[part].transpose(0, 1),
            )
            for tokens, pages in zip(flat, self._pages, strict=True)
        ]

    def wait(self) -> None:
        """Wait for an accelerator; a CPU's calls return when their work is done."""
        if self._shape.device.type != "cpu":
            torch.accelerator.synchronize(self._shape.device)

    def _find_pages(self) -> Iterator[torch.Tensor]:
        """Yield ``[num_blocks, heads, tokens, dim]`` for keys and values of each layer."""
        at = 0
        for heads, key, value in self._shape.layers:
            for dim in (key, value):
                stop = at + heads * self._tokens * dim
                yield self.pool[:, at:stop].view(-1, heads, self._tokens, dim)
                at = stop
