# SPDX-License-Identifier: Apache-2.0
"""
What the scheduler's half asks of the node's agent: the rest of a prefix, once in each life.

A request asks when it arrives, so that its blocks are on their way while it waits for its
turn, and otherwise when the engine asks for it first. While an answer is to come the engine is
told that nothing is known yet, and asks again in each step: that costs one look-up. Behind the
answer, or the deadline that runs from the question, the slab says what there is, as ever. What
was asked at arrival and came to nothing, or is no longer kept, is asked once more. Where the
engine has come to have more itself, it is looked whether there is still something to wait for.

Threading: the engine's scheduler thread; the client has one of its own.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
from msgspec.structs import replace

from ucm.agent.client import AgentClient
from ucm.agent.health import AgentHealth
from ucm.agent.joining import check_machines
from ucm.agent.protocol import LONGEST_S, MOST_KEYS
from ucm.blocks import PackedKey, ShardId
from ucm.config import UCMConfig
from ucm.errors import ConfigError
from ucm.metrics import Counters
from ucm.ranks import Agreement
from ucm.reasons import MissReason, Reason
from ucm.scheduler.elsewhere import Elsewhere
from ucm.scheduler.lives import Life
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.misses import SHORTFALLS
from ucm.scheduler.prompts import PromptSpeed
from ucm.scheduler.requests import NO_WISHES, Wishes
from ucm.scheduler.wanting import (
    WantedBlocks,
    falls_short,
    tokens_by_medium,
    wanted_blocks,
    wanted_hits,
)

__all__ = ["Tiers"]

_MOST_EARLY: Final = 64
"""Requests that have asked, beyond which nobody asks before its turn."""
_AGAIN: Final = (Reason.DEADLINE, Reason.QUEUE_TICKETS, Reason.UNAVAILABLE)
"""Answers to an early question behind which it is asked again."""


class _State(enum.Enum):
    """Where a request that has asked stands."""

    ASKED = "asked"
    ANSWERED = "answered"
    """Well or not; it does not ask again in this life."""
    BEGUN = "begun"
    """Its life has begun, and may load what was fetched; the next one may ask."""


@attrs.define
class _Question:
    """
    What a request has asked.

    Args:
        wanted: The blocks that were asked for, without their keys.
        asked_at: When.
        is_early: It was asked when the request arrived.
        computed: Tokens that the engine had itself when it was last looked at.
        state: Where it stands.
        reason: Of the answer.
    """

    wanted: WantedBlocks
    asked_at: float
    is_early: bool
    computed: int
    state: _State = _State.ASKED
    reason: Reason = Reason.NONE


class Tiers:
    """
    Asks for what a request's prefix lacks in the slab.

    Args:
        matcher: Names keys.
        client: Of the node's agent, closed with this; None: there are no tiers.
        config: How long a request waits, and what is found has to stay.
        prompts: How fast the engine computes them.
        counters: Count how wants ended.
        clock: In seconds.
    """

    def __init__(
        self,
        matcher: PrefixMatcher,
        client: AgentClient | None,
        config: UCMConfig,
        prompts: PromptSpeed,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._matcher = matcher
        self._client = client
        self.are_there = client is not None
        """Whether anything is ever fetched, so that requests need be told."""
        self._config = config
        self._seconds = config.timeout.fetch
        self._hold_s = min(config.timeout.load, LONGEST_S - self._seconds)
        self._predicts = config.predict_loads
        self._counters = counters
        self._clock = clock
        self._part_bytes: dict[ShardId, list[int]] = {}
        self._questions: dict[str, _Question] = {}
        self._prompts = prompts
        self._health = None
        if client is not None:
            self._health = AgentHealth(client, counters, config.tiers)
        self.elsewhere = Elsewhere()

    def agree(self, agreement: Agreement) -> None:
        """
        Take note of the parts of blocks, and of which ranks are on other machines.

        Raises:
            ConfigError: There are such, and nothing brings their parts, or nobody is here.
        """
        self._part_bytes = agreement.part_bytes()
        self.elsewhere.ranks = agreement.ranks_elsewhere()
        if self.elsewhere.ranks:
            self.are_there = True
            check_machines(self._config)
            if not self._part_bytes:
                raise ConfigError(
                    "store.path",
                    self._config.store.path,
                    "no rank uses the slab that the scheduler sees",
                    "Have a rank on the scheduler's machine, with the same /dev/shm.",
                )
            self._matcher.reshard(sorted(self._part_bytes))

    def planned(self, plan: StepPlan) -> StepPlan:
        """Put into a step's plan what ranks on other machines are asked for."""
        if not self.elsewhere.ranks:
            return plan
        news = self.elsewhere.take()
        return replace(plan, **news._asdict()) if any(news) else plan

    def within_reach(
        self, request_id: str, computed_tokens: int, wishes: Wishes
    ) -> Wishes:
        """Limit what is loaded to what ranks on other machines have, where there are any."""
        if not self.elsewhere.ranks:
            return wishes
        reach = self._reach(request_id, computed_tokens) - computed_tokens
        if not self._matcher.is_all_full and not self._is_all_here(request_id):
            reach = 0  # they have the windows of the longest hit, not of a shorter one
        return attrs.evolve(wishes, most_loaded=max(0, min(wishes.most_loaded, reach)))

    def _reach(self, request_id: str, computed_tokens: int) -> int:
        digest = self._matcher.keyspace_digest
        return self.elsewhere.reach(request_id, digest, computed_tokens)

    def _is_all_here(self, request_id: str) -> bool:
        """Return whether this machine has all that a request has asked for."""
        question, client = self._questions.get(request_id), self._client
        answer = None if client is None else client.answer(request_id)
        if question is None or answer is None:
            return False
        return answer.found == len(question.wanted.ends)

    def is_pending(self, request_id: str, computed_tokens: int = 0) -> bool:
        """Return whether an answer is still to come, and the engine has no more by itself."""
        question = self._questions.get(request_id)
        if question is None or question.state is not _State.ASKED:
            return False
        assert self._client is not None
        is_pending = self._client.is_pending(request_id)
        if is_pending or self._is_pending_elsewhere(request_id, question):
            return computed_tokens <= question.computed
        answer = self._client.answer(request_id)
        if answer is not None:
            question.reason = answer.reason
        else:
            is_up = self._client.is_up
            question.reason = Reason.DEADLINE if is_up else Reason.UNAVAILABLE
        question.state = _State.ANSWERED
        self._counters.add("ucm_fetch_wants_total", 1, reason=question.reason)
        return False

    def _is_pending_elsewhere(self, request_id: str, question: _Question) -> bool:
        is_in_time = self._clock() < question.asked_at + self._seconds
        return self.elsewhere.is_pending(request_id) and is_in_time

    def shortfall(self, request_id: str) -> tuple[MissReason, str] | None:
        """Return why the tiers did not bring what the slab lacks, if they say so."""
        question = self._questions.get(request_id)
        return None if question is None else SHORTFALLS.get(question.reason)

    def may_ask_early(self, request: Any) -> bool:  # noqa: ANN401 - vLLM's Request
        """Return whether a request that arrives is worth a look."""
        if self._client is None or not self._client.is_up:
            return False
        return len(self._questions) < _MOST_EARLY and self._may_ask(request)

    def ask(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        hashes: Sequence[bytes],
        computed_tokens: int,
        match: PrefixMatch,
        wishes: Wishes = NO_WISHES,
        *,
        is_early: bool = False,
    ) -> bool:
        """Ask for what a match lacks, if it is worth a question; return whether to wait."""
        request_id, client = request.request_id, self._client
        if client is None or not self._may_ask(request):
            return False
        most = self._matcher.within(
            request.num_tokens, computed_tokens, wishes.most_loaded
        )
        longest = self._matcher.longest(most, hashes)
        is_worth = wishes.tiers != () and self._is_short(
            match, computed_tokens, longest
        )
        if not client.is_up:
            if is_worth and self._config.tiers:
                lacked = WantedBlocks([], [], [longest])
                self._unasked(request_id, lacked, computed_tokens, Reason.UNAVAILABLE)
            return False
        if self._is_asked(request_id):
            question = self._questions[request_id]
            question.computed = computed_tokens
            if is_worth and computed_tokens < question.wanted.ends[-1]:
                return True
            self.drop(request_id)
        if not is_worth:
            return False
        tokens = range(computed_tokens, longest)
        wanted = self._wanted(hashes, tokens)
        if not wanted.keys:
            return False
        asked = wanted._replace(keys=[], sizes=[])  # which the agent is told
        compute_s = self._prompts.seconds_of(len(tokens)) if self._predicts else 0.0
        times = self._seconds, self._hold_s, compute_s
        if self.elsewhere.ranks and not self.elsewhere.ask(
            request_id, self._matcher, hashes, tokens, times, wishes
        ):
            self._unasked(request_id, asked, computed_tokens, Reason.QUEUE_TICKETS)
            return False
        is_asked = client.want(
            request_id,
            wanted.keys,
            wanted.sizes,
            seconds=self._seconds,
            hold_s=self._hold_s,
            compute_s=compute_s,
            only=wishes.tiers,
            priority=wishes.priority,
            tenant=wishes.tenant,
            hits=wanted.hits,
        )
        if is_asked:
            self._questions[request_id] = _Question(
                asked, self._clock(), is_early, computed_tokens
            )
        else:
            self.elsewhere.drop(request_id)
        return is_asked

    def _unasked(
        self, request_id: str, lacked: WantedBlocks, computed: int, reason: Reason
    ) -> None:
        """Remember why nobody was asked, as of an early question: so it may ask again."""
        self._questions[request_id] = _Question(
            lacked, self._clock(), True, computed, _State.ANSWERED, reason
        )

    def _wanted(self, hashes: Sequence[bytes], tokens: range) -> WantedBlocks:
        """Return what to ask for: where a shorter hit needs other blocks, those of all hits."""
        given = self._matcher, hashes, tokens, self._part_bytes
        if self._matcher.is_all_full or self.elsewhere.ranks:
            return wanted_blocks(*given)
        return wanted_hits(*given, MOST_KEYS)

    def _is_short(self, match: PrefixMatch, computed_tokens: int, longest: int) -> bool:
        """Return whether there may be more than was found, as far as is known here."""
        if not self.elsewhere.ranks:
            return falls_short(match, computed_tokens, longest)
        is_looked_up = match.reason in (MatchReason.HIT, MatchReason.LIMITED)
        return is_looked_up and computed_tokens < longest

    def _may_ask(self, request: Any) -> bool:  # noqa: ANN401 - vLLM's Request
        """Return whether a request has not asked, and would load what is fetched."""
        question = self._questions.get(request.request_id)
        if question is not None and not self._may_ask_again(question):
            return False
        if getattr(request, "skip_reading_prefix_cache", False):
            return False
        params = getattr(request, "kv_transfer_params", None)
        return not (isinstance(params, Mapping) and params.get("do_remote_prefill"))

    def _is_asked(self, request_id: str) -> bool:
        question = self._questions.get(request_id)
        return question is not None and question.state is _State.ASKED

    def _may_ask_again(self, question: _Question) -> bool:
        if question.state is not _State.ANSWERED:
            return True
        if not question.is_early:
            return False
        kept_until = question.asked_at + self._seconds + self._hold_s
        return question.reason in _AGAIN or self._clock() > kept_until

    def begun(self, request_id: str, external_tokens: int) -> None:
        """Take note that a life begins: the next one, after a preemption, asks anew."""
        if (question := self._questions.get(request_id)) is None:
            return
        question.state = _State.BEGUN
        if not external_tokens:
            self.drop(request_id)

    def hit(self, request_id: str, tokens: range) -> dict[str, int]:
        """Return how many tokens of a hit were in the slab, and in tiers before, by name."""
        question, client = self._questions.get(request_id), self._client
        answer = None if client is None else client.answer(request_id)
        if question is None or client is None or answer is None:
            return {"slab": len(tokens)}
        names = ("slab", *client.media)
        ends = question.wanted.ends_of(answer.reach)
        found: dict[str, int] = {}
        for medium, count in tokens_by_medium(tokens, ends, answer.media).items():
            name = names[medium]  # two tiers may have one
            found[name] = found.get(name, 0) + count
        return found

    def reported(
        self, report: StepReport, life_of: Callable[[str], Life | None]
    ) -> None:
        """
        Take what a rank reports of its machine.

        Drops what was fetched for requests whose lives wait for no load any more.
        """
        if report.reached:
            self.elsewhere.told(report.rank, report.reached)
        if not report.loads_done:
            return

        def is_loading(request_id: str) -> bool:
            return (life := life_of(request_id)) is not None and bool(life.loads)

        over = [
            request_id
            for request_id, question in self._questions.items()
            if question.state is _State.BEGUN and not is_loading(request_id)
        ]
        for request_id in over:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Let what was fetched for a request go: it is loaded, or over."""
        if self._questions.pop(request_id, None) is not None:
            assert self._client is not None
            self._client.drop(request_id)
            self.elsewhere.drop(request_id)

    def forget(self, keys: Sequence[PackedKey]) -> None:
        """Have tiers part with what the slab has parted with; any thread, waits for nothing."""
        if self._health is not None:
            self._health.forget(keys)

    def __len__(self) -> int:
        return len(self._questions)

    def refresh(self) -> None:
        """Bring up to date what metrics say of the agent; on a thread of its own."""
        if self._health is not None:
            self._health.refresh()

    def close(self) -> None:
        """Leave the agent. Idempotent."""
        if self._client is not None:
            self._client.close()
