# SPDX-License-Identifier: Apache-2.0
"""
Loads that requests wait for, after ``deferred_loads`` of vLLM 0.33.

A load may be ordered only once the steps have ended that were in flight when its blocks
were taken: they may still read what these blocks held. Its request waits like any other,
and if it ends before that, there never was a load.
"""

from collections import Counter
from collections.abc import Sequence

from ucm.testing.host.choices import Choices
from ucm.testing.host.questions import Questions
from ucm.testing.host.registrations import Registrations
from ucm.testing.host.requests import Request
from ucm.testing.host.settings import HostSettings

__all__ = ["Loads"]


class Loads:
    """
    Orders loads, some of them late.

    Args:
        questions: Asks the connector.
        registrations: What is to be reported of a load once it is ordered.
        choices: Takes the decisions.
        settings: The engine.
        seen: Counts what happens.
    """

    def __init__(
        self,
        questions: Questions,
        registrations: Registrations,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
    ) -> None:
        self._questions = questions
        self._registrations = registrations
        self._choices = choices
        self._settings = settings
        self._seen = seen
        self._late: dict[str, tuple[int, Request, int, frozenset[int]]] = {}
        self._begun: list[int] = []
        self._loading: set[int] = set()

    def __len__(self) -> int:
        return len(self._late)

    def order(
        self,
        request: Request,
        external: int,
        blocks: Sequence[Sequence[int]],
        planned: int,
        processed: int,
    ) -> None:
        """
        Order a load, now or once a step has ended.

        Args:
            request: Who waits for it.
            external: Tokens to load.
            blocks: New ones of each group, into which it goes.
            planned: Number of the last step that was planned.
            processed: And of the last one whose results are known.
        """
        self._seen["load"] += 1
        new = frozenset(block for each in blocks for block in each)
        odds = self._settings.odds.late_load
        if planned > processed and odds and self._choices.chance("late_load", odds):
            self._seen["late_load"] += 1
            request.last_step = planned
            # Stages of a pipeline have more steps in flight than this host plans.
            fence = planned + self._choices.below("late_by", 2)
            self._late[request.request_id] = fence, request, external, new
        else:
            self._begin(request, external, new)

    def step_ended(self, number: int) -> None:
        """Order what had to wait for a step."""
        for name, (fence, request, external, new) in list(self._late.items()):
            if fence <= number:
                del self._late[name]
                self._begun += sorted(new)
                self._begin(request, external, new)

    def overwritten(self, fresh: list[int]) -> list[int]:
        """
        Return the blocks that the next step may overwrite.

        Nobody writes into those of a load before it is ordered.

        Args:
            fresh: Blocks that were handed out.
        """
        waiting = {block for *_, new in self._late.values() for block in new}
        begun, self._begun = self._begun, []
        return begun + [block for block in fresh if block not in waiting]

    def take_begun(self) -> set[int]:
        """Return the blocks of all loads that were ordered since the last call."""
        loading, self._loading = self._loading, set()
        return loading

    def drop(self, request: Request) -> bool:
        """Forget a load that was not ordered yet; return whether there was one."""
        dropped = self._late.pop(request.request_id, None) is not None
        self._seen["late_load_dropped"] += dropped
        return dropped

    def _begin(self, request: Request, external: int, new: frozenset[int]) -> None:
        self._loading |= new
        self._questions.tell_blocks(request, external)
        self._registrations.load_begins(request.request_id, new)
