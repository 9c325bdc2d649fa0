# SPDX-License-Identifier: Apache-2.0
"""One prompt of eight blocks, looked up and explained as a door does."""

from msgspec.structs import replace

from tests.scheduler.model import facts, hashes_of, scheduled
from ucm.blocks import PackedKey
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.misses import Miss
from ucm.scheduler.requests import NO_WISHES, RequestEnd, Wishes

HASHES = hashes_of("w", 8)
TOKENS = 33
"""Eight whole blocks, and a token that is left to compute."""


def nowhere(key: PackedKey) -> None:
    """Know of no other key space."""


def why(
    adapter: SchedulerAdapter,
    *,
    tokens: int = TOKENS,
    hashes: list[bytes] = HASHES,
    computed: int = 0,
    name: str = "asks",
    wishes: Wishes = NO_WISHES,
) -> Miss | None:
    """Look up and explain, as a door does."""
    match = adapter.match_prefix(name, tokens, hashes, computed, wishes)
    return adapter.misses.explain(match, computed, nowhere)


def told(miss: Miss | None) -> tuple[str, int | None, str | None]:
    """Return reason, block and text of a miss."""
    assert miss is not None
    at = None if miss.block is None else miss.block.at
    text = miss.detail.get("text")
    return miss.reason.value, at, None if text is None else str(text)


def start(
    adapter: SchedulerAdapter, wishes: Wishes = NO_WISHES
) -> tuple[SpanOrder, ...]:
    """Compute a request of eight blocks; return what is saved of it."""
    request = scheduled("r", HASHES, [range(1, 10)], 0, TOKENS, is_new=True, prompt=32)
    return adapter.plan_step(facts(replace(request, wishes=wishes))).saves


def end(wishes: Wishes = NO_WISHES) -> RequestEnd:
    """Return the end of that request."""
    return RequestEnd(
        computed_tokens=TOKENS,
        known_tokens=TOKENS,
        prompt_tokens=32,
        hashes=HASHES,
        tables=[range(1, 10)],
        wishes=wishes,
    )
