# SPDX-License-Identifier: Apache-2.0
"""Settings that are bounded by one another, or by who has to keep to them."""

from pathlib import Path

import pytest

from tests.test_config import refused
from ucm.agent.protocol import LONGEST_S
from ucm.backends.disk import DiskSettings
from ucm.backends.files._backend import FilesSettings
from ucm.config import LogConfig, QueueConfig, StoreConfig, UCMConfig
from ucm.configuration.schema import schema
from ucm.errors import ConfigError
from ucm.settings import read_section


def test_longest_fetch_is_named():
    """X-09: it was cut to a minute without a word; a minute itself is well."""
    error = refused({"timeout": {"fetch": LONGEST_S + 1}})
    assert "Give a finite number of at least 0.001 and at most 60." == error.remedy
    told = UCMConfig.from_mapping({"timeout": {"fetch": LONGEST_S}}).timeout
    assert LONGEST_S == told.fetch
    settings = schema()["properties"]["timeout"]["properties"]
    assert LONGEST_S == settings["fetch"]["maximum"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"store.capacity": "4GiB"}, "store.capacity"),
        ({"capacity": "4GiB"}, "store.capacity"),
        ({"Store_Capacity": "4GiB"}, "store.capacity"),
        ({"timeout-load": 5}, "timeout.load"),
    ],
)
def test_name_without_its_section_is_led_there(given, meant):
    """X-09: as in a variable with one underscore; who wrote it was shown the sections only."""
    section, _, name = meant.partition(".")
    variable = f"UCM_{section}__{name}".upper()
    told = f"Did you mean {meant}? Give it within {section}, or as the variable {variable}. "
    assert refused(given).remedy.startswith(told)


@pytest.mark.parametrize(
    ("section", "name", "path", "told"),
    [
        ("store", "path", "", "is empty"),  # as of a variable that is set to nothing
        ("store", "path", "~/slab", "~ is a directory"),
        ("log", "directory", "~/log", "~ is a directory"),
    ],
)
def test_path_that_nobody_means_is_refused(section, name, path, told):
    """X-09: it became the directory where the engine was started, or one called ~ there."""
    error = refused({section: {name: path}})
    assert (f"{section}.{name}", path) == (error.key, error.value)
    assert told in error.problem


@pytest.mark.parametrize(
    ("section", "path"), [(FilesSettings, "~/cold"), (DiskSettings, ["/a", "~/cold"])]
)
def test_tier_below_a_directory_called_home_is_refused(section, path):
    """X-09: blocks that are to last would lie where the agent happened to be started."""
    with pytest.raises(ConfigError, match="~ is a directory") as caught:
        read_section(section, {"path": path}, "tiers.0.")
    assert ("tiers.0.path", "~/cold") == (caught.value.key, caught.value.value)


def test_host_may_give_a_path_as_one():
    """A ``Path`` in a section that a host makes itself is taken, and refused, as its text is."""
    assert Path("/dev/shm/slab") == StoreConfig(path=Path("/dev/shm/slab")).path
    assert Path("/var/log") == LogConfig(directory=Path("/var/log")).directory
    with pytest.raises(ConfigError, match="~ is a directory"):
        StoreConfig(path=Path("~/slab"))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"use_layerwise": "yes"}, "Give true or false, without quotes."),
        ({"queue": {"window": "4"}}, "Give a whole number, without quotes."),
        (
            {"timeout": {"load": "5s"}},
            "Give a number, without quotes and without a unit.",
        ),
        ({"store": {"path": 5}}, "Give a text."),
    ],
)
def test_value_of_another_type_is_answered_in_words(given, remedy):
    """X-09: an operator has not to know what Python calls a number."""
    assert remedy == refused(given).remedy


def test_size_with_more_digits_than_any_number_is_refused():
    """X-09: it was infinite, and ended in an error that named no key."""
    error = refused({"store": {"capacity": "9" * 400 + "GiB"}})
    assert ("store.capacity", "too large") == (error.key, error.problem)


def test_queue_that_holds_no_block_is_refused():
    """X-09: one below a ticket has saves go one by one; a model says what a block has."""
    queue = QueueConfig(nbytes=4096, span_bytes=1)
    queue.check_holds(4096)
    with pytest.raises(ConfigError, match=r"does not hold a block of 4\.001 KiB"):
        queue.check_holds(4097)
