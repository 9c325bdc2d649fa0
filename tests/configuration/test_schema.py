# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of the settings says what the reader does."""

import attrs
import fastjsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.pages import SCHEMA, schema_text
from ucm.config import UCMConfig
from ucm.configuration.schema import schema
from ucm.configuration.sources import flat
from ucm.errors import ConfigError

VALIDATE = fastjsonschema.compile(schema())
KEYS = list(flat(UCMConfig()))
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5000)
    | st.floats(-2, 5000)
    | st.sampled_from(
        ["", "off", "auto", "true", "process", "1GiB", "7 kb", "1e9", "0,2", "info"]
    )
    | st.lists(st.integers(), max_size=2)
)


def nested(key, value):
    """Return a mapping with one setting."""
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def is_valid(settings):
    """Tell whether the schema takes these settings."""
    try:
        VALIDATE(settings)
    except fastjsonschema.JsonSchemaValueException:
        return False
    return True


def test_published_schema_is_up_to_date():
    """What editors and charts check against is what this release reads."""
    text = SCHEMA.read_text(encoding="utf-8")
    assert schema_text() == text, "Run: python -m scripts.pages"


@pytest.mark.slow
@settings(deadline=None)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_what_the_reader_takes_the_schema_takes(key, value):
    """No file that starts an engine is called wrong by an editor."""
    try:
        UCMConfig.from_mapping(nested(key, value))
    except ConfigError:
        return
    assert is_valid(nested(key, value))


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_is_described_and_its_default_fits(key):
    """Each key is there with its help; a list is no value of any."""
    value = flat(UCMConfig())[key]
    assert is_valid(nested(key, value))
    assert not is_valid(nested(key, [object]))
    assert not is_valid(nested(f"{key}x", value))
    found = schema()["properties"]
    for part in key.split(".")[:-1]:
        found = found[part]["properties"]
    assert found[key.rpartition(".")[2]]["description"].endswith(".")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store.capacity", "4 apples"),
        ("store.capacity", 0),
        ("queue.window", 0),
        ("store.retain_share", 2),
        ("hit_ratio", -1),
        ("save_decoded", "sometimes"),
        ("use_hybrid_linear_attention", "yes"),
        ("timeout.load", "10"),
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(key, value):
    """Types, words and least values are in the schema."""
    with pytest.raises(ConfigError):
        UCMConfig.from_mapping(nested(key, value))
    assert not is_valid(nested(key, value))


def test_sections_are_closed():
    """An unknown key is as wrong as in the reader, at every depth."""
    for field in attrs.fields(UCMConfig):
        if attrs.has(type(getattr(UCMConfig(), field.name))):
            assert not is_valid({field.name: {"unknown": 1}})
    assert not is_valid({"unknown": 1})
