# SPDX-License-Identifier: Apache-2.0
"""The settings tree: what it takes, and how it says what it does not take."""

import os
import subprocess
import sys

import attrs
import pytest
import yaml

from scripts.pages import ROOT, rewrite, settings
from ucm.config import (
    LogConfig,
    QueueConfig,
    SaveDecoded,
    StoreConfig,
    Switch,
    ThreadConfig,
    TimeoutConfig,
    UCMConfig,
    Verify,
    default_store_path,
)
from ucm.errors import ConfigError

EVENT_KEYS = ("enable_event_sync", "enable_reshape_cache_event_sync")
MODE_KEYS = (
    "save_decoded",
    "shortest_saved_tokens",
    "consumer_saves_decoded",
    "max_retain_seconds",
    *("use_layerwise", "load_ahead_rows"),
    "use_hybrid_linear_attention",
    "hit_ratio",
)


def refused(given: object) -> ConfigError:
    """Return the error that *given* causes."""
    with pytest.raises(ConfigError) as caught:
        UCMConfig.from_mapping(given)
    return caught.value


class TestDefaults:
    def test_nothing_given_is_a_usable_configuration(self):
        """S0-01, S0-04: without any setting all sections have their documented
        defaults; events are used, those of the engine are not."""
        config = UCMConfig.from_mapping({})
        assert UCMConfig() == config
        assert ("slab", 4 << 30) == (config.store.type, config.store.capacity)
        assert (True, False) == tuple(getattr(config, key) for key in EVENT_KEYS)
        assert f"/dev/shm/ucm-{os.getuid()}" == default_store_path()
        assert default_store_path() == config.store.path

    @pytest.mark.parametrize(
        "section",
        [UCMConfig, StoreConfig, QueueConfig, TimeoutConfig, LogConfig, ThreadConfig],
    )
    def test_every_setting_is_frozen(self, section):
        """A configuration that was read cannot be changed afterwards."""
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(section(), attrs.fields(section)[0].name, None)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("given", "seed"), [({}, ""), ({"PYTHONHASHSEED": "7"}, "7")]
    )
    def test_hash_seed_is_read_from_the_environment(self, given, seed):
        """The seed that vLLM mixes into block hashes is told, empty when unset."""
        code = "from ucm.config import python_hash_seed; print(python_hash_seed())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert seed == done.stdout.strip()


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("given", "key", "hint"),
        [
            ({"stor": {}}, "stor", "Did you mean store?"),
            ({"store": {"capacities": 1}}, "store.capacities", "mean store.capacity?"),
            ({"timeout": {"loads": 1}}, "timeout.loads", "Did you mean timeout.load?"),
        ],
    )
    def test_close_name_is_suggested(self, given, key, hint):
        """X-09: an unknown key is an error that names the key and a close match."""
        error = refused(given)
        assert key == error.key
        assert hint in str(error)

    def test_far_name_lists_what_is_known(self):
        """X-09: a key that resembles nothing gets the list of keys and no guess."""
        error = refused({"queue": {"zzz": 1}})
        assert "queue.zzz" == error.key
        assert "Did you mean" not in str(error)
        assert (
            "Known: ['nbytes', 'span_bytes', 'staging_bytes', 'tickets', 'window']"
            in str(error)
        )

    def test_key_that_is_no_text_is_unknown(self):
        """A mapping may have keys of any type; other than text none is known."""
        assert "7" == refused({7: 1}).key


