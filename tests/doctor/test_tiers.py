# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of tiers: up, down, hung, lying, and wrong settings."""

import os

import anyio
import pytest

from ucm.backends.abc import Advice, Presence
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.opening import open_backend
from ucm.doctor import tiers
from ucm.doctor.findings import Severity
from ucm.doctor.tiers import check_tier
from ucm.errors import ConfigError
from ucm.testing.backend_faults import Trouble, TroubledBackend, Troubles

MEMORY = {"type": "memory", "capacity": "1MiB"}


def troubled(opened, *troubles):
    """Return what opens a backend with troubles, and keeps it."""

    async def opener(settings, key):
        opened.append(TroubledBackend(MemoryBackend(Shelf(1 << 20)), *troubles))
        return opened[-1]

    return opener


def opens(kind):
    """Return what opens a backend of this kind."""

    async def opener(settings, key):
        return kind(Shelf(1 << 20))

    return opener


async def in_memory(settings, key):
    """Open a backend as its registered name does."""
    rest = {name: settings[name] for name in settings if name != "type"}
    return await MemoryBackend.open_configured(rest, key)


async def close(tier):
    """Open a tier, as an agent does, and close it."""
    await (await open_backend(tier, "tiers.0")).aclose()


def test_tier_that_answers_is_well():
    """A backend is opened by its settings, asked and closed."""
    finding = check_tier(MEMORY, "tiers.0", opener=in_memory)
    assert Severity.FINE is finding.severity
    assert "tiers.0 (memory) answers" in finding.text


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (Troubles.FAILS, "is down"),
        (Troubles.HANGS, "did not answer in 0.05 s"),
        (Troubles.LIES, "nobody stored"),
    ],
)
def test_backend_that_is_down_is_found(trouble, told):
    """A backend that is down costs misses later; here it is a line with a remedy, after
    a bounded time, and what was opened is closed."""
    opened = []
    finding = check_tier(
        MEMORY, "tiers.0", opener=troubled(opened, Trouble(trouble)), seconds=0.05
    )
    assert Severity.WRONG is finding.severity
    assert told in finding.text
    assert finding.remedy
    assert not opened[0].inner._is_open


def test_what_the_other_side_should_be_set_to_is_told():
    """A tier that answers, and will take no more one day, is a warning with the remedy."""

    class Full(MemoryBackend):
        async def advice(self):
            return [Advice("it evicts nothing", "Let it."), Advice("b", "B.")]

    finding = check_tier(MEMORY, "tiers.0", opener=opens(Full))
    assert Severity.WARNING is finding.severity
    assert "tiers.0 (memory) answers; it evicts nothing; b" == finding.text
    assert "Let it. B." == finding.remedy


def test_who_does_not_answer_is_asked_for_no_advice():
    """What waits for it would end as a tier that did not answer in time, whatever is wrong."""

    class Down(MemoryBackend):
        async def exists(self, keys):
            return [Presence.UNKNOWN] * len(keys)

        async def advice(self):
            raise AssertionError("it is down")

    finding = check_tier(MEMORY, "tiers.0", opener=opens(Down))
    assert "tiers.0 (memory) is down" in finding.text


def test_tier_that_answers_is_well_however_long_its_advice_takes():
    """That it was asked for advice in vain is no word on its blocks."""

    class Slow(MemoryBackend):
        async def advice(self):
            await anyio.sleep_forever()

    finding = check_tier(MEMORY, "tiers.0", opener=opens(Slow), seconds=0.05)
    assert Severity.FINE is finding.severity


def test_server_of_several_that_is_away_is_told_apart():
    """The tier is not down, and has a line all the same."""

    class Several(MemoryBackend):
        async def exists(self, keys):
            return [Presence.AWAY] * len(keys)

    finding = check_tier(MEMORY, "tiers.0", opener=opens(Several))
    assert Severity.WRONG is finding.severity
    assert "a server of tiers.0 (memory) does not answer" in finding.text


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"type": "memori"}, "tiers.0.type"),
        ({}, "tiers.0.type"),
        ({"type": "disk"}, "tiers.0.path"),
        ({"type": "disk", "pat": "x"}, "tiers.0.pat"),
        ({"type": "disk", "path": "/x", "admission": "agaim"}, "tiers.0.admission"),
        ({"type": "memory", "admission": 1}, "tiers.0.admission"),
    ],
)
def test_settings_that_are_wrong_are_found_by_name(settings, key):
    """X-09: as an engine would refuse them."""
    finding = check_tier(settings, "tiers.0")
    assert Severity.WRONG is finding.severity
    assert finding.text.startswith(f"{key}=")


def test_settings_that_a_backend_refuses_are_found_by_name():
    """X-09: what only the backend knows to be wrong."""
    given = {"type": "memory", "capacity": "x"}
    finding = check_tier(given, "tiers.0", opener=in_memory)
    assert finding.text.startswith("tiers.0.capacity='x'")


def test_server_that_is_not_there_is_found():
    """A backend that is down: a real client, and a port that nobody listens on."""
    redis = pytest.importorskip("ucm.backends.redis")

    async def opener(settings, key):
        rest = {name: settings[name] for name in settings if name != "type"}
        return await redis.RedisBackend.open_configured(rest, key)

    given = {"type": "redis", "url": "redis://127.0.0.1:1/0"}
    finding = check_tier(given, "tiers.0", opener=opener)
    assert Severity.WRONG is finding.severity
    assert "tiers.0 (redis) is down" in finding.text


def test_credentials_are_not_told():
    """What the doctor says ends up in tickets and chats."""

    async def refused(settings, key):
        raise ConfigError(f"{key}.url", settings["url"], "is wrong", "Mend it.")

    given = {"type": "redis", "url": "redis://user:hidden@host:6379/0"}
    finding = check_tier(given, "tiers.0", opener=refused)
    assert finding.text.startswith("tiers.0.url='redis://***@host:6379/0'")


