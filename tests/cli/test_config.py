# SPDX-License-Identifier: Apache-2.0
"""``ucm config``: what an operator asks before an engine starts."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.call import call
from tests.configuration.test_foreign import EXAMPLE, PREFIX
from ucm.config import UCMConfig
from ucm.configuration.schema import schema
from ucm.configuration.sources import ENGINE, flat
from ucm.doctor.tiers import _CLIENTS
from ucm.errors import ConfigError
from ucm.registry import how_to_install, load_class, registered

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "examples" / "serve.yaml"
ROLE = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
DISK = {"type": "disk", "path": "/x"}


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file and gives its path."""

    def write(text, name="ucm.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


class TestCheck:
    def test_settings_that_can_be_used_are_well(self, file):
        """An engine's file, a file of ours and the engine's own JSON are all taken."""
        ours = file("store: {capacity: 1GiB}\n")
        transfer = {**ROLE, ENGINE: {"store": {"path": "/dev/shm/ucm-none"}}}
        for arguments, keys in (
            (["--file", SERVE], 6),
            (["-f", ours], 1),
            (["--kv-transfer-config", json.dumps(transfer)], 1),
            (["-f", ours, "--kv-transfer-config", json.dumps(transfer)], 2),
            ([], 0),
        ):
            told = call("config", "check", *arguments)
            assert (0, "") == (told.code, told.err)
            assert f"{keys} given" in told.out
            told = call("config", "check", "--json", *arguments).json()
            assert (True, keys) == (told["usable"], len(told["given"]))

    def test_our_part_of_several_connectors_is_found(self, file):
        """S2-17: behind a MultiConnector our settings are one level deeper."""
        inner = [
            {"kv_connector": "OffloadingConnector"},
            {**ROLE, ENGINE: {"queue": {"window": 7}}},
        ]
        multi = {"kv_connector": "MultiConnector", ENGINE: {"connectors": inner}}
        for path in (
            file(json.dumps({"kv-transfer-config": multi}), "a.json"),
            file(json.dumps({"kv_transfer_config": json.dumps(multi)}), "b.json"),
        ):
            told = call("config", "check", "--json", "-f", path).json()
            assert {"queue.window": f"{ENGINE} of {path}"} == told["given"]

    @pytest.mark.parametrize(
        ("second", "told"),
        [
            ({ENGINE: {"stroe": {}}}, "Did you mean store?"),
            ({ENGINE: {"store": {"type": "memory"}}}, "is not shared"),
            ({"kv_role": "both"}, "kv_role='both'"),
        ],
    )
    def test_each_part_of_ours_in_several_connectors_is_checked(self, second, told):
        """X-09: the second of two, with a store of its own, was looked at by nobody before the engine."""
        inner = [{**ROLE, ENGINE: {"queue": {"window": 7}}}, {**ROLE, **second}]
        multi = {"kv_connector": "MultiConnector", ENGINE: {"connectors": inner}}
        found = call("config", "check", "--kv-transfer-config", json.dumps(multi))
        assert (2, "") == (found.code, found.out)
        assert told in found.err
        assert found.is_tidy()
        inner.pop()
        found = call("config", "check", "--kv-transfer-config", json.dumps(multi))
        assert 0 == found.code

    def test_the_peers_file_is_answered_with_its_equivalent(self, file):
        """The equivalent can be copied: it is JSON; what has none is named."""
        path = file(EXAMPLE)
        told = call("config", "check", "--file", path)
        assert 0 == told.code
        text = told.out[told.out.index("{") : told.out.rindex("}") + 1]
        assert "256GiB" == json.loads(text)["store"]["capacity"]
        assert "metrics_config_path" in told.out
        answer = call("config", "check", "--json", "--file", path).json()
        assert json.loads(text) == answer["translation"]["equivalent"]
        named = [each["theirs"] for each in answer["translation"]["left_out"]]
        assert f"{PREFIX}io_direct" in named

    @pytest.mark.parametrize(
        ("text", "code", "told"),
        [
            ("stor: {}\n", 2, "Did you mean store?"),
            ("store: {capacity: 4 apples}\n", 2, "store.capacity='4 apples'"),
            ("kv-transfer-config: 7\n", 2, "not a mapping"),
            ("kv-transfer-config: {kv_connector: Other}\n", 2, "another connector"),
            ("kv_connector_extra_config: [1]\n", 2, "not a mapping"),
            ("kv-transfer-config: '{'\n", 2, "not JSON"),
            ("store: [\n", 3, "not YAML"),
        ],
    )
    def test_settings_that_cannot_are_one_line_and_a_code(self, file, text, code, told):
        """X-09: the line names file, key and remedy; a script sees the code."""
        path = file(text)
        found = call("config", "check", "--file", path)
        assert (code, "") == (found.code, found.out)
        assert told in found.err
        assert 1 == found.err.count(str(path))
        assert found.is_tidy()

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"store": {"type": "slap"}}, "store.type='slap' in {}: unknown name"),
            ({"store": {"type": "memory"}}, "is not shared"),
            ({"store": {"numa": "9999"}}, "store.numa='9999' in {}: "),
            ({"store": {"path": "missing/slab"}}, "its parent does not exist"),
            ({"tiers": [{"type": "nope"}]}, "tiers.0.type='nope' in {}: unknown"),
            (
                {"tiers": [{**DISK, "admission": "agaim"}]},
                "Use one of ['all', 'again']",
            ),
            (
                {"tiers": [{**DISK, "kapacity": "1GiB"}]},
                "Did you mean tiers.0.capacity?",
            ),
            ({"tiers": [{"type": "disk"}]}, "tiers.0.path='' in {}: missing"),
            ({"tiers": [DISK, {"type": "files"}]}, "tiers.1.path='' in {}: missing"),
            ({"tiers": [DISK, DISK]}, "in {}: tiers.0 has it, too."),
            (
                {"tiers": [DISK], "store": {"type": "null"}},
                "only a slab has tiers",
            ),
            (
                {"tiers": [{"type": "files", "path": "/x", "capacity": "4KiB"}]},
                (
                    "tiers.0.capacity=4096 in {}: out of range. Give a finite number of "
                    "at least 4224."
                ),
            ),
            ({"tiers": [{"type": "memory", "capacity": "4KiB"}]}, "at least 4224."),
            ({"tiers": [{**DISK, "capacity": "4KiB"}]}, "at least 196608."),
            (
                {"tiers": [{**DISK, "path": ["/x/a", "/x/b"], "capacity": "192KiB"}]},
                (
                    "tiers.0.capacity=196608 in {}: too little for 2 drives. Give at least "
                    "393216, or fewer drives."
                ),
            ),
            (
                {"kv_events": "node", "store": {"type": "null"}},
                "kv_events='node' in {}: store.type is 'null'",
            ),
            (
                {"kv_load_failure_policy": "recompute"},
                (
                    "kv_load_failure_policy='recompute' in {}: no setting of ours. It is the "
                    "engine's own: give it in kv-transfer-config, beside kv_connector_extra_config."
                ),
            ),
            ({"timeout": {"fetch": 61}}, "timeout.fetch=61 in {}: out of range."),
            (
                {"log": {"directory": "/dev/null/x"}},
                "log.directory='/dev/null/x' in {}",
            ),
        ],
    )
    def test_what_an_engine_or_its_agent_refuses_is_refused(self, file, settings, told):
        """X-09: by those who would refuse it, with the place where it was given."""
        path = file(json.dumps(settings), "ucm.json")
        transfer = json.dumps({**ROLE, ENGINE: settings})
        for arguments, place in (
            (("--file", path), path),
            (("--kv-transfer-config", transfer), ENGINE),
        ):
            found = call("config", "check", *arguments)
            assert (2, "") == (found.code, found.out)
            assert told.format(place) in found.err
            assert found.is_tidy()

    @pytest.mark.parametrize(
        ("url", "remedy"),
        [
            ("redis//x", "Give one such as redis://host:6379/0."),
            ("redis://h:99999/0", "Give one such as redis://host:6379/0."),
            ("s3//bucket", "Give an address such as s3://bucket/prefix"),
            ("https://h:99999/x", "Give an address such as s3://bucket/prefix"),
        ],
    )
    def test_address_that_is_none_is_refused_as_by_the_agent(self, file, url, remedy):
        """X-09: a missing colon, and a port that there cannot be."""
        backend = "redis" if url.startswith("redis") else "object"
        pytest.importorskip(f"ucm.backends.{backend}")
        path = file(json.dumps({"tiers": [{"type": backend, "url": url}]}), "ucm.json")
        found = call("config", "check", "--file", path)
        assert (2, "") == (found.code, found.out)
        assert f"tiers.0.url='{url}' in {path}: ValueError, " in found.err
        assert remedy in found.err
        assert found.is_tidy()

    @pytest.mark.parametrize(("backend", "module"), _CLIENTS.items())
    def test_package_that_is_missing_is_named(self, file, monkeypatch, backend, module):
        """Some backends import their client only in the agent, which refused them then."""
        monkeypatch.setitem(sys.modules, module, None)
        path = file(json.dumps({"tiers": [{"type": backend}]}), "ucm.json")
        found = call("config", "check", "--file", path)
        assert (2, True) == (found.code, found.is_tidy())
        assert f"named '{module}'). {how_to_install(backend)}" in found.err

    @pytest.mark.parametrize("backend", registered("ucm.backends"))
    def test_settings_of_each_backend_are_read(self, file, backend):
        """A misspelt key of any of ours is refused before an engine starts."""
        try:
            load_class("ucm.backends", backend, "type")
        except ConfigError as exc:
            pytest.skip(exc.problem)
        if backend in _CLIENTS:
            pytest.importorskip(_CLIENTS[backend])
        needed = {"disk": {"path": "/x"}, "files": {"path": "/x"}}
        urls = {"redis": {"url": "redis://x"}, "object": {"url": "memory:///"}}
        tier = {"type": backend, **(needed | urls).get(backend, {})}
        for more, code in (({}, 0), ({"xapacity": 1}, 2)):
            path = file(json.dumps({"tiers": [tier | more]}), "ucm.json")
            assert code == call("config", "check", "--file", path).code

    @pytest.mark.parametrize(
        ("transfer", "told"),
        [
            ({**ROLE, "kv_connector_extra_confg": {}}, f"Did you mean {ENGINE}?"),
            ({**ROLE, "kv_role": "kv_bth"}, "kv_role='kv_bth': unknown value"),
            ({"kv_connector": "UCMConnector"}, "kv_role=None: missing"),
            ({**ROLE, "store": {"type": "slab"}}, f"give it within {ENGINE}"),
            ({**ROLE, "7": 7}, "unknown key of kv-transfer-config"),
            (
                {**ROLE, "kv_load_failure_policy": "retry"},
                "one of ['recompute', 'fail']",
            ),
            ({**ROLE, ENGINE: []}, f"{ENGINE}=[]: not a mapping"),
        ],
    )
    def test_what_an_engine_refuses_of_its_own_is_refused(self, transfer, told):
        """A store beside the settings, where they count for nobody, most of all."""
        found = call("config", "check", "--kv-transfer-config", json.dumps(transfer))
        assert (2, True) == (found.code, found.is_tidy())
        assert told in found.err

    def test_a_missing_file_is_told_apart_from_wrong_settings(self, tmp_path):
        """X-09: what cannot be read is 3, and what cannot be used 2."""
        assert 3 == call("config", "check", "--file", tmp_path / "missing.yaml").code
        assert 2 == call("config", "check", "--kv-transfer-config", "{").code


