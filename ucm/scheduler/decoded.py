# SPDX-License-Identifier: Apache-2.0
"""Which blocks are saved by where the prompt ends, and when those behind it are. Pure."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ucm.blocks import GroupId
from ucm.config import SaveDecoded
from ucm.layout import GroupKind, GroupLayout
from ucm.scheduler.spans import LOAD_SPANS

__all__ = ["NEVER_DUE", "Decoded", "SaveLimits"]

NEVER_DUE: Final = sys.maxsize
"""More tokens than any request has."""


@attrs.frozen(kw_only=True)
class SaveLimits:
    """
    How much may be saved, and when.

    Args:
        decoded: When blocks behind the prompt are saved.
        prompts: Whether those within it are.
        shortest: Tokens of a request from which on anything of it is saved.
        tickets: Saves that a worker lets wait for their copy.
        nbytes: Bytes of these.
        seconds: How long a save may wait.
        company: As soon as so many bytes wait for others, they go; 0: nothing waits.
        company_seconds: How long they wait at most.
        load_spans: A load's ticket carries as much as so many of saves.
        late_states: Where drafts go past the end of a block, some rank has the state at that end
            only in a later step.
    """

    decoded: SaveDecoded = SaveDecoded.AT_END
    prompts: bool = True
    shortest: int = 0
    tickets: int = 1024
    nbytes: int = 2 << 30
    seconds: float = 30.0
    company: int = 0
    company_seconds: float = 0.0
    load_spans: int = LOAD_SPANS
    late_states: bool = False

    @property
    def may_wait(self) -> bool:
        """Whether anything waits for others."""
        return self.company > 0 and self.company_seconds > 0


@attrs.define
class Decoded:
    """
    Whether blocks within the prompt are saved, and when the others are.

    Args:
        when: As the operator says. Only blocks of ``FULL`` groups can wait: a window
            gives its blocks back, and a state is gone after its step.
        span_blocks: By group, how many are together a full span.
        prompts: Whether blocks that are wholly within the prompt are saved.
        shortest: Tokens of a request from which on anything of it is saved; a prompt
            counts whole before it is computed.
        hurries: Whether the others are saved at once nevertheless.
        takes_all: Whether all is saved sooner or later of a request that has no wishes.
    """

    when: SaveDecoded
    span_blocks: Mapping[GroupId, int]
    prompts: bool = True
    shortest: int = 0
    hurries: bool = False
    takes_all: bool = attrs.field(init=False)

    @takes_all.default
    def _takes_all(self) -> bool:
        return self.when is not SaveDecoded.NEVER and not self.shortest

    def is_short(self, tokens: int, prompt_tokens: int) -> bool:
        """Return whether a request of so many tokens is not worth saving yet."""
        return max(tokens, prompt_tokens) < self.shortest

    def first(
        self, groups: Sequence[GroupLayout], began: int, prompt: int, computed: int
    ) -> tuple[list[int], int]:
        """
        Return what is known at the first look at a request.

        Args:
            groups: Of the engine.
            began: Tokens of the prompt with which it began.
            prompt: Those of its prompt now.
            computed: Its tokens that are there.

        Returns:
            By group the first block that is ever saved, and how many tokens do not wait:
            computed ones neither.
        """
        cursors = [0] * len(groups)
        if not self.prompts:
            cursors = [began // group.block_tokens for group in groups]
        if computed > prompt and self.saves_all(computed, prompt):
            prompt = computed
        return cursors, prompt

    def cut(
        self, group: GroupLayout, prompt_tokens: int, start: int, complete: int
    ) -> tuple[int, int]:
        """
        Return the first block that waits, and from how many tokens on to look again.

        Args:
            group: Of the blocks.
            prompt_tokens: Of the request.
            start: First block that was not taken yet.
            complete: Blocks that are complete; at least *start*.
        """
        prompt = prompt_tokens // group.block_tokens
        if complete >= prompt and self.when is SaveDecoded.NEVER:
            return max(start, prompt), NEVER_DUE
        waits = self.when is SaveDecoded.AT_END and group.kind is GroupKind.FULL
        if complete < prompt or self.hurries or not waits:
            return complete, (complete + 1) * group.block_tokens
        span, first = self.span_blocks[group.group_id], max(start, prompt)
        stop = first + (complete - first) // span * span
        return stop, (stop + span) * group.block_tokens

    def saves_up_to(self, tokens: int, prompt_tokens: int) -> bool:
        """Return whether the block that ends with so many tokens is ever saved."""
        is_within = tokens <= prompt_tokens
        return self.prompts if is_within else self.when is not SaveDecoded.NEVER

    def saves_all(self, tokens: int, prompt_tokens: int) -> bool:
        """Return whether so many tokens of a request are saved sooner or later."""
        return self.when is not SaveDecoded.NEVER or tokens <= prompt_tokens
