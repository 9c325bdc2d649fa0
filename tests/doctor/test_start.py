# SPDX-License-Identifier: Apache-2.0
"""What is refused before a start: by whom, and in what time."""

import pytest

from tests.kit.file_tier import registration
from ucm.config import LogConfig, StoreConfig, UCMConfig
from ucm.doctor import start
from ucm.doctor.start import check_log, check_start
from ucm.doctor.tiers import read_tier
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
