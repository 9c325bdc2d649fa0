# SPDX-License-Identifier: Apache-2.0
"""An agent's client that answers when a test says so."""

import attrs

from ucm.agent.client import Answer
from ucm.agent.dialing import Agents

__all__ = ["FakeClient"]


@attrs.define
class FakeClient:
    """Stands in for the agent's client: answers when a test says so."""

    is_up: bool = True
    pending: set = attrs.Factory(set)
    answers: dict = attrs.Factory(dict)
    wanted: list = attrs.Factory(list)
    times: list = attrs.Factory(list)
    terms: list = attrs.Factory(list)
    dropped: list = attrs.Factory(list)
    media: tuple = ("disk", "redis")
    status: dict = attrs.Factory(dict)
    agents: Agents = attrs.Factory(Agents)
    looks: int = 0
    forgotten: list = attrs.Factory(list)
    told: list = attrs.Factory(list)

    def want(self, request_id, keys, sizes, *, seconds, hold_s, **terms):
        """Take a want."""
        self.wanted.append((request_id, len(keys), tuple(sizes)))
        self.times.append((seconds, hold_s))
        self.terms.append(terms)
        self.pending.add(request_id)
        return True

    def forget(self, keys, name="", *, seconds=0.0, tell=None):
        """Take note, if it is there."""
        self.forgotten += keys if self.is_up else []
        self.told.append((name, tell))
        return self.is_up

    def is_pending(self, request_id):
        """Return whether the test has answered."""
        return request_id in self.pending

    def answer(self, request_id):
        """Return what the test said."""
        return self.answers.get(request_id)

    def say(self, request_id, found, reason="", media=b"", reach=0):
        """Answer."""
        self.pending.discard(request_id)
        self.answers[request_id] = Answer(found, reason, media, reach)

    def drop(self, request_id):
        """Take note."""
        self.dropped.append(request_id)

    def look(self):
        """Take note."""
        self.looks += 1

    def close(self):
        """Be gone."""
        self.is_up = False