class TestTypes:
    @pytest.mark.parametrize(
        ("given", "key", "told"),
        [
            ({"store": {"type": 3}}, "store.type", "int is not str"),
            ({"store": {"path": None}}, "store.path", "NoneType is not str"),
            ({"store": {"path": "a\0b"}}, "store.path", "character 0"),
            ({"queue": {"tickets": "8"}}, "queue.tickets", "str is not int"),
            ({"queue": {"tickets": 8.0}}, "queue.tickets", "float is not int"),
            ({"queue": {"tickets": True}}, "queue.tickets", "bool is not int"),
            ({"timeout": {"save": True}}, "timeout.save", "bool is not float"),
            ({"timeout": {"save": "1"}}, "timeout.save", "str is not float"),
            ({"threads": {"affinity": 8}}, "threads.affinity", "int is not str"),
            ({"weights_revision": ["a"]}, "weights_revision", "list is not str"),
            ({"load_ahead_rows": 1.0}, "load_ahead_rows", "float is not int"),
            *(
                ({key: value}, key, f"{type(value).__name__} is not bool")
                for key in (*EVENT_KEYS, "use_layerwise")
                for value in ("false", 0, 1.0, None)
            ),
        ],
    )
    def test_wrong_type_names_the_key(self, given, key, told):
        """X-09, S0-05: a value of another type is refused with key, value and both
        types; a word such as "false" is no boolean."""
        error = refused(given)
        assert key == error.key
        assert told in str(error)

    @pytest.mark.parametrize("given", [None, [], "store", 1])
    def test_section_that_is_no_mapping_names_its_keys(self, given):
        """X-09: nothing but a mapping is a section, and the remedy lists its keys."""
        error = refused({"store": given})
        assert "store" == error.key
        names = sorted(field.name for field in attrs.fields(StoreConfig))
        assert "capacity" in names
        assert str(names) in error.remedy
        assert "" == refused(given).key

    def test_integer_is_taken_for_seconds(self):
        """Whole seconds may be written without a point and are kept as a float."""
        seconds = UCMConfig.from_mapping({"timeout": {"load": 3}}).timeout.load
        assert (3.0, float) == (seconds, type(seconds))


class TestValues:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("4GiB", 4 << 30),
            (10, 10),
            ("10", 10),
            ("1.5 GiB", 3 << 29),
            (" 2mb ", 2 << 20),
            ("7B", 7),
            ("1KiB", 1024),
            ("1TB", 1 << 40),
        ],
    )
    def test_size_is_read_in_powers_of_1024(self, text, nbytes):
        """Sizes are bytes or text with a unit, in any case and with spaces."""
        config = UCMConfig.from_mapping({"store": {"capacity": text}})
        assert nbytes == config.store.capacity

    @pytest.mark.parametrize(
        "text", ["", "GiB", "4 apples", "-1GiB", "1e9", "4GiBs", 1.5, True, None, []]
    )
    def test_text_that_is_no_size_is_refused(self, text):
        """X-09: what is not a size is refused and the remedy shows one."""
        error = refused({"store": {"capacity": text}})
        assert "store.capacity" == error.key
        assert "4GiB" in error.remedy

    @pytest.mark.parametrize(
        ("section", "name", "value"),
        [
            ("store", "capacity", 0),
            ("store", "capacity", "0.5B"),
            ("queue", "tickets", 0),
            ("queue", "nbytes", -1),
            ("queue", "span_bytes", 0),
            ("queue", "window", 0),
            ("timeout", "save", 0),
            ("timeout", "load", 0.0001),
            ("timeout", "fence", -0.1),
            ("timeout", "stuck", 0),
            ("timeout", "shutdown", -1),
            ("timeout", "shutdown", 1e10),  # which no lock can wait for
            ("timeout", "fetch", 0),
            ("timeout", "fetch", 61),  # which no agent takes
        ],
    )
    def test_value_out_of_its_range_is_refused(self, section, name, value):
        """X-09: a value that is too small, or too large, is refused with the least that will do."""
        error = refused({section: {name: value}})
        assert f"{section}.{name}" == error.key
        assert "at least" in error.remedy

    @pytest.mark.parametrize("name", ["fence", "shutdown"])
    def test_wait_of_no_time_is_allowed(self, name):
        """The engine may be told never to wait."""
        assert 0.0 == getattr(
            UCMConfig.from_mapping({"timeout": {name: 0}}).timeout, name
        )

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_number_of_seconds_that_is_not_finite_is_refused(self, value):
        """JSON readers let NaN and Infinity pass; a deadline must be a moment."""
        assert "timeout.shutdown" == refused({"timeout": {"shutdown": value}}).key

    def test_enumerated_value_is_read_by_its_word(self):
        """An enumerated setting is given as its word."""
        config = UCMConfig.from_mapping({"store": {"verify": "once"}})
        assert Verify.ONCE is config.store.verify

    @pytest.mark.parametrize("word", ["Once", "", None, 1, ["once"]])
    def test_unknown_word_lists_the_known_ones(self, word):
        """X-09: any other word is refused and the known ones are listed."""
        error = refused({"store": {"verify": word}})
        assert "store.verify" == error.key
        assert "['always', 'once']" in error.remedy

    def test_unknown_log_level_lists_the_known_ones(self):
        """X-09: a level that does not exist is refused by name."""
        error = refused({"log": {"level": "loud"}})
        assert "log.level" == error.key
        assert "'warning'" in error.remedy

    @pytest.mark.parametrize("value", ["off", "numa", "8-15,24", "0"])
    def test_affinity_is_a_word_or_a_list(self, value):
        """Copy threads are left alone, put near the device, or onto given CPUs."""
        config = UCMConfig.from_mapping({"threads": {"affinity": value}})
        assert value == config.threads.affinity

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ("", "no CPU is listed"),
            ("node1", "'node1' is neither a CPU nor a range"),
            ("8-15,,24", "'' is neither"),
            ("15-8", "'15-8' goes backwards"),
        ],
    )
    def test_affinity_that_is_neither_is_refused(self, value, problem):
        """X-09: a list that Linux could not have written is refused with the part that
        is wrong and an example."""
        error = refused({"threads": {"affinity": value}})
        assert ("threads.affinity", value) == (error.key, error.value)
        assert problem in str(error)
        assert "'8-15,24'" in error.remedy


