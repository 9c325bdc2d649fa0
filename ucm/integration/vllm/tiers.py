# SPDX-License-Identifier: Apache-2.0
"""
What the scheduler's half asks of the node's agent: the rest of a prefix, once in each life.

While an answer is to come the engine is told that nothing is known yet, and asks again in
each step: that costs one look-up. Behind the answer, or the deadline that runs from the first
question, the slab says what there is, as ever.

Threading: the engine's scheduler thread; the client has one of its own.
"""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ucm.agent.client import AgentClient
from ucm.agent.launch import Launcher
from ucm.agent.protocol import LONGEST_S, digest_of
from ucm.blocks import ShardId
from ucm.config import KVEvents, UCMConfig
from ucm.errors import ConfigError
from ucm.metrics import Counters
from ucm.reasons import Reason
from ucm.registry import registered
from ucm.scheduler.hits import tokens_by_medium
from ucm.scheduler.matches import PrefixMatch
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.wanting import falls_short, wanted_blocks
from ucm.tracing import Log

__all__ = ["Tiers", "check_tiers", "open_client"]


class _State(enum.Enum):
    """Where a request that has asked stands."""

    ASKED = "asked"
    ANSWERED = "answered"
    """Well or not; it does not ask again in this life."""
    LATE = "late"
    """No answer came in time: what the tiers have is not known."""
    BEGUN = "begun"
    """Its life has begun, and may load what was fetched; the next one may ask."""


class Tiers:
    """
    Asks for what a request's prefix lacks in the slab.

    Args:
        matcher: Names keys.
        client: Of the node's agent, closed with this; None: there are no tiers.
        config: How long a request waits, and what is found has to stay.
        counters: Count how wants ended.
    """

    def __init__(
        self,
        matcher: PrefixMatcher,
        client: AgentClient | None,
        config: UCMConfig,
        counters: Counters,
    ) -> None:
        self._matcher = matcher
        self._client = client
        self._seconds = min(config.timeout.fetch, LONGEST_S)
        self._hold_s = min(config.timeout.load, LONGEST_S - self._seconds)
        self._counters = counters
        self._part_bytes: dict[ShardId, list[int]] = {}
        self._wants: dict[str, _State] = {}
        self._ends: dict[str, list[int]] = {}
        """Behind which tokens the blocks end that were asked for."""

    def agree(self, part_bytes: dict[ShardId, list[int]]) -> None:
        """Take note of the bytes of each part of a block, by group."""
        self._part_bytes = part_bytes

    def is_pending(self, request_id: str) -> bool:
        """Return whether a request's answer is still to come."""
        if self._wants.get(request_id) is not _State.ASKED or self._client is None:
            return False
        if self._client.is_pending(request_id):
            return True
        answer = self._client.answer(request_id)
        if answer is not None:
            reason = answer.reason
        else:
            reason = Reason.DEADLINE if self._client.is_up else Reason.UNAVAILABLE
        is_late = reason is Reason.DEADLINE
        self._wants[request_id] = _State.LATE if is_late else _State.ANSWERED
        self._counters.add("ucm_fetch_wants_total", 1, reason=reason)
        return False

    def is_late(self, request_id: str) -> bool:
        """Return whether a request goes on without knowing all that the tiers have."""
        return self._wants.get(request_id) is _State.LATE

    def ask(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        hashes: Sequence[bytes],
        computed_tokens: int,
        match: PrefixMatch,
    ) -> bool:
        """Ask for what a match lacks, if it is worth a question; return whether it was."""
        request_id, client = request.request_id, self._client
        if client is None or not client.is_up or not self._may_ask(request):
            return False
        longest = self._matcher.longest(request.num_tokens, hashes)
        if not falls_short(match, computed_tokens, longest):
            return False
        tokens = range(computed_tokens, longest)
        keys, sizes, ends = wanted_blocks(
            self._matcher, hashes, tokens, self._part_bytes
        )
        is_asked = client.want(
            request_id, keys, sizes, seconds=self._seconds, hold_s=self._hold_s
        )
        if is_asked:
            self._wants[request_id] = _State.ASKED
            self._ends[request_id] = ends
        return is_asked

    def _may_ask(self, request: Any) -> bool:  # noqa: ANN401 - vLLM's Request
        """Return whether a request has not asked, and would load what is fetched."""
        if self._wants.get(request.request_id, _State.BEGUN) is not _State.BEGUN:
            return False
        if getattr(request, "skip_reading_prefix_cache", False):
            return False
        params = getattr(request, "kv_transfer_params", None)
        return not (isinstance(params, Mapping) and params.get("do_remote_prefill"))

    def begun(self, request_id: str, external_tokens: int) -> None:
        """Take note that a life begins: the next one, after a preemption, asks anew."""
        if request_id not in self._wants:
            return
        self._wants[request_id] = _State.BEGUN
        if not external_tokens:
            self.drop(request_id)

    def hit(self, request_id: str, tokens: range) -> dict[str, int]:
        """Return how many tokens of a hit were in the slab, and in tiers before, by name."""
        ends, client = self._ends.get(request_id), self._client
        answer = None if client is None else client.answer(request_id)
        if ends is None or client is None or answer is None:
            return {"slab": len(tokens)}
        names = ("slab", *client.media)
        found = tokens_by_medium(tokens, ends, answer.media)
        return {names[medium]: count for medium, count in found.items()}

    def drop(self, request_id: str) -> None:
        """Let what was fetched for a request go: it is loaded, or over."""
        self._ends.pop(request_id, None)
        if self._wants.pop(request_id, None) is not None and self._client is not None:
            self._client.drop(request_id)

    def __len__(self) -> int:
        return len(self._wants)

    def close(self) -> None:
        """Leave the agent. Idempotent."""
        if self._client is not None:
            self._client.close()


def check_tiers(config: UCMConfig) -> None:
    """
    Refuse tiers that cannot be.

    Raises:
        ConfigError: There is no slab above them, or nobody knows their type.
    """
    if not config.tiers:
        return
    if config.store.type != "slab":
        raise ConfigError(
            "tiers",
            list(config.tiers),
            f"store.type is {config.store.type!r}, and only a slab has tiers",
            "Leave store.type out, or the tiers.",
        )
    known = registered("ucm.backends")
    for number, tier in enumerate(config.tiers):
        if tier["type"] not in known:
            raise ConfigError(
                f"tiers.{number}.type", tier["type"], "unknown", f"Registered: {known}."
            )


def open_client(config: UCMConfig, slot_bytes: int, log: Log) -> AgentClient | None:
    """Return what talks to the agent, and starts it; None where nobody needs one."""
    if not config.tiers and config.kv_events is KVEvents.OFF:
        return None
    path = Path(config.store.path)
    tiers = digest_of(config.tiers) if config.tiers else ""
    return AgentClient(path, slot_bytes, log, Launcher(config), tiers)