class TestShow:
    def test_every_value_is_shown_with_its_source(self, file, monkeypatch):
        """C.5: that a file was ignored can be seen at a glance."""
        monkeypatch.setenv("UCM_QUEUE__WINDOW", "7")
        path = file("queue: {window: 5, tickets: 5}\n")
        told = call("config", "show", "--json", "--file", path).json()
        assert flat(UCMConfig()).keys() == told.keys()
        assert {"value": 7, "source": "the variable UCM_QUEUE__WINDOW"} == told[
            "queue.window"
        ]
        assert {"value": 5, "source": str(path)} == told["queue.tickets"]
        assert "default" == told["store.type"]["source"]
        lines = call("config", "show", "--file", path).out.splitlines()
        (line,) = [line for line in lines if "queue.span_bytes" in line]
        assert ["queue.span_bytes", "16777216", "default"] == line.split()

    def test_credentials_are_not_shown(self, file):
        """What is shown ends up in tickets and chats; nor does an error tell them."""
        tier = {
            "type": "object",
            "url": "redis://user:hidden@host:6379/0",
            "options": {"aws_secret_access_key": "hidden", "region": "eu"},
        }
        path = file(json.dumps({"tiers": [tier]}), "a.json")
        for options in (("--json",), ()):
            told = call("config", "show", "--file", path, *options)
            assert 0 == told.code
            assert "hidden" not in told.out
            assert "***@host" in "".join(told.out.split())
        path = file(json.dumps({"tiers": [{"url": tier["url"]}]}), "a.json")
        told = call("config", "show", "--file", path)
        assert 2 == told.code
        assert "hidden" not in told.err

    def test_nothing_in_a_value_is_taken_for_markup_or_for_a_terminal(self, file):
        """A file may be anybody's; its values stand there as they are."""
        path = file('store: {path: "[red]\\e[2J\\u202E[/nope]"}\n')
        told = call("config", "show", "--file", path)
        assert 0 == told.code
        assert "[red]" in told.out
        assert not {"\x1b", "\u202e"} & set(told.out)