class TestModes:
    def test_nothing_given_is_the_direct_mode(self):
        """S4-33: unless asked for, nothing is layer-wise, nothing is claimed of the
        model, no hit is made up, one row is loaded ahead (S4-03), and decoded blocks are
        saved when their request ends."""
        config = UCMConfig.from_mapping({})
        expected = (SaveDecoded.AT_END, 0, False, 3600.0, False, 1, Switch.AUTO, None)
        assert expected == tuple(getattr(config, key) for key in MODE_KEYS)

    def test_given_values_are_kept(self):
        """S4-33: each key takes what it is documented to take."""
        given = {
            "save_decoded": "each_block",
            "shortest_saved_tokens": 64,
            "consumer_saves_decoded": True,
            "max_retain_seconds": 0,
            "use_layerwise": True,
            "load_ahead_rows": 0,
            "use_hybrid_linear_attention": "false",
            "hit_ratio": 0.25,
        }
        config = UCMConfig.from_mapping(given)
        expected = (SaveDecoded.EACH_BLOCK, 64, True, 0.0, True, 0, Switch.FALSE, 0.25)
        assert expected == tuple(getattr(config, key) for key in MODE_KEYS)

    def test_rows_ahead_are_counted_from_none(self):
        """S4-03: a load may do without rows ahead of the one waited for, not with less."""
        error = refused({"load_ahead_rows": -1})
        assert "load_ahead_rows" == error.key
        assert "at least 0" in error.remedy

    @pytest.mark.parametrize(
        ("given", "read"),
        [
            (True, Switch.TRUE),
            (False, Switch.FALSE),
            ("auto", Switch.AUTO),
            ("true", Switch.TRUE),
            ("false", Switch.FALSE),
        ],
    )
    def test_claim_is_a_boolean_or_a_word(self, given, read):
        """S4-33: a configuration that has the key as a boolean is read as it stands."""
        config = UCMConfig.from_mapping({"use_hybrid_linear_attention": given})
        assert read is config.use_hybrid_linear_attention

    @pytest.mark.parametrize("given", ["yes", "True", "", 1, 0, None, ["auto"]])
    def test_claim_of_another_kind_lists_the_words(self, given):
        """X-09: anything else is refused and the known words are listed."""
        error = refused({"use_hybrid_linear_attention": given})
        assert "use_hybrid_linear_attention" == error.key
        assert "['auto', 'true', 'false']" in error.remedy

    @pytest.mark.parametrize(
        ("given", "read"), [(None, None), (0, 0.0), (1, 1.0), (0.5, 0.5)]
    )
    def test_hit_ratio_is_a_share_or_nothing(self, given, read):
        """S4-33: a share of the whole is a float, and null is as good as no key; a
        share of zero is set all the same."""
        found = UCMConfig.from_mapping({"hit_ratio": given}).hit_ratio
        assert (read, type(read)) == (found, type(found))

    @pytest.mark.parametrize(
        "given", [-0.1, 1.01, float("nan"), float("inf"), "0.5", True, False, [0.5]]
    )
    def test_hit_ratio_that_is_no_share_is_refused(self, given):
        """X-09: what is no number from 0 to 1 is refused with the range."""
        error = refused({"hit_ratio": given})
        assert "hit_ratio" == error.key
        assert "0 to 1" in error.remedy


