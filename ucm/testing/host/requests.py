# SPDX-License-Identifier: Apache-2.0
"""
Requests, and what a scheduler hands to a connector about them.

Fields have the names that vLLM 0.32 gives them, so that a connector cannot tell.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from ucm.testing.host.content import Stream

__all__ = [
    "BlockCopy",
    "BlockState",
    "Blocks",
    "CachedRequests",
    "KVOutput",
    "NewRequest",
    "Request",
    "SchedulerOutput",
    "Status",
]


class Status(enum.Enum):
    """Where a request is; vLLM's names."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FINISHED_ABORTED = "aborted"


@attrs.define(eq=False, kw_only=True)
class Request:
    """
    A request.

    Args:
        request_id: Its name; used again after it has left the engine.
        stream: Its text.
        num_prompt_tokens: What of the text is the prompt.
        max_tokens: Tokens to generate.
        hash_block_tokens: Tokens covered by one block hash.
        num_groups: KV cache groups.
        tables: ``[groups][blocks]``.
        cached: ``[groups]`` blocks that the engine's own cache was told of.
        valid_tokens: Tokens whose KV is in the blocks; a full hit has one more than
            counts as computed.
        in_flight_tokens: Scheduled, with the result not known yet.
        placeholders: Tokens that steps in flight will generate.
        last_step: The last step that scheduled it.
        has_run: Blocks were allocated for it.
    """

    request_id: str
    stream: Stream
    num_prompt_tokens: int
    max_tokens: int
    hash_block_tokens: int
    num_groups: int
    status: Status = Status.WAITING
    num_tokens: int = attrs.Factory(lambda self: self.num_prompt_tokens, True)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = attrs.Factory(list)
    kv_transfer_params: dict[str, Any] | None = None
    tables: list[list[int]] = attrs.Factory(list)
    cached: list[int] = attrs.Factory(list)
    valid_tokens: int = 0
    in_flight_tokens: int = 0
    placeholders: int = 0
    last_step: int = 0
    has_run: bool = False

    def __attrs_post_init__(self) -> None:
        self.grow(0)
        self.clear_tables()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return list(self.stream.tokens[: self.num_prompt_tokens])

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output."""
        return list(self.stream.tokens[: self.num_tokens])

    @property
    def unscheduled_tokens(self) -> int:
        """Tokens that could be computed now; none once all output is on its way."""
        if self.num_output_tokens + self.placeholders >= self.max_tokens:
            return 0
        return self.num_tokens + self.placeholders - self.num_computed_tokens

    @property
    def has_blocks(self) -> bool:
        """Whether any block belongs to it."""
        return any(self.tables)

    def is_finished(self) -> bool:
        """Return whether it has come to its end."""
        return self.status in (Status.FINISHED, Status.FINISHED_ABORTED)

    def grow(self, tokens: int) -> None:
        """Take so many more tokens from the text."""
        self.num_tokens += tokens
        known = self.num_tokens // self.hash_block_tokens
        self.block_hashes.extend(self.stream.hashes[len(self.block_hashes) : known])

    def clear_tables(self) -> None:
        """Have no blocks."""
        self.tables = [[] for _ in range(self.num_groups)]
        self.cached = [0] * self.num_groups

    def snapshot(self) -> tuple[object, ...]:
        """Return all that a connector could change."""
        return (
            self.request_id,
            self.status,
            self.num_tokens,
            self.num_computed_tokens,
            tuple(self.block_hashes),
            tuple(map(tuple, self.tables)),
        )


@attrs.frozen
class Blocks:
    """A request's blocks, as ``KVCacheBlocks`` tells them."""

    tables: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return ``[groups][blocks]``."""
        return self.tables


@attrs.define(kw_only=True)
class NewRequest:
    """A request that runs for the first time: vLLM's ``NewRequestData``."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@attrs.define(kw_only=True)
class CachedRequests:
    """Requests that have run before: vLLM's ``CachedRequestData``."""

    req_ids: list[str] = attrs.Factory(list)
    resumed_req_ids: set[str] = attrs.Factory(set)
    new_block_ids: list[tuple[list[int], ...] | None] = attrs.Factory(list)
    num_computed_tokens: list[int] = attrs.Factory(list)
    num_output_tokens: list[int] = attrs.Factory(list)


class BlockCopy(NamedTuple):
    """A copy within the engine's memory, before a forward pass."""

    src_block_id: int
    dst_block_id: int


@attrs.define(kw_only=True)
class BlockState:
    """
    Block tables of the scheduled requests, while the step is planned.

    Args:
        req_ids: Who is scheduled, and who has a state to offer.
        resolve_block_ids: Returns a request's tables.
        boundary_state_offloads: By request, states that the step completes: group,
            block, and tokens of the prefix.
    """

    req_ids: set[str]
    resolve_block_ids: Callable[[str], tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = attrs.Factory(dict)

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return ``[groups][blocks]`` of a scheduled request."""
        return self.resolve_block_ids(req_id) if req_id in self.req_ids else None


@attrs.define(kw_only=True)
class SchedulerOutput:
    """One step, as a connector is told of it."""

    scheduled_new_reqs: list[NewRequest] = attrs.Factory(list)
    scheduled_cached_reqs: CachedRequests = attrs.Factory(CachedRequests)
    num_scheduled_tokens: dict[str, int] = attrs.Factory(dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = attrs.Factory(set)
    preempted_req_ids: set[str] | None = None
    has_sync_kv_loads: bool = False
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[BlockCopy] | None = None
    kv_connector_metadata: object = None
    kv_connector_block_state: BlockState | None = None

    def snapshot(self) -> tuple[object, ...]:
        """Return all that a connector could change."""
        cached = self.scheduled_cached_reqs
        return (
            [
                (each.req_id, each.num_computed_tokens, _copy(each.block_ids))
                for each in self.scheduled_new_reqs
            ],
            cached.req_ids.copy(),
            cached.resumed_req_ids.copy(),
            [each and _copy(each) for each in cached.new_block_ids],
            cached.num_computed_tokens.copy(),
            cached.num_output_tokens.copy(),
            self.num_scheduled_tokens.copy(),
            self.total_num_scheduled_tokens,
            self.finished_req_ids.copy(),
            None if self.preempted_req_ids is None else self.preempted_req_ids.copy(),
            self.has_sync_kv_loads,
            id(self.kv_connector_block_state),
        )


def _copy(tables: tuple[list[int], ...]) -> list[list[int]]:
    return [table.copy() for table in tables]


@attrs.define(kw_only=True)
class KVOutput:
    """What one rank, or all together, tell in a step: ``KVConnectorOutput``."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = attrs.Factory(set)
    invalid_block_ids: set[int] = attrs.Factory(set)
    kv_connector_worker_meta: Any = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    expected_finished_count: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.kv_connector_worker_meta
            or self.kv_connector_stats
            or self.kv_cache_events
        )