def test_what_the_system_refuses_is_found():
    """Such as a directory that this user may not look into."""

    async def refused(settings, key):
        raise PermissionError(13, "Permission denied")

    finding = check_tier(MEMORY, "tiers.0", opener=refused)
    assert Severity.WRONG is finding.severity
    assert "Permission denied" in finding.text


class TestDrives:
    def test_drive_with_room_is_well_and_stays_as_it_is(self, tmp_path):
        """Nothing is allocated by looking."""
        path = tmp_path / "tier"
        given = {"type": "disk", "path": str(path), "capacity": "256MiB"}
        finding = check_tier(given, "tiers.0")
        assert finding.severity in (Severity.FINE, Severity.WARNING)
        assert [] == [*tmp_path.iterdir()]

    def test_drive_without_room_is_found(self, tmp_path):
        """Both numbers, before anything is allocated."""
        given = {"type": "disk", "path": str(tmp_path / "tier"), "capacity": "900TiB"}
        finding = check_tier(given, "tiers.0")
        assert Severity.WRONG is finding.severity
        assert "of 900 TiB" in finding.text

    def test_drives_of_one_file_system_have_its_room_together(self, tmp_path):
        """Of two that are not mounted, say: each alone had room for its half, and both were called
        well, where the agent finds none for the second."""
        free = os.statvfs(tmp_path)
        capacity = free.f_bavail * free.f_frsize * 3 // 2
        paths = [str(tmp_path / "a"), str(tmp_path / "b")]
        finding = check_tier(
            {"type": "disk", "path": paths, "capacity": capacity}, "tiers.0"
        )
        assert Severity.WRONG is finding.severity
        assert f"{tmp_path / 'b'} has room for " in finding.text

    def test_drive_behind_one_without_direct_reads_is_looked_at(
        self, tmp_path, monkeypatch
    ):
        """That the first is only slower is no news then: the second was not looked at."""
        monkeypatch.setattr(tiers, "_takes_direct", lambda _fd: False)
        paths = [tmp_path / "a", tmp_path / "b"]
        for path in paths:
            path.mkdir(mode=0o700)
        given = {"type": "disk", "path": [*map(str, paths)], "capacity": "256MiB"}
        finding = check_tier(given, "tiers.0")
        assert Severity.WARNING is finding.severity
        assert f"{tmp_path / 'a'} (" in finding.text
        (tmp_path / "b" / "theirs").touch()
        assert Severity.WRONG is check_tier(given, "tiers.0").severity

    def test_drive_that_was_made_for_smaller_blocks_is_found(self, tmp_path):
        """One whose capacity was raised to what the model needs stays cut as it was, and takes no
        block: it was called well."""
        tier = {"type": "disk", "path": str(tmp_path / "d"), "capacity": "32MiB"}
        anyio.run(close, tier)
        larger = tier | {"capacity": "128MiB"}
        finding = check_tier(larger, "tiers.0", block_bytes=4 << 20)
        assert Severity.WRONG is finding.severity
        assert "tiers.0.path" in finding.text
        assert "for blocks of up to 1.992 MiB" in finding.text
        assert "remove the directory" in finding.remedy
        for block_bytes in (0, 1 << 20):
            well = check_tier(larger, "tiers.0", block_bytes=block_bytes)
            assert Severity.FINE is well.severity

    def test_drive_that_is_not_there_is_found(self, tmp_path):
        """A mount that somebody forgot."""
        path = str(tmp_path / "missing" / "tier")
        finding = check_tier({"type": "disk", "path": path}, "tiers.0")
        assert Severity.WRONG is finding.severity
        assert "No such file" in finding.text


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_what_a_tier_takes_is_no_setting_of_its_backend(tmp_path, kind):
    """The agent reads ``admission``, and a tier that has it is well."""
    given = {"type": kind, "path": str(tmp_path / "tier"), "capacity": "256MiB"}
    finding = check_tier({**given, "admission": "again"}, "tiers.0")
    assert finding.severity in (Severity.FINE, Severity.WARNING)


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_directory_that_the_agent_would_refuse_is_found(tmp_path, kind):
    """R-24: one that has other things, or that others may write to, is somebody else's;
    its own files are not."""
    given = {"type": kind, "path": str(tmp_path), "capacity": "256MiB"}
    (tmp_path / "theirs").write_text("x")
    finding = check_tier(given, "tiers.0")
    assert Severity.WRONG is finding.severity
    assert finding.text.startswith(f"tiers.0.path='{tmp_path}': it has 'theirs'")
    (tmp_path / f"ucm-{kind}.json").write_text("{}")
    assert Severity.WRONG is not check_tier(given, "tiers.0").severity
    tmp_path.chmod(0o777)
    assert "mode 0777" in check_tier(given, "tiers.0").text


class TestShares:
    def test_mount_that_answers_is_well_and_stays_as_it_is(self, tmp_path):
        """Nothing is made by looking."""
        given = {"type": "files", "path": str(tmp_path / "share")}
        finding = check_tier(given, "tiers.0")
        assert Severity.FINE is finding.severity
        assert [] == [*tmp_path.iterdir()]

    def test_mount_that_is_not_there_is_found(self, tmp_path):
        """And settings without one."""
        path = str(tmp_path / "missing" / "share")
        finding = check_tier({"type": "files", "path": path}, "tiers.0")
        assert Severity.WRONG is finding.severity
        assert "No such file" in finding.text
        finding = check_tier({"type": "files"}, "tiers.0")
        assert finding.text.startswith("tiers.0.path=")