class TestDocumentation:
    def test_every_setting_has_its_line(self):
        """No section and no key is left out of the table, and none has an empty help."""
        told = settings(UCMConfig())
        lines = {line.split("`")[1]: line for line in told if "`" in line}
        sections = [
            name
            for name, field in attrs.fields_dict(UCMConfig).items()
            if isinstance(field.default, attrs.Factory)
        ]
        for section in sections:
            made = getattr(UCMConfig(), section)
            for name in attrs.fields_dict(type(made)):
                assert lines.pop(f"{section}.{name}").rstrip("| ").endswith(".")
        rest = [
            "tiers",
            "kv_events",
            "predict_loads",
            "weights_revision",
            "immutable_adapters",
            *(*EVENT_KEYS, *MODE_KEYS),
            "patch_vllm_ascend",
        ]
        assert rest == list(lines)

    def test_example_is_read_strictly_and_says_the_defaults(self):
        """S0-06, S0-46, S4-33: the example has the keys of events and of layer-wise
        saves with their defaults, each below a line that explains it, and nothing in it
        is refused."""
        text = (ROOT / "examples" / "serve.yaml").read_text(encoding="utf-8")
        given = yaml.safe_load(text)["kv-transfer-config"]["kv_connector_extra_config"]
        config = UCMConfig.from_mapping(given)
        lines = [line.strip() for line in text.splitlines()]
        for key in (*EVENT_KEYS, "use_layerwise"):
            assert getattr(UCMConfig(), key) is getattr(config, key)
            explained = attrs.fields_dict(UCMConfig)[key].metadata["help"]
            at = next(n for n, line in enumerate(lines) if line.startswith(f"{key}:"))
            assert f"# {explained.replace('`', '')}" == lines[at - 1]

    def test_every_shipped_yaml_is_read(self):
        """S0-46: no file ends up in a release that a YAML reader refuses."""
        folders = ("ucm", "examples", "tests", "benchmarks", "docs", ".ci", ".github")
        found = [
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*.y*ml")
            if path.suffix in (".yaml", ".yml")
        ]
        assert ROOT / "examples" / "serve.yaml" in found
        for path in found:
            assert yaml.safe_load(path.read_text(encoding="utf-8")) is not None, path

    def test_text_without_markers_is_refused(self):
        """A page that lost its markers is noticed instead of left as it is."""
        with pytest.raises(ValueError, match="settings: begin"):
            rewrite("settings.md", "# ucm\n")
