# SPDX-License-Identifier: Apache-2.0
"""One configuration of several places: which counts, and what errors say of them."""

import json

import attrs
import pytest

from ucm.config import SaveDecoded, UCMConfig, settings_in_environment
from ucm.configuration.sources import DEFAULT, ENGINE, flat, load
from ucm.errors import ConfigError, ConfigFileError


@pytest.fixture
def file(tmp_path):
    """Return a function that writes settings and gives the file's path."""

    def write(text):
        path = tmp_path / "ucm.yaml"
        path.write_text(text)
        return str(path)

    return write


def error_of(given, environment):
    """Return the error of settings that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        load(given, environment=environment)
    return caught.value


class TestPrecedence:
    def test_nearer_places_count_and_are_named(self, file):
        """The engine's own, then variables, then the file, then the default; whatever
        another place says, and of each value it can be said where it is from."""
        path = file(
            "store: {capacity: 1GiB, path: /file, huge_pages: 'off'}\n"
            "queue: {window: 7}\nuse_layerwise: true\n"
        )
        read = load(
            {"config_file": path, "store": {"capacity": "3GiB"}},
            environment={
                "UCM_STORE__CAPACITY": "2GiB",
                "UCM_STORE__PATH": "/variable",
            },
        )
        config = read.config
        assert (3 << 30, "/variable", 7) == (
            config.store.capacity,
            config.store.path,
            config.queue.window,
        )
        assert {
            "store.capacity": ENGINE,
            "store.path": "the variable UCM_STORE__PATH",
            "store.huge_pages": path,
            "queue.window": path,
            "use_layerwise": path,
        } == dict(read.origins)
        assert DEFAULT == read.origin("store.type")
        assert path == read.file

    def test_nothing_given_anywhere_is_the_default(self):
        """An engine may pass nothing at all."""
        for given in (None, {}):
            read = load(given, environment={})
            assert (UCMConfig(), {}, "") == (read.config, read.origins, read.file)

    @pytest.mark.parametrize("key", ["config_file", "UCM_CONFIG_FILE"])
    def test_the_engine_names_the_file_before_the_environment(self, key, file):
        """The peer's name of the key is taken as well; a variable that is empty says
        nothing."""
        path = file("queue: {window: 7}")
        other = {"UCM_CONFIG_FILE": "/not/there.yaml"}
        assert 7 == load({key: path}, environment=other).config.queue.window
        by_variable = load({}, environment={"UCM_CONFIG_FILE": path})
        assert 7 == by_variable.config.queue.window
        assert "" == load({}, environment={"UCM_CONFIG_FILE": ""}).file

    def test_the_process_environment_is_read(self, monkeypatch):
        """Without being told variables, those of the process count, and only ours."""
        monkeypatch.setenv("UCM_QUEUE__WINDOW", "9")
        monkeypatch.setenv("NOT_UCM_QUEUE__WINDOW", "10")
        assert 9 == load({}).config.queue.window
        assert {"UCM_QUEUE__WINDOW": "9"} == settings_in_environment()


class TestVariables:
    @pytest.mark.parametrize(
        ("name", "text", "key", "value"),
        [
            ("UCM_STORE__CAPACITY", "8GiB", "store.capacity", 8 << 30),
            ("UCM_STORE__CAPACITY", "8192", "store.capacity", 8192),
            ("UCM_STORE__PATH", "123", "store.path", "123"),
            ("UCM_STORE__NUMA", "0", "store.numa", "0"),
            ("UCM_USE_LAYERWISE", "true", "use_layerwise", True),
            ("UCM_TIMEOUT__LOAD", "2.5", "timeout.load", 2.5),
            ("UCM_TIMEOUT__LOAD", "2", "timeout.load", 2.0),
            ("UCM_HIT_RATIO", "null", "hit_ratio", None),
            ("UCM_HIT_RATIO", "0.5", "hit_ratio", 0.5),
            (
                "UCM_SAVE_DECODED",
                "never",
                "save_decoded",
                SaveDecoded.NEVER.value,
            ),
            (
                "UCM_USE_HYBRID_LINEAR_ATTENTION",
                "true",
                "use_hybrid_linear_attention",
                "true",
            ),
        ],
    )
    def test_text_becomes_what_the_setting_is(self, name, text, key, value):
        """A variable is text; what it stands for follows from the setting."""
        found = flat(load({}, environment={name: text}).config)[key]
        assert (value, type(value)) == (found, type(found))

    @pytest.mark.parametrize(
        ("name", "text", "key"),
        [
            ("UCM_STOR__PATH", "/x", "stor"),
            ("UCM_STORE__PATHS", "/x", "store.paths"),
            ("UCM_STORE", "/x", "store"),
            ("UCM_", "1", ""),
            ("UCM_STORE__PATH__DEEPER", "/x", "store.path"),
            ("UCM_USE_LAYERWISE", "yes", "use_layerwise"),
            ("UCM_USE_LAYERWISE", "1", "use_layerwise"),
            ("UCM_QUEUE__WINDOW", "0", "queue.window"),
            ("UCM_QUEUE__WINDOW", "", "queue.window"),
            ("UCM_QUEUE__WINDOW", "[" * 5000, "queue.window"),
            ("UCM_TIMEOUT__LOAD", "NaN", "timeout.load"),
        ],
    )
    def test_a_variable_that_cannot_be_used_is_named(self, name, text, key):
        """X-09: a misspelt or wrong variable stops the start with its own name."""
        error = error_of({}, {name: text})
        assert key == error.key
        assert f"in the variable {name}:" in str(error)

    @pytest.mark.parametrize(
        "name",
        [
            "UCM_SERVICE_HOST",
            "UCM_SERVICE_PORT",
            "UCM_SERVICE_PORT_HTTP",
            "UCM_PORT",
            "UCM_PORT_80_TCP",
            "UCM_PORT_80_TCP_ADDR",
            "UCM_AGENT_SERVICE_HOST",
            "UCM_AGENT_PORT_80_UDP_PROTO",
        ],
    )
    def test_what_kubernetes_sets_for_a_service_is_no_setting(self, name):
        """A service called ucm in the namespace must not stop every engine in it."""
        assert UCMConfig() == load({}, environment={name: "tcp://10.0.0.1"}).config

    def test_no_setting_looks_like_such_a_variable(self):
        """Each setting can be given as a variable."""
        for key, value in flat(UCMConfig()).items():
            name = "UCM_" + key.upper().replace(".", "__")
            text = value if isinstance(value, str) else json.dumps(value)
            assert {key} == set(load({}, environment={name: text}).origins)


class TestErrors:
    def test_a_setting_that_is_overridden_is_still_checked(self, file):
        """X-09: what is wrong in a file is found before the day on which the variable
        that hides it is gone, and the file is named."""
        path = file("queue: {window: none}")
        error = error_of({"config_file": path}, {"UCM_QUEUE__WINDOW": "7"})
        assert "queue.window" == error.key
        assert f"in {path}:" in str(error)

    @pytest.mark.parametrize(
        ("given", "key"),
        [
            ({"stor": 1}, "stor"),
            ({"config_file": 7}, "config_file"),
            ({"config_file": ""}, "config_file"),
            ({"config_file": "a", "UCM_CONFIG_FILE": "b"}, "config_file"),
            ("store", ENGINE),
            ([], ENGINE),
        ],
    )
    def test_what_the_engine_passes_is_named_too(self, given, key):
        """X-09: an error says that it is the engine's own dictionary."""
        error = error_of(given, {})
        assert key == error.key
        assert ENGINE in str(error)

    def test_a_missing_file_stops_the_start(self, tmp_path):
        """X-09: whoever names it; the peer goes on with its defaults."""
        missing = str(tmp_path / "missing.toml")
        for given, environment in (
            ({"config_file": missing}, {}),
            ({}, {"UCM_CONFIG_FILE": missing}),
        ):
            assert isinstance(error_of(given, environment), ConfigFileError)

    def test_a_file_does_not_name_another(self, file):
        """One file is all there is to look into."""
        assert (
            "config_file"
            == error_of({"config_file": file("config_file: other.yaml")}, {}).key
        )

    def test_a_message_is_short_whatever_the_value(self):
        """A value of a file can be long; the message names it and is not."""
        error = error_of({"store": {"path": ["x" * 10000]}}, {})
        assert len(str(error)) < 1000


