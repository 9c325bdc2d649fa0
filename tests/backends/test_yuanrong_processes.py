# SPDX-License-Identifier: Apache-2.0
"""Processes that hold yuanrong's client: how long each is of use, and how it ends."""

import os
import signal

import anyio
import anyio.to_thread
import pytest

from tests.agent.test_process import ROOT
from tests.backends.yuanrong_fake import package
from ucm.backends import yuanrong
from ucm.backends.abc import Presence, Verdict
from ucm.backends.yuanrong import YuanrongBackend
from ucm.testing.backend_contract import fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(3)


@pytest.mark.asyncio
class TestProcesses:
    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        """Have processes find a client that needs no worker; return where it keeps values."""
        path = [str(package(tmp_path / "path")), str(ROOT)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        (tmp_path / "values").mkdir()
        return tmp_path / "values"

    async def open(self, place):
        """Open a backend of one process."""
        given = {"worker": f"{place}:1", "processes": 1, "timeout": 60.0}
        return await YuanrongBackend.open_configured(given, "tiers.0")

    async def test_call_that_is_given_up_ends_its_process(self, place):
        """R-42, R-52: what it would have said is nobody's answer, and it writes nowhere."""
        backend = await self.open(place)
        assert [Verdict.DONE] * 3 == await backend.put([seal(key) for key in KEYS])
        (helper,) = backend._idle
        (place / "wait").touch()
        with anyio.move_on_after(0.01) as asking:
            await fetch(backend, KEYS[:1])
        assert asking.cancelled_caught
        (place / "wait").unlink()
        assert [True] * 2 == await fetch_sound(backend, KEYS[1:])
        await backend.aclose()
        assert -signal.SIGKILL == helper.process.returncode

    async def test_process_that_is_slow_to_start_serves_a_later_call(self, place):
        """R-52: on a busy machine a client loads for longer than a call may take: were its
        process ended with the call, no call would ever have one."""
        backend = await self.open(place)
        await backend.put([seal(key) for key in KEYS])
        (place / "slow").touch()
        os.kill(backend._idle[0].process.pid, signal.SIGKILL)
        assert [Presence.UNKNOWN] * 3 == await backend.exists(KEYS)
        for _ in range(3):
            with anyio.move_on_after(0.01) as asking:
                await backend.exists(KEYS)
            assert asking.cancelled_caught
        (helper,) = backend._idle
        (place / "slow").unlink()
        assert [Presence.PRESENT] * 3 == await backend.exists(KEYS)
        assert [helper] == backend._idle
        await backend.aclose()
        assert -signal.SIGKILL == helper.process.returncode

    async def test_client_that_does_not_load_keeps_no_agent_from_its_start(
        self, place, monkeypatch
    ):
        """R-52: its tier is unavailable until it has, and goes with the agent before."""
        (place / "slow").touch()
        monkeypatch.setattr(yuanrong, "_OPENING_S", 0.01)
        backend = await self.open(place)
        (helper,) = backend._idle
        await backend.aclose()
        assert [] == backend._idle
        assert -signal.SIGKILL == helper.process.returncode

    async def test_process_goes_with_the_agent(self, place):
        """R-52: one whose agent was killed ends at once: its client's own end would wait
        for a worker that may have gone, too."""
        backend = await self.open(place)
        await backend.put([seal(key) for key in KEYS])
        (helper,) = backend._idle
        helper.line.close()
        assert 0 == await anyio.to_thread.run_sync(helper.process.wait, 60.0)
        assert not (place / "ended").exists()
        await backend.aclose()

    async def test_value_of_another_length_harms_none_beside_it(self, place):
        """R-51: neither its own bytes nor what comes behind them is taken for a block."""
        backend = await self.open(place)
        await backend.put([seal(key) for key in KEYS])
        (place / f"ucm:{KEYS[0].hex()}").write_bytes(b"x" * 5000)
        told = [got.verdict for got, _ in await fetch(backend, KEYS)]
        assert [Verdict.GARBAGE, Verdict.DONE, Verdict.DONE] == told
        assert [False, True, True] == await fetch_sound(backend, KEYS)
        await backend.aclose()
