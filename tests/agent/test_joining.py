# SPDX-License-Identifier: Apache-2.0
"""Which tiers there can be, and who needs an agent."""

from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from ucm.agent.joining import check_tiers, open_client
from ucm.agent.launch import Launcher
from ucm.config import UCMConfig
from ucm.errors import ConfigError


def test_tiers_need_a_slab() -> None:
    """X-09: tiers below a store that has none are refused at start-up, by name."""
    config = UCMConfig.from_mapping(
        {"store": {"type": "null"}, "tiers": [{"type": "memory"}]}
    )
    with pytest.raises(ConfigError, match=r"only a slab has tiers"):
        check_tiers(config)


def test_unknown_tier_is_refused_with_those_that_are_known() -> None:
    """X-09: a type that nobody has registered is refused at start-up."""
    config = UCMConfig.from_mapping({"tiers": [{"type": "tape"}]})
    with pytest.raises(ConfigError, match="Registered") as caught:
        check_tiers(config)
    assert "tiers.0.type" == caught.value.key


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"path": Path("/mnt/ucm")}, "tiers.0"),
        ({"path": "/mnt/\udcff"}, "tiers.0"),
        ({"path": b"/mnt/ucm"}, "tiers.0"),
        ({3: "three"}, "tiers.0"),
        ({}, "store.path"),
    ],
)
def test_what_no_agent_can_be_told_is_refused_by_name(more: dict, key: str) -> None:
    """R-63: a path that is no text, as a host may well give it, was an error of JSON's."""
    path = "/dev/shm/\udcff" if key == "store.path" else "/dev/shm/ucm"
    config = UCMConfig.from_mapping(
        {"store": {"path": path}, "tiers": [{"type": "files", **more}]}
    )
    with pytest.raises(ConfigError, match="cannot be told") as caught:
        check_tiers(config)
    assert key == caught.value.key


def test_without_tiers_there_is_no_client() -> None:
    """R-63: who has no tiers starts no thread and no process."""
    check_tiers(UCMConfig())
    assert open_client(UCMConfig(), 4096, None) is None


def test_client_knows_that_an_agent_is_on_its_way(tmp_path, monkeypatch) -> None:
    """R-63: it looks for one that it has started all the time, and not ever less often."""
    monkeypatch.setattr(Launcher, "__call__", lambda self: "")
    tier = {"type": "disk", "path": str(tmp_path / "d"), "capacity": "1MiB"}
    store = {"path": str(tmp_path / "slab")}
    config = UCMConfig.from_mapping({"store": store, "tiers": [tier]})
    client = open_client(config, 4096, CapturingLogger())
    assert client is not None
    try:
        assert client._launch.is_coming == client._pauses._is_coming
    finally:
        client.close()
