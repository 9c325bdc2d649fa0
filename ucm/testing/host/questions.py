# SPDX-License-Identifier: Apache-2.0
"""
Every question that the engine's scheduler asks, with what an answer must look like.

Whatever the engine asks once it may ask twice.
"""

import pickle  # noqa: TID251 - what the engine does with metadata
from collections import Counter

from ucm.layout import GroupKind, KVLayout
from ucm.testing.host.choices import Choices
from ucm.testing.host.hooks import SchedulerHooks
from ucm.testing.host.requests import Blocks, Request, SchedulerOutput
from ucm.testing.host.rules import Rule, require
from ucm.testing.host.settings import HostSettings

__all__ = ["Questions"]


class Questions:
    """
    The scheduler's side of a connector, asked with care.

    Args:
        hooks: The connector's side.
        layout: The engine's groups.
        choices: Decide what is asked twice, and which offers are declined.
        settings: The engine.
        seen: Counts what happens.
    """

    def __init__(
        self,
        hooks: SchedulerHooks,
        layout: KVLayout,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
    ) -> None:
        self._hooks = hooks
        self._layout = layout
        self._has_states = any(group.kind is GroupKind.STATE for group in layout.groups)
        self._choices = choices
        self._settings = settings
        self._seen = seen

    def match(
        self, request: Request, local_tokens: int, tail: int
    ) -> tuple[int, bool] | None:
        """Return tokens to load and whether the request waits; none to ask later."""
        if tail:
            self.ask(request, local_tokens + tail)
        if self._choices.chance("repeat", self._settings.odds.repeat):
            self.ask(request, local_tokens)
        tokens, parks = self.ask(request, local_tokens)
        if tokens is None:
            return None
        if tokens <= tail:
            return 0, False
        if self._choices.chance("decline", self._settings.odds.decline):
            self._seen["declined"] += 1
            return 0, False
        return tokens, parks

    def ask(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Ask how many tokens can be loaded beyond those computed."""
        before = request.snapshot()
        answer = self._hooks.get_num_new_matched_tokens(request, computed)
        name = request.request_id
        require(before == request.snapshot(), Rule.MUTATED, "by a match", request=name)
        require(
            isinstance(answer, tuple)
            and len(answer) == 2
            and (answer[0] is None or isinstance(answer[0], int))
            and isinstance(answer[1], bool)
            and (answer[0] or 0) >= 0,
            Rule.ANSWER,
            f"get_num_new_matched_tokens answered {answer!r}",
            request=name,
        )
        tokens: int | None = answer[0]
        parks: bool = answer[1]
        if not tokens:
            require(tokens is None or not parks, Rule.ASYNC_NOTHING, "", request=name)
            return tokens, parks
        end = computed + tokens
        must_leave_one = not parks or self._has_states
        require(
            end <= request.num_tokens - must_leave_one,
            Rule.MATCH_TOO_LONG,
            f"{computed} and {tokens} of {request.num_tokens} tokens, parks={parks}",
            request=name,
        )
        require(
            end >= request.num_tokens - 1 or end % self._layout.alignment_tokens == 0,
            Rule.MATCH_UNALIGNED,
            f"{computed} and {tokens} tokens",
            request=name,
        )
        return tokens, parks

    def tell_blocks(self, request: Request, external: int) -> None:
        """Tell of a request's blocks and of what is to be loaded."""
        before = request.snapshot()
        blocks = Blocks(tuple(table.copy() for table in request.tables))
        self._hooks.update_state_after_alloc(request, blocks, external)
        require(
            before == request.snapshot(),
            Rule.MUTATED,
            "by update_state_after_alloc",
            request=request.request_id,
        )

    def plan(self, output: SchedulerOutput) -> bytes:
        """Return what the workers are to be told, as it is sent."""
        before = output.snapshot()
        metadata = self._hooks.build_connector_meta(output)
        require(before == output.snapshot(), Rule.MUTATED, "SchedulerOutput, by a plan")
        sent = pickle.dumps(metadata)
        again = pickle.loads(sent)  # noqa: S301 - ours
        require(
            metadata is not None and metadata == again,
            Rule.METADATA_CHANGED,
            f"{metadata!r} became {again!r}",
        )
        limit = self._settings.max_metadata_bytes
        require(
            len(sent) <= limit,
            Rule.METADATA_TOO_LARGE,
            f"{len(sent)} bytes, more than {limit}",
        )
        return sent

    def keeps(self, request: Request) -> bool:
        """Return whether a finished request's blocks are to be kept."""
        times = 1 + self._choices.chance("repeat", self._settings.odds.repeat)
        answers = []
        for _ in range(times):
            answer = self._hooks.request_finished_all_groups(
                request, tuple(table.copy() for table in request.tables)
            )
            require(
                isinstance(answer, tuple)
                and len(answer) == 2
                and isinstance(answer[0], bool)
                and (answer[1] is None or isinstance(answer[1], dict)),
                Rule.ANSWER,
                f"request_finished answered {answer!r}",
                request=request.request_id,
            )
            answers.append(answer[0])
        require(
            len(set(answers)) == 1,
            Rule.FINISHED_CHANGED,
            f"{answers}",
            request=request.request_id,
        )
        require(
            request.has_run or not answers[0],
            Rule.DEFERRED_FOR_NOTHING,
            "it never had a block",
            request=request.request_id,
        )
        return bool(answers[0])
