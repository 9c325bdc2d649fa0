# SPDX-License-Identifier: Apache-2.0
"""The agent in this process: the same as in its own, where a debugger and coverage see it."""

import json
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.agent.test_process import KEYS, Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent import node
from ucm.agent.__main__ import main
from ucm.agent.client import AgentClient
from ucm.agent.launch import REFUSED
from ucm.agent.protocol import Follow
from ucm.blocks import keyspace_prefix
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keyspace, payload, save

pytestmark = pytest.mark.slow


class TooLateError(Exception):
    """The agent had lingered, and was gone before its first engine came."""


class Here(Place):
    """A slab and a tier, and an agent on the test's thread."""

    def __init__(self, tmp_path: Path, shm: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, shm)
        self._patch = patch
        self._code: int | None = None
        patch.syspath_prepend(str(self.path))

    def poll(self) -> int | None:
        """Return the agent's exit code, as that of a process; None: it goes on."""
        return self._code

    @contextmanager
    def client(self, slot_bytes=4096, agent=None):
        """Be an engine."""
        with super().client(slot_bytes, agent or self) as client:
            if not client.is_up:
                raise TooLateError
            yield client

    def serve(self, engine: Callable[[], None], **settings: object) -> int:
        """Be the agent until *engine*, on a thread, is over; return the exit code."""
        while True:  # a busy machine comes too late to some
            try:
                return self._serve(engine, **settings)
            except TooLateError:
                shutil.rmtree(self.log)

    def _serve(self, engine: Callable[[], None], **settings: object) -> int:
        self._code = None
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
        self._code = code = main()
        thread.join()
        for each in threading.enumerate():
            if each.name == "ucm-agent-end" and isinstance(each, threading.Timer):
                assert (
                    each.finished.is_set()
                )  # or it ends this process some seconds later
        if errors and isinstance(errors[0], TooLateError):
            raise errors[0]
        assert [] == errors
        return code

    def spilled(self, tier: int = 0) -> dict:
        """Return what became of what was offered to a tier."""
        return self.status()["slots"]["4096"]["spilled"][tier]

    def events(self) -> list[str]:
        """Return what the agent has logged."""
        return [line["event"] for line in self.lines()]

    def lines(self) -> list[dict]:
        """Return it whole."""
        (path,) = self.log.iterdir()
        return [json.loads(line) for line in path.read_text().splitlines()]


class Ledgers:
    """Follows, and has the media and numbers of the blocks that are there."""

    def __init__(self, client: AgentClient) -> None:
        self.there: set[tuple[int, int]] = set()
        self._client = client

    def joined(self, media) -> None:
        """Ask for the first batch."""
        prefix = keyspace_prefix(make_keyspace().digest)
        self._client.send(Follow(1, prefix, alone=True))

    def told(self, told) -> None:
        """Take one, and ask for the next."""
        for medium, is_stored, key, _ in map(msgspec.structs.astuple, told.entries):
            change = self.there.add if is_stored else self.there.discard
            change((medium, KEYS.index(key)))
        self.joined([])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return where it all is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        yield Here(tmp_path, Path(shm), monkeypatch)


