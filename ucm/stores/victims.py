# SPDX-License-Identifier: Apache-2.0
"""
Who gets room, and at whose cost: the rules for all stores, in plain Python. Pure.

A block gets a free slot or that of a block that counts as used before it. Those that are
used last choose first. A tenant that has its share chooses among its own blocks only.
"""

from collections.abc import Mapping, Sequence

import attrs

from ucm.blocks import PackedKey

__all__ = ["Claim", "Room", "choose", "curb"]


@attrs.frozen
class Claim:
    """A block that is stored, or wants to be: when it counts as used, and for whom."""

    key: PackedKey
    moment: int
    tenant: int


@attrs.frozen
class Room:
    """Which blocks are granted a slot, and which go; how many had no share left."""

    granted: set[PackedKey]
    victims: list[PackedKey]
    num_over_share: int


def choose(
    wanted: Sequence[Claim],
    stored: Sequence[Claim],
    num_free: int,
    shares: Mapping[int, int],
    most_of_tenant: int,
) -> Room:
    """
    Decide about one reservation.

    Args:
        wanted: Blocks without a slot.
        stored: Blocks that may go.
        num_free: Slots that are free.
        shares: How many slots each tenant has; 0 is nobody.
        most_of_tenant: How many it may have.
    """
    latest = sorted(wanted, key=lambda claim: -claim.moment)
    oldest = sorted(stored, key=lambda claim: claim.moment)
    granted: set[PackedKey] = set()
    victims: list[PackedKey] = []
    has, others, num_over_share = dict(shares), [], 0
    for claim in latest:
        has[claim.tenant] = has.get(claim.tenant, 0) + 1
        if not claim.tenant or has[claim.tenant] <= most_of_tenant:
            others.append(claim)
            continue
        own = (each for each in oldest if each.tenant == claim.tenant)
        victim = next(own, None)
        if victim is None or victim.moment >= claim.moment:
            num_over_share += 1
            continue
        oldest.remove(victim)
        victims.append(victim.key)
        granted.add(claim.key)
    for claim, victim in zip(others[num_free:], oldest, strict=False):
        if victim.moment >= claim.moment:
            break
        victims.append(victim.key)
        granted.add(claim.key)
    granted.update(claim.key for claim in others[:num_free])
    return Room(granted, victims, num_over_share)


def curb(
    moments: Sequence[int], before: Sequence[int], now: int, room: int
) -> tuple[list[int], int]:
    """
    Let blocks that are too many to be retained count as used now, the first of them last.

    Args:
        moments: When blocks should count as used.
        before: When they did so far: what is retained already takes no more room.
        now: What is later is retained.
        room: How many more may be.

    Returns:
        The moments, and how many were changed.
    """
    later = [
        at
        for at, (moment, was) in enumerate(zip(moments, before, strict=True))
        if moment > now >= was
    ]
    beyond = later[max(0, room) :]
    curbed = list(moments)
    for count, at in enumerate(beyond):
        curbed[at] = now - count
    return curbed, len(beyond)
