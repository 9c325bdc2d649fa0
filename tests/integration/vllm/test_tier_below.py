# SPDX-License-Identifier: Apache-2.0
"""Tiers below our tier below vLLM's own tiering: chunks come from them, exact or not at all."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from tests.cache.fetching import GONE, SILENT, ScriptedAgent
from tests.cache.test_tiers import end_agent
from tests.integration.vllm.test_tier import served
from tests.integration.vllm.tier_kit import Engine, engine, keys_of, slab
from ucm.agent.protocol import Drop
from ucm.testing.door_tiers import damage_files, tiers_at

pytestmark = pytest.mark.slow

KEYS = keys_of(6)


class Machines:
    """Slabs of their own, and a tier that all have in common."""

    def __init__(self, shm: Path, share: Path) -> None:
        self.shm, self.share = shm, share

    def given(self, name: str) -> dict[str, Any]:
        """Return the settings of a machine."""
        return {"store": slab(self.shm / name), "tiers": tiers_at(self.share)}

    @contextlib.contextmanager
    def machine(self, name: str) -> Iterator[Engine]:
        """Run an engine beside its agent, which is gone behind it."""
        with engine(**self.given(name)) as one:
            fetches = one.tier._cache._core.fetches
            one.until(lambda: fetches.is_served)
            try:
                yield one
            finally:
                end_agent(one.tier._cache)

    def blocks(self) -> list[Path]:
        """Return the files of the tier."""
        return [*self.share.glob("blocks/*/*/*")]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Return them; the slabs' paths are short."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        yield Machines(Path(shm), tmp_path / "share")


def test_chunks_of_one_machine_are_promoted_on_another(machines: Machines) -> None:
    """R-53, R-81: cold on a slab, warm through the tier on the next, byte for byte; of a
    prompt that goes on the part that is there, and nothing stays wanted."""
    with machines.machine("a") as one:
        assert 0 == served(one, KEYS)
        one.store(KEYS)
        one.until(lambda: len(machines.blocks()) == len(KEYS))
    with machines.machine("b") as other:
        longer = [*KEYS, *keys_of(2, "b")]
        assert 6 == served(other, longer)
        core = other.tier._cache._core
        fetched = core._counters.total("ucm_fetched_parts_total", tier="files")
        assert (6, 0) == (fetched, len(core.fetches))


def test_chunk_that_rots_in_a_tier_is_computed(machines: Machines) -> None:
    """R-51, R-53: none of them is promoted, whoever asks and however often."""
    with machines.machine("a") as one:
        one.store(KEYS)
        one.until(lambda: len(machines.blocks()) == len(KEYS))
    assert len(KEYS) == damage_files(machines.share)
    with machines.machine("b") as other:
        assert 0 == served(other, KEYS)
        assert 0 == served(other, KEYS, "again")
        assert 0 == other.tier._cache.statistics().loaded_blocks


def test_engine_hears_not_yet_until_tiers_have_answered(machines: Machines) -> None:
    """R-54, R-63: who goes away before gives up what was asked for it, and where the agent
    dies the slab serves alone."""
    with engine(slab(machines.shm / "a")) as one:
        one.store(KEYS[:2])
    agent = ScriptedAgent(machines.shm / "a", lambda _: SILENT)
    with contextlib.closing(agent), engine(**machines.given("a")) as one:
        fetches = one.tier._cache._core.fetches
        one.until(lambda: fetches.is_served)
        fetches._client._launch = lambda: ""  # no other agent
        one.request("r", KEYS)
        one.until(lambda: one.find("r", KEYS) is None and len(fetches) > 0)
        context = one.requests["r"]
        assert LookupResult.RETRY is one.manager.lookup(KEYS[2], context)
        assert 1 == agent.hear().number
        one.finish("r")
        assert Drop(1) == agent.hear()
        agent.say = lambda _: GONE
        assert 2 == served(one, KEYS, "s")


def test_request_that_arrives_has_no_keys_yet() -> None:
    """R-54: so tiers are asked at its first look-up; a release that names them on arrival
    is one whose tiers could be asked then."""
    arrived = []
    manager = SimpleNamespace(on_new_request=lambda context: arrived.append(context))
    half = SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=()), manager=manager, _req_status={}
    )
    request = SimpleNamespace(
        request_id="r",
        block_hashes=[b"1", b"2"],
        kv_hints=None,
        kv_transfer_params=None,
    )
    OffloadingConnectorScheduler.on_new_request(half, request)
    (context,) = arrived
    assert [None, None] == [
        context.get_offload_key_position(make_offload_key(each, 0))
        for each in request.block_hashes
    ]
    fields = {each.name for each in dataclasses.fields(context) if each.init}
    assert {"kv_hints", "kv_transfer_params", "load_tier_filter", "req_id"} == fields
