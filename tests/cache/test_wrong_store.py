# SPDX-License-Identifier: Apache-2.0
"""A store of somebody else's that gives other blocks than it was asked for."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import ucm
from tests.cache.kit import KEYSPACE, LAYOUT, Host, keys_of, leaving_nothing
from tests.cache.test_opening import pool_of
from ucm.blocks import PackedKey
from ucm.cache.sync import Cache
from ucm.errors import StoreFullError, StoreUnavailableError
from ucm.pipeline.tickets import OutcomeKind
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate, raising


def test_store_that_opens_fewer_blocks_gives_no_hit() -> None:
    """The others would keep what they hold, and count as loaded."""
    host, keys = Host(), keys_of(4)
    read = host.store.read

    def fewer(wanted: Sequence[PackedKey]) -> Any:
        found = host.store.contains(wanted)
        return read(
            [key for key, is_there in zip(wanted, found, strict=True) if is_there]
        )

    host.store.read = fewer
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        assert cache.save(keys, range(4)).wait_committed().is_whole
        cache.forget(keys[3:])
        end = cache.load(keys, range(8, 12))
        assert (OutcomeKind.FAILED, 0) == (end.kind, end.leading)
        assert "opened 3 blocks" in end.error
        assert cache.load(keys[:3], range(8, 11)).is_whole
        assert host.content(range(3)) == host.content(range(8, 11))


@pytest.mark.parametrize("wrong", [None, "x", -1, 5, 1.5, [True]])
def test_store_that_answers_something_else_has_not_answered(wrong: object) -> None:
    """A host would be told it, and a scrape of its metrics fail."""
    host, keys = Host(), keys_of(4)
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        assert cache.save(keys, range(4)).wait_committed().is_whole
        for verb in ("match", "contains", "stats"):
            setattr(host.store, verb, lambda *_: wrong)
        assert 0 == cache.match(keys)
        assert [False] * 4 == cache.contains(keys)
        assert 0 == cache.prefetch(keys).found
        with pytest.raises(StoreUnavailableError, match="stats told"):
            cache.statistics()
        assert 0 == cache.measure().gauges["ucm_healthy"]


def test_store_that_counts_its_slots_anew_stores_nothing_wrong() -> None:
    """Blocks would be stored under keys of others, and be found by all."""
    host, keys = Host(), keys_of(4)
    reserve = host.store.reserve

    def anew(*asked: Any) -> Any:
        lease = reserve(*asked)
        lease.positions = tuple(range(len(lease.keys)))
        return lease

    host.store.reserve = anew
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        assert cache.save(keys[:2], range(2)).wait_committed().is_whole
        end = cache.save(keys, range(4)).wait_committed()
        assert (OutcomeKind.FAILED, 0) == (end.kind, end.leading)
        assert "leased 2 keys" in end.error
        assert 2 == cache.match(keys)


@pytest.mark.parametrize(
    "act", [raising(OSError()), raising(KeyError()), raising(StoreFullError()), Gate()]
)
def test_store_that_takes_no_text_is_opened(act: Callable[[], None]) -> None:
    """What is for people is none of a host's business: any error, and no answer either."""
    inner = MemoryStore(16, LAYOUT.max_block_bytes)
    given = {
        "layout": LAYOUT,
        "device": pool_of(),
        "keyspace": KEYSPACE,
        "store": FaultStore(inner, FaultPlan(Fault("describe", act))),
    }
    brief = {"timeout": {"load": 0.05}, "log": {"level": "off"}}
    with ucm.blocking.open(brief, **given) as cache:
        assert 0 == cache.match(keys_of(2))
        if isinstance(act, Gate):
            act.open()
        assert cache.save(keys_of(2), range(2)).wait_committed().is_whole
