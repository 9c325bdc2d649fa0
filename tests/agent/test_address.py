# SPDX-License-Identifier: Apache-2.0
"""An agent whose name somebody takes away while it lives."""

import json
import os
import shutil
from pathlib import Path

import anyio
import pytest

from tests.agent.test_process import LIMIT_S, Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent.address import Address
from ucm.agent.node import Node
from ucm.agent.protocol import LOCK_NAME, SOCKET_NAME
from ucm.config import UCMConfig
from ucm.tracing import close_log, open_log


def why_ended(place: Place) -> list[str]:
    """Return why agents have ended, as their logs say."""
    texts = [
        line for log in place.log.iterdir() for line in log.read_text().splitlines()
    ]
    lines = map(json.loads, texts)
    return [line["error"] for line in lines if line["event"] == "agent.ended"]


@pytest.mark.slow
class TestProcess:
    @pytest.mark.parametrize("gone", [[SOCKET_NAME], [SOCKET_NAME, LOCK_NAME]])
    def test_agent_that_nobody_finds_ends_and_the_next_one_serves(
        self, place: Place, gone: list[str]
    ) -> None:
        """R-63: it went on with those whom it had; who came was served by nobody, or by a second
        agent, whose socket the first one took away as it ended."""
        with open_slab(place.slab, 64), place.agent("--linger", "-1") as first:
            with place.client() as client:
                for name in gone:
                    (place.slab / name).unlink()
                assert 0 == first.wait(LIMIT_S)
                with place.agent("--linger", "-1"):
                    until(lambda: client.agents.count == 2)
            (told,) = why_ended(place)
            assert told.startswith("its socket is gone: [Errno 2]")

    def test_agent_of_a_slab_that_is_gone_ends_though_no_engine_came(
        self, place: Place
    ) -> None:
        """R-63: it kept its tiers' directories from the agent of the slab that took the place."""
        with open_slab(place.slab, 64), place.agent("--linger", "-1") as first:
            until((place.slab / SOCKET_NAME).exists)
            shutil.rmtree(place.slab)
            with open_slab(place.slab, 64):
                assert 0 == first.wait(LIMIT_S)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_bound", [False, True])
async def test_agent_whose_slab_goes_as_it_begins_ends_well(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_bound: bool
) -> None:
    """R-63: it was told as a bug of ours, and a service as failed."""
    place.slab.mkdir()
    real, ends = anyio.create_unix_listener, list[bool]()

    async def listen(path, **more):
        if is_bound:
            listener = await real(path, **more)
        shutil.rmtree(place.slab)
        return listener if is_bound else await real(path, **more)

    monkeypatch.setattr(anyio, "create_unix_listener", listen)
    tiers = {"tiers": [{"type": "memory"}]}
    config = UCMConfig.from_mapping(place.settings | tiers)
    log = open_log(config.log, "agent")
    try:
        await Node(config, log, None, lambda: ends.append(True)).run()
    finally:
        close_log(log)
    assert [True] == ends  # over a tier that does not end, too
    (told,) = why_ended(place)
    assert told.startswith("its slab is gone: [Errno 2]")


@pytest.mark.asyncio
async def test_name_that_another_agent_has_stays(tmp_path: Path) -> None:
    """R-63: who ends behind another agent's begin leaves it its socket."""
    first, second = Address(tmp_path), Address(tmp_path)
    async with await first.listen():
        assert "" == first.why_lost()
        async with await second.listen():
            assert first.why_lost().endswith("is the socket of another agent")
            first.close()
            assert "" == second.why_lost()
            async with await anyio.connect_unix(tmp_path / SOCKET_NAME):
                pass
            second.close()
    assert [] == os.listdir(tmp_path)
