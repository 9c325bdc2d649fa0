# SPDX-License-Identifier: Apache-2.0
"""
One step of the engine: who is scheduled, what the forward pass reads and writes.

A ``Draft`` grows while the scheduler decides; ``Step`` is what it comes to. Everything
in a step is fixed when it is planned, so that workers may carry it out later.
"""

import attrs

from ucm.layout import KVLayout
from ucm.testing.host.requests import (
    CachedRequests,
    NewRequest,
    Request,
    SchedulerOutput,
)
from ucm.testing.host.tables import first_needed, written_blocks

__all__ = ["Draft", "Pass", "Scheduled", "Step", "plan_passes"]


@attrs.define
class Scheduled:
    """
    A request's part in a step.

    Args:
        request: Who.
        tokens: To compute.
        blocks: ``[groups]`` handed out in this step; all of them for a first run.
        is_new: It never ran before.
        is_resumed: It runs again after a preemption.
    """

    request: Request
    tokens: int
    blocks: tuple[list[int], ...] | None
    is_new: bool = False
    is_resumed: bool = False


@attrs.define
class Draft:
    """
    A step that is being decided.

    Args:
        budget: Tokens that may still be scheduled.
    """

    budget: int
    entries: dict[str, Scheduled] = attrs.Factory(dict)
    loading: set[str] = attrs.Factory(set)
    copies: list[Request] = attrs.Factory(list)
    has_preempted: bool = False

    def add(self, entry: Scheduled) -> None:
        """Schedule a request."""
        self.entries[entry.request.request_id] = entry
        self.budget -= entry.tokens

    def drop(self, request: Request) -> None:
        """Take a request out again."""
        entry = self.entries.pop(request.request_id, None)
        if entry is not None:
            self.budget += entry.tokens

    def output(self) -> SchedulerOutput:
        """Return the step as a connector is told of it."""
        made = SchedulerOutput(has_sync_kv_loads=bool(self.loading))
        cached = CachedRequests()
        for name, entry in self.entries.items():
            request = entry.request
            made.num_scheduled_tokens[name] = entry.tokens
            made.total_num_scheduled_tokens += entry.tokens
            if entry.is_new:
                made.scheduled_new_reqs.append(
                    NewRequest(
                        req_id=name,
                        prompt_token_ids=request.prompt_token_ids,
                        block_ids=entry.blocks or (),
                        num_computed_tokens=request.num_computed_tokens,
                    )
                )
                continue
            if entry.is_resumed:
                cached.resumed_req_ids.add(name)
            cached.req_ids.append(name)
            cached.new_block_ids.append(entry.blocks)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(request.num_output_tokens)
        made.scheduled_cached_reqs = cached
        return made


@attrs.define
class Pass:
    """
    What a forward pass does to the blocks of one group, ``[n]`` each.

    Args:
        reads: Blocks whose content it relies on.
        read_states: What these must hold.
        readers: Whose prefix they belong to, with the index within it.
        writes: Blocks that it fills, wholly or in part.
        write_states: What these hold afterwards.
        writers: Whose they are.
        copies: Blocks that it fills first, from the engine's own cache.
        copy_states: What these hold then.
    """

    reads: list[int] = attrs.Factory(list)
    read_states: list[int] = attrs.Factory(list)
    readers: list[tuple[str, int]] = attrs.Factory(list)
    writes: list[int] = attrs.Factory(list)
    write_states: list[int] = attrs.Factory(list)
    writers: list[str] = attrs.Factory(list)
    copies: list[int] = attrs.Factory(list)
    copy_states: list[int] = attrs.Factory(list)

    def without_writes_of_others(self) -> None:
        """
        Rely on no block that another request fills in this very step.

        Attention of a layer runs after all its keys and values are there.
        """
        owners = dict(zip(self.writes, self.writers, strict=True))
        kept = [
            at
            for at, (block, (name, _)) in enumerate(
                zip(self.reads, self.readers, strict=True)
            )
            if owners.get(block, name) == name
        ]
        if len(kept) < len(self.reads):
            self.reads = [self.reads[at] for at in kept]
            self.read_states = [self.read_states[at] for at in kept]
            self.readers = [self.readers[at] for at in kept]


@attrs.define(kw_only=True)
class Step:
    """
    A planned step.

    Args:
        number: Counts up.
        output: What the connector was told.
        metadata: What it wants its workers to be told, as sent.
        fresh: Blocks handed out in this step that the engine may overwrite; those that
            *output* tells to be cleared or copied onto are not among them.
        passes: ``[groups]`` what the forward pass does.
        generates: Requests of which the step computes the last known token.
        scheduled: Requests and their tokens.
    """

    number: int
    output: SchedulerOutput
    metadata: bytes
    fresh: list[int]
    passes: list[Pass]
    generates: list[Request]
    scheduled: list[tuple[Request, int]]


def plan_passes(layout: KVLayout, draft: Draft, *, shares: bool) -> list[Pass]:
    """
    Return what the forward pass does, by group.

    Args:
        layout: Groups.
        draft: Who is scheduled.
        shares: Whether requests may use blocks that others fill in the same step.
    """
    passes = [Pass() for _ in layout.groups]
    for entry in draft.entries.values():
        request = entry.request
        name, states = request.request_id, request.stream.states
        computed = request.num_computed_tokens
        valid = max(request.valid_tokens, computed)
        end = computed + entry.tokens
        for group, table, each in zip(
            layout.groups, request.tables, passes, strict=True
        ):
            size = group.block_tokens
            for i in range(first_needed(group, computed), -(-valid // size)):
                each.reads.append(table[i])
                each.read_states.append(states[min((i + 1) * size, valid)])
                each.readers.append((name, i))
            last = max(end, valid)
            for i in written_blocks(group, computed, end):
                each.writes.append(table[i])
                each.write_states.append(states[min((i + 1) * size, last)])
                each.writers.append(name)
    for request in draft.copies:
        computed = request.num_computed_tokens
        for group, table, each in zip(
            layout.groups, request.tables, passes, strict=True
        ):
            each.copies.append(table[computed // group.block_tokens])
            each.copy_states.append(request.stream.states[computed])
    if shares:
        for each in passes:
            each.without_writes_of_others()
    return passes