def test_schema_is_printed_whole():
    """What is printed is the published schema."""
    assert schema() == call("config", "schema").json()


@pytest.mark.slow
@settings(deadline=None)
@given(
    data=st.binary(max_size=300)
    | st.text("{}[]&*!|>-?:,# \n\t'\"ab1\0", max_size=100).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        *("store", "queue", "path", "window", "kv_connector", ENGINE),
                        *("kv-transfer-config", "connectors", "ucm_connectors"),
                        *("ucm_connector_name", "ucm_connector_config", "x\x1b"),
                    ]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    name=st.sampled_from(["f.yaml", "f.toml", "f.json"]),
    verb=st.sampled_from(["check", "show"]),
)
def test_whatever_a_file_holds_there_is_an_answer_or_one_line(
    tmp_path_factory, data, name, verb
):
    """X-09: no file makes a traceback, a second line or another exit code."""
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    assert call("config", verb, "--file", path).is_tidy()


@settings(deadline=None)
@given(
    text=st.text(max_size=60)
    | st.sampled_from(["[]", "1", "null", '{"a": 1}', "[" * 900 + "]" * 900])
)
def test_whatever_the_engine_is_started_with_likewise(text):
    """X-09: the same of JSON on the command line."""
    assert call("config", "check", "--kv-transfer-config", text).is_tidy()