class TestMain:
    def test_process_that_calls_it_hears_its_signals_as_before(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: only an agent's own process ends by SIGTERM with code 0, not who tests one."""
        argv = ["ucm.agent", "--config", str(tmp_path / "none")]
        monkeypatch.setattr(sys, "argv", argv)
        before = signal.getsignal(signal.SIGTERM)
        assert (REFUSED, before) == (main(), signal.getsignal(signal.SIGTERM))

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
                assert (6, "", b"\1" * 6, 0) == client.answer("a")
                assert [payload(key) for key in KEYS] == load(slab, KEYS)

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine)
        assert ["agent.started", "summary", "agent.ended"] == here.events()

    @pytest.mark.parametrize("kind", ["file-tier", "disk"])
    def test_ledger_tells_that_forgotten_blocks_left_each_medium(
        self, here, kind
    ) -> None:
        """R-57: who follows hears that slab and tier have them no more, and of the others
        nothing; of a tier that tells of itself, and of one that does not."""
        tier = {"type": kind, "path": str(here.tier)}
        tier |= {"capacity": "64MiB"} if kind == "disk" else {}

        def engine() -> None:
            with here.client() as client:
                follower = Ledgers(client)
                client.follow(follower)
                save(slab, KEYS)
                everywhere = {(medium, at) for medium in range(2) for at in range(6)}
                until(lambda: everywhere == follower.there)
                slab.forget(KEYS[:4])
                assert client.forget(KEYS[:4])
                left = {(medium, at) for medium in range(2) for at in (4, 5)}
                until(lambda: left == follower.there)

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine, tiers=[tier])

    def test_each_agent_is_told_from_the_one_before(self, here) -> None:
        """R-52: also where both have the same process id, as in a container."""
        told = []

        def engine() -> None:
            with here.client():
                told.append(here.status())

        with open_slab(here.slab, 64):
            assert [0, 0] == [here.serve(engine), here.serve(engine)]
        assert 1 == len({each["pid"] for each in told})
        assert 2 == len({each["nonce"] for each in told})

    def test_tier_that_takes_nothing_is_told_of(self, here) -> None:
        """R-52: a tier that does not take blocks in time is found out, however often somebody
        asks how it is; it is in the log, and then it is not asked to."""
        tier = {"type": "file-tier", "path": str(here.tier), "delay": 60.0}

        def engine() -> None:
            with here.client():
                for number in range(3):
                    save(slab, KEYS[number : number + 1])
                    until(lambda number=number: dropped() > number or refuses())

        def refuses() -> bool:
            (tier,) = here.status()["tiers"]
            assert not tier["silent"]
            return tier["refuses"]

        def dropped() -> int:
            return sum(here.spilled()["dropped"].values())

        with open_slab(here.slab, 64) as slab:
            timeout = {"tier": 0.01, "shutdown": 0.1}
            assert 0 == here.serve(engine, tiers=[tier], timeout=timeout)
        (line, *_) = (each for each in here.lines() if each["event"] == "tier.silent")
        assert "no reason" == line["error"]

    def test_server_of_a_tier_that_is_away_is_named(self, here) -> None:
        """R-52: once, and once that it is not any more; also by whoever asks how the agent is."""
        mark = here.tier / "10.0.0.1:6379.away"

        def engine() -> None:
            with here.client():
                until(lambda: here.events())
                mark.touch()
                until(lambda: here.events().count("tier.silent"))
                (tier,) = here.status()["tiers"]
                assert (["10.0.0.1:6379"], False) == (tier["away"], tier["silent"])
                mark.rename(mark.with_suffix(".refusing"))
                until(lambda: here.events().count("tier.silent") == 2)
                (tier,) = here.status()["tiers"]
                assert (["10.0.0.1:6379"], 1) == (
                    tier["refusing"],
                    tier["num_refusing"],
                )
                assert ([], False) == (tier["away"], tier["refuses"])
                mark.with_suffix(".refusing").unlink()
                until(lambda: here.events().count("tier.answers") == 2)

        with open_slab(here.slab, 64):
            assert 0 == here.serve(engine)
        named = [
            (line["event"], line["level"], line.get("direction"))
            for line in here.lines()
            if line.get("server") == "10.0.0.1:6379"
            and (line["tier"], line["medium"]) == (0, "file")
        ]
        assert [
            ("tier.silent", "warning", None),
            ("tier.answers", "info", None),
            ("tier.silent", "warning", "save"),
            ("tier.answers", "info", "save"),
        ] == named

    def test_call_of_a_tier_that_raises_has_no_answer(self, here) -> None:
        """R-62: it ended the agent, as did the next one's at the same block: no tier had any
        more. It is told, and the others go on."""
        bad, good = here.tier.with_name("bad"), here.tier
        tiers = [
            {"type": "file-tier", "path": str(bad), "bug": "put"},
            {"type": "file-tier", "path": str(good)},
        ]

        def engine() -> None:
            with here.client():
                save(slab, KEYS)
                until(lambda: "tier.failed" in here.events())
                until(lambda: len(KEYS) == here.spilled(1)["spilled"])

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine, tiers=tiers)
        (told,) = [line for line in here.lines() if "error" in line]
        assert (0, "error") == (told["tier"], told["reason"])
        assert "ZeroDivisionError('a bug')" == told["error"]

    def test_bug_of_a_tier_ends_the_agent(self, here) -> None:
        """R-62: what a backend raises in no call is told, and is the agent's end only."""
        tier = {"type": "file-tier", "path": str(here.tier), "bug": "refusing"}
        with open_slab(here.slab, 64):
            assert 1 == here.serve(lambda: None, tiers=[tier])
        assert "runtime.failed" == here.events()[-1]

    def test_ledger_has_slots_of_all_sizes_and_tiers(self, here) -> None:
        """R-57: engines whose blocks differ in size share one ledger; it begins with the
        first who follows, and has what is in the slab before and what comes of another size
        later. What a tier had that does not know what it has, nobody is told."""

        def engine() -> None:
            with here.client() as client:
                save(slab, KEYS[:2])
                ledger = Ledgers(client)
                until(lambda: here.spilled()["spilled"] == 2)
                client.follow(ledger)
                until(lambda: {(0, 0), (0, 1)} == ledger.there)
                save(slab, KEYS[2:3])
                until(lambda: {(0, 2), (1, 2)} <= ledger.there)
                with (
                    open_slab(here.slab, 64, block_bytes=8192) as large,
                    here.client(8192),
                ):
                    save(large, KEYS[3:4])
                    until(lambda: {(0, 3), (1, 3)} <= ledger.there)
                slab.clear(b"")
                until(lambda: {(0, 3), (1, 2), (1, 3)} == ledger.there)
                assert 2 == here.status()["ledger"]["blocks"]

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine)

    def test_blocks_of_several_sizes_in_slots_of_one_have_one_core(self, here) -> None:
        """R-53: an engine says how large its blocks are, a command how large their slots; both
        are served by one core, so that what one has forgotten the other's wants do not bring."""
        large = 3 * 4096

        def engine() -> None:
            with (
                open_slab(here.slab, 64, block_bytes=large) as store,
                here.client(large) as client,
                here.client(store.capabilities.max_block_bytes),
            ):
                slots = str(store.capabilities.max_block_bytes)
                assert [slots] == list(here.status()["slots"])
                save(store, KEYS, large)
                until(lambda: here.status()["slots"][slots]["spilled"][0]["spilled"])
                with here.client(large):
                    assert client.is_up
                assert [slots] == list(here.status()["slots"])

        with open_slab(here.slab, 64):
            assert 0 == here.serve(engine)

    def test_engine_beyond_those_that_an_agent_takes_is_told(
        self, here, monkeypatch
    ) -> None:
        """R-63: one more than 256 was left without a word: it started another agent each six seconds,
        and its log had no line of that. Who only looks is answered."""
        monkeypatch.setattr(node, "_MOST_PEERS", 1)
        launched, said = [], []
        log = SimpleNamespace(
            info=lambda event, **more: said.append(event),
            warning=lambda event, **more: said.append(more["error"]),
        )

        def engine() -> None:
            with here.client():
                beyond = AgentClient(
                    here.slab, 4096, log, lambda: launched.append(1) or ""
                )
                until(lambda: said or launched)
                beyond.close()
                assert here.status()["slots"]

        with open_slab(here.slab, 64):
            assert 0 == here.serve(engine)
        assert (["the agent serves 1 engines, no more"], []) == (said, launched)

    def test_agent_without_tiers_keeps_a_ledger(self, here) -> None:
        """R-57: where an engine is to tell of its slab alone, an agent serves it."""

        def engine() -> None:
            with here.client() as client:
                ledger = Ledgers(client)
                client.follow(ledger)
                save(slab, KEYS[:2])
                until(lambda: {(0, 0), (0, 1)} == ledger.there)

        with open_slab(here.slab, 64) as slab:
            assert 0 == here.serve(engine, tiers=[], kv_events="node")

    def test_wrong_settings_are_one_line(self, here, capfd) -> None:
        """X-09: without a tier there is nothing to serve."""
        assert 2 == here.serve(lambda: None, tiers=[])
        assert "ucm agent: tiers=[]: no tier" in capfd.readouterr().err

    def test_tier_that_is_none_is_one_line(self, here, capfd) -> None:
        """X-09: a tier of no known type is refused by its setting's name."""
        with open_slab(here.slab, 64):
            assert 2 == here.serve(lambda: None, tiers=[{"type": "tape"}])
        assert "tiers.0.type='tape'" in capfd.readouterr().err

    def test_tier_that_would_be_ended_before_it_gives_up_is_one_line(
        self, here, capfd
    ) -> None:
        """A cluster's silent server is found out within the agent's deadline, or never."""
        tier = {"type": "redis", "cluster": True, "timeout": 2.0}
        tier["url"] = "redis://127.0.0.1:1/0"  # where nobody is
        with open_slab(here.slab, 64):
            assert 2 == here.serve(lambda: None, tiers=[tier])
        told = capfd.readouterr().err
        assert "tiers.0.timeout=2.0: timeout.tier is 2.0" in told
