# SPDX-License-Identifier: Apache-2.0
"""The agent in this process: the same as in its own, where a debugger and coverage see it."""

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.test_process import KEYS, Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent.__main__ import main
from ucm.testing.store_blocks import BLOCK_BYTES, load, payload, save

pytestmark = pytest.mark.slow


class Here(Place):
    """A slab and a tier, and an agent on the test's thread."""

    def __init__(self, tmp_path: Path, shm: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, shm)
        self._patch = patch
        patch.syspath_prepend(str(self.path))

    def serve(self, engine: Callable[[], None], **settings: object) -> int:
        """Be the agent until *engine*, on a thread, is over; return the exit code."""
        file = self.slab.parent / "settings.json"
        file.write_text(json.dumps(self.settings | settings))
        argv = ["ucm.agent", "--config", str(file), "--linger", "1"]
        self._patch.setattr(sys, "argv", argv)
        errors: list[Exception] = []

        def run() -> None:
            try:
                engine()
            except Exception as exc:  # noqa: BLE001 - the test's thread raises it
                errors.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        code = main()
        thread.join()
        assert [] == errors
        return code

    def spilled(self) -> dict:
        """Return what became of what was offered to the tier."""
        return self.status()["slots"]["4096"]["spilled"][0]

    def events(self) -> list[str]:
        """Return what the agent has logged."""
        (path,) = self.log.iterdir()
        return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return where it all is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        yield Here(tmp_path, Path(shm), monkeypatch)


class TestMain:
    def test_agent_serves_until_its_last_engine_is_gone(self, here) -> None:
        """R-53, R-63: spilled, fetched, told of, and gone behind its last engine."""

        def engine() -> None:
            with here.client() as client:
                save(slab, KEYS)
                until(lambda: here.spilled()["spilled"] == 6)
                slab.clear(b"")
                sizes = [BLOCK_BYTES] * 6
                assert client.want("a", KEYS, sizes, seconds=30.0, hold_s=5.0)
                until(lambda: not client.is_pending("a"))
                assert (6, "", b"\1" * 6) == client.answer("a")
                assert [payload(key) for key in KEYS] == load(slab, KEYS)

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine)
        assert ["agent.started", "summary", "agent.ended"] == here.events()

    def test_silent_tier_is_told_of_once(self, here) -> None:
        """R-52: a tier that does not answer in time is found out, however often somebody
        asks how it is; it is in the log, and then it is not asked."""
        tier = {"type": "file-tier", "path": str(here.tier), "delay": 60.0}

        def engine() -> None:
            with here.client():
                for number in range(6):
                    save(slab, KEYS[number : number + 1])
                    until(lambda number=number: dropped() > number)
                    if here.status()["tiers"][0]["silent"]:
                        return

        def dropped() -> int:
            return sum(here.spilled()["dropped"].values())

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine, tiers=[tier], timeout={"tier": 0.01})
        assert "tier.silent" in here.events()

    def test_bug_of_a_tier_ends_the_agent(self, here) -> None:
        """R-62: what a backend raises is told, and is the agent's end only."""
        tier = {"type": "file-tier", "path": str(here.tier), "delay": -1.0}

        def engine() -> None:
            with here.client():
                save(slab, KEYS)
                until(lambda: "runtime.failed" in here.events())

        with open_slab(here.slab, 64) as slab:
            assert 1 == here.serve(engine, tiers=[tier])

    def test_wrong_settings_are_one_line(self, here, capsys) -> None:
        """X-09: without a tier there is nothing to serve."""
        assert 2 == here.serve(lambda: None, tiers=[])
        assert "ucm agent: tiers=[]: no tier" in capsys.readouterr().err

    def test_tier_that_is_none_is_one_line(self, here, capsys) -> None:
        """X-09: a tier of no known type is refused by its setting's name."""
        with open_slab(here.slab, 64):
            assert 2 == here.serve(lambda: None, tiers=[{"type": "tape"}])
        assert "tiers.0.type='tape'" in capsys.readouterr().err
