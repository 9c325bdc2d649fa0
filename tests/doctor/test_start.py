# SPDX-License-Identifier: Apache-2.0
"""What is refused before a start: by whom, and in what time."""

import re

import pytest

from tests.kit.file_tier import registration
from ucm.config import LogConfig, StoreConfig, UCMConfig
from ucm.doctor import start
from ucm.doctor.start import check_log, check_start
from ucm.doctor.tiers import check_apart, read_tier
from ucm.errors import ConfigError


def test_store_that_keeps_nothing_has_no_place():
    """What is not used is not looked at."""
    check_start(UCMConfig(store=StoreConfig(type="null", path="/no/such")), None)


@pytest.mark.parametrize("key", ["store.path", "log.directory"])
def test_mount_that_hangs_is_refused_and_not_waited_for(tmp_path, monkeypatch, key):
    """X-14: an engine would wait for it as well."""
    monkeypatch.setattr(start, "within", lambda _seconds, _ask: None)
    store = StoreConfig(type="slab" if key == "store.path" else "null")
    config = UCMConfig(store=store, log=LogConfig(directory=str(tmp_path)))
    with pytest.raises(ConfigError, match="does not answer") as caught:
        check_start(config, None)
    assert key == caught.value.key


def test_log_where_one_can_be_made_is_well_and_leaves_nothing(tmp_path):
    """Also in a directory that an engine would make."""
    check_log(LogConfig(directory=str(tmp_path / "a" / "b")))
    assert [] == [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "told"), [("x" * 300, "too long"), ("file/logs", "Not a directory")]
)
def test_log_where_none_can_be_made_is_refused_with_the_reason(tmp_path, name, told):
    """In the words of the system."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=told):
        check_log(LogConfig(directory=str(tmp_path / name)))


def test_tier_of_others_is_left_to_its_backend(tmp_path, monkeypatch):
    """Nobody knows how it reads its settings; that there is one is known."""
    monkeypatch.syspath_prepend(str(registration(tmp_path)))
    tier = {"type": "file-tier", "anything": 1}
    assert read_tier(tier, "tiers.0") is None
    with pytest.raises(ConfigError, match="admission"):
        read_tier({**tier, "admission": "x"}, "tiers.0")


def of_tiers(*tiers):
    """Return settings with tiers of these types and directories, over the slab ``/t/slab``."""
    given = [{"type": kind, "path": path} for kind, path in tiers]
    return UCMConfig(store=StoreConfig(path="/t/slab"), tiers=given)


@pytest.mark.parametrize(
    ("tiers", "told"),
    [
        (
            [("disk", ["/t/a", "/t/b"]), ("disk", "/t/b")],
            "tiers.1.path='/t/b': tiers.0",
        ),
        ([("files", "/t/a"), ("disk", "/t/a")], "tiers.1.path='/t/a': tiers.0"),
        ([("files", "/t/slab")], "tiers.0.path='/t/slab': store.path"),
    ],
)
def test_directory_that_two_are_to_fill_is_refused(tiers, told):
    """The agent ends with code 2 for it, each minute anew, and the slab serves alone: these settings
    were called well."""
    with pytest.raises(ConfigError, match=f"^{re.escape(told)} has it, too"):
        check_apart(of_tiers(*tiers))


def test_directories_that_an_agent_takes_are_well():
    """Two tiers of files may have one: each reads what the other has written."""
    check_apart(of_tiers(("files", "/t/a"), ("files", "/t/a"), ("disk", ["/t/b"])))