class TestOff:
    def documented(self, section=UCMConfig, prefix=""):
        """Return the settings that say that they have such a value."""
        for each in attrs.fields(section):
            key = f"{prefix}{each.name}"
            if attrs.has(each.type):
                yield from self.documented(each.type, f"{key}.")
            elif "`off`" in each.metadata["help"]:
                yield key

    def test_false_is_the_word_for_each_setting_that_has_it(self, file):
        """YAML reads it so without quotes, also where the engine reads the file."""
        keys = [*self.documented()]
        assert 5 == len(keys)
        for key in keys:
            *section, name = key.split(".")
            line = f"{name}: off"
            text = f"{section[0]}: {{{line}}}" if section else line
            given = {section[0]: {name: False}} if section else {name: False}
            for settings in ({"config_file": file(text)}, given):
                found = load(settings, environment={})
                assert "off" == flat(found.config)[key]
                assert [key] == [*found.origins]

    def test_false_stays_what_it_is_elsewhere(self):
        """A switch that is off, and a path that is none."""
        found = load({"predict_loads": False}, environment={}).config
        assert found.predict_loads is False
        assert "store.path" == error_of({"store": {"path": False}}, {}).key
        assert "log" == error_of({"log": False}, {}).key


class TestGone:
    def test_durability_of_a_slab_is_refused_with_what_took_its_place(self):
        """A setting of former releases is no unknown word: a tier outlasts the machine."""
        error = error_of({"store": {"durability": "power"}}, {})
        assert "store.durability" == error.key
        assert "disk with durability: power" in error.remedy


class TestFlat:
    def test_every_setting_is_there_as_json_has_it(self):
        """Sections are gone, words are text, and no setting is left out."""
        found = flat(UCMConfig())
        assert "always" == found["store.verify"]
        num_leaves = sum(
            len(attrs.fields(type(section))) if attrs.has(type(section)) else 1
            for section in (
                getattr(UCMConfig(), field.name) for field in attrs.fields(UCMConfig)
            )
        )
        assert num_leaves == len(found)
