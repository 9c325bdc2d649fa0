# SPDX-License-Identifier: Apache-2.0
"""How the node's agent and its tiers are, as metrics of who is served by it."""

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec

from ucm.agent.client import AgentClient
from ucm.agent.protocol import FORGETS, LONGEST_S, MOST_KEYS
from ucm.blocks import PackedKey
from ucm.metrics import Counters, sample_key
from ucm.reasons import Reason

__all__ = ["AgentHealth"]

_REASONS: Final = frozenset(Reason)
_MEDIUM: Final = attrgetter("medium")
_UNFORGOTTEN: Final = "ucm_unforgotten_parts_total"
_SERVER_UP: Final = "ucm_tier_server_up"
_MOST_SERVERS: Final = 32
"""Names that metrics have, as none is ever forgotten; all others are one."""
_OTHERS: Final = "others"
_LONGEST_NAME: Final = 64


class _Tier(msgspec.Struct):
    medium: str
    silent: bool
    away: list[str] = []
    num_away: int = 0
    refusing: list[str] = []
    num_refusing: int = 0


class _Spilled(msgspec.Struct):
    spilled: int
    dropped: dict[str, int]
    forgotten: int = 0
    unforgotten: int = 0


class _Slots(msgspec.Struct):
    spilled: list[_Spilled]


class _Told(msgspec.Struct):
    """What is read of an agent's status."""

    pid: int
    tiers: list[_Tier]
    slots: dict[str, _Slots]
    nonce: str = ""
    """Drawn at its start: in a container each agent has the same process id."""


class AgentHealth:
    """
    Brings what an agent says of itself into metrics.

    Args:
        client: What talks to it.
        counters: Told.
        tiers: Their settings, for what they are called before an agent was there.
    """

    def __init__(
        self,
        client: AgentClient,
        counters: Counters,
        tiers: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._client = client
        self._counters = counters
        self._types = [str(tier["type"]) for tier in tiers]
        self._agent = (0, "")
        self._num_agents = 0
        self._totals: Counter[str] = Counter()
        self._servers: set[tuple[str, str]] = set()
        """Of tiers, by medium and name, that have a gauge of their own."""
        self._lock = threading.Lock()
        self._names = map("\0forget-{}".format, itertools.count())
        """None is a request's."""

    def refresh(self) -> None:
        """Take what the agent has said since, and have it say more; on any thread."""
        self._client.look()
        is_up = self._client.is_up
        self._counters.set("ucm_agent_up", int(is_up))
        with self._lock:
            if more := self._client.agents.count - self._num_agents:
                self._num_agents += more
                self._counters.add("ucm_agents_total", more)
            try:
                told = msgspec.convert(self._client.status, _Told)
            except msgspec.ValidationError:  # nothing yet, or what another release says
                return
            self._take(told, is_there=is_up)

    @property
    def names(self) -> Sequence[str]:
        """Of the tiers, in order: as the agent that was there last has them, or their types."""
        return self._client.media or self._types

    def forget(self, keys: Sequence[PackedKey]) -> None:
        """Have tiers part with blocks; count those that no agent answers for. Waits for nothing."""
        for at in range(0, len(keys), MOST_KEYS):
            some, name = keys[at : at + MOST_KEYS], next(self._names)
            heard = partial(self._heard, name, len(some))
            if not self._client.forget(some, name, seconds=LONGEST_S, tell=heard):
                heard()

    def _heard(self, name: str, count: int) -> None:
        """Take the answer to who wanted blocks forgotten, or that none comes any more."""
        said = self._client.answer(name)
        self._client.drop(name)
        if said is None or said.reason not in FORGETS:
            self.unasked(count)

    def unasked(self, count: int) -> None:
        """Count blocks that no agent was there to take from tiers."""
        for name in self.names:
            self._counters.add(_UNFORGOTTEN, count, tier=name)

    def _take(self, told: _Told, *, is_there: bool) -> None:
        by_medium = sorted(told.tiers, key=_MEDIUM)
        for medium, tiers in itertools.groupby(by_medium, _MEDIUM):
            is_up = is_there and not any(tier.silent for tier in tiers)
            self._counters.set("ucm_tier_up", int(is_up), tier=medium)
        self._take_servers(told.tiers)
        totals = _totals_of(told)
        if (told.pid, told.nonce) != self._agent:
            self._agent, self._totals = (told.pid, told.nonce), Counter()
        before, self._totals = self._totals, self._totals | totals
        self._counters.add_all(self._totals - before)  # never less: a slab may be lost

    def _take_servers(self, tiers: Sequence[_Tier]) -> None:
        """Say of each server that ever was away, or took nothing, whether it is so now."""
        away: set[tuple[str, str]] = set()
        refusing: set[tuple[str, str]] = set()
        for tier in tiers:
            away |= self._known(tier.medium, tier.away, tier.num_away)
            refusing |= self._known(tier.medium, tier.refusing, tier.num_refusing)
        for server in self._servers:
            for direction, are_bad in (("load", away), ("save", away | refusing)):
                labels = dict(zip(("tier", "address"), server, strict=True))
                is_up = int(server not in are_bad)
                self._counters.set(_SERVER_UP, is_up, direction=direction, **labels)

    def _known(
        self, medium: str, names: Sequence[str], count: int
    ) -> set[tuple[str, str]]:
        """Return what metrics call servers of which the first ones are named."""
        found: set[tuple[str, str]] = set()
        for name in (*names, *[_OTHERS] * (count > len(names))):
            server = medium, name.replace("|", "_")[-_LONGEST_NAME:]
            if server not in self._servers and len(self._servers) >= _MOST_SERVERS:
                server = medium, _OTHERS
            self._servers.add(server)
            found.add(server)
        return found


def _totals_of(told: _Told) -> Counter[str]:
    """Return what became of blocks that tiers were to take, or part with, by the texts of metrics."""
    totals: Counter[str] = Counter()
    for slots in told.slots.values():
        for tier, moved in zip(told.tiers, slots.spilled, strict=False):
            labels = {"tier": tier.medium}
            totals[sample_key("ucm_spilled_parts_total", labels)] += moved.spilled
            totals[sample_key("ucm_forgotten_parts_total", labels)] += moved.forgotten
            totals[sample_key(_UNFORGOTTEN, labels)] += moved.unforgotten
            for reason, count in moved.dropped.items():
                why = reason if reason in _REASONS else Reason.ERROR
                key = sample_key("ucm_unspilled_parts_total", labels | {"reason": why})
                totals[key] += count
    return totals
