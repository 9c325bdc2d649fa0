# SPDX-License-Identifier: Apache-2.0
"""Files of settings: what is taken, and what a file of anybody's can not do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.configuration.files import MOST_BYTES, read_settings
from ucm.errors import ConfigFileError

ROOT = Path(__file__).parents[2]
WANTED = {"use_layerwise": True, "store": {"capacity": "1GiB", "retain_share": 0.5}}


def written(tmp_path, text, name="ucm.yaml"):
    """Return the path of a file with this text."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(path):
    """Return what is told of a file that is not taken."""
    with pytest.raises(ConfigFileError) as caught:
        read_settings(path)
    assert ("config_file", str(path)) == (caught.value.key, caught.value.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.yaml",
            "use_layerwise: true\nstore: {capacity: 1GiB, retain_share: 0.5}\n",
        ),
        (
            "a.YML",
            "use_layerwise: true\nstore:\n  capacity: 1GiB\n  retain_share: .5\n",
        ),
        (
            "a.toml",
            'use_layerwise = true\n[store]\ncapacity = "1GiB"\nretain_share = 0.5\n',
        ),
        (
            "a.json",
            '{"use_layerwise": true, "store": {"capacity": "1GiB", "retain_share": 0.5}}',
        ),
    ],
)
def test_each_kind_of_file_says_the_same(tmp_path, name, text):
    """The end of a file's name says how it is read, in any case."""
    assert WANTED == read_settings(written(tmp_path, text, name))


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_a_file_without_a_word_says_nothing(tmp_path, name):
    """Comments alone are a file whose settings were all taken out."""
    assert {} == read_settings(written(tmp_path, "# nothing\n", name))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("store: [", "not YAML"),
        ("a: 1\na: 2\n", "'a' comes twice"),
        ("store:\n  path: x\n  path: y\n", "'path' comes twice"),
        ("a: &x [1]\nb: *x\n", "anchor or alias 'x'"),
        ("a: !!python/object/apply:os.system [id]\n", "the tag"),
        ("a: !!int zero\n", "the tag"),
        ("? [1, 2]\n: 3\n", "a key is no text"),
        ("- store\n", "no mapping"),
        ("just a word\n", "no mapping"),
        ("a: 2001-99-99\n", "not YAML"),
        ("a: \x00\n", "not YAML"),
        ("a: \x1b[31m\n", "not YAML"),
        ("a: " + "[" * 700 + "]" * 700, "nested too deeply"),
        ("a: " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("a: " + "[" * 6000 + "{", "nested too deeply"),  # not read to its end
        ("- " * 6000 + "{", "nested too deeply"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        (b"a: \xff\n", "not UTF-8"),
    ],
)
def test_yaml_that_is_damaged_or_hostile_is_refused(tmp_path, text, problem):
    """X-09: bad YAML stops the start with the file's name; nothing in it is run, and no
    text becomes larger than it is."""
    assert problem in refused(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "store = ", "not TOML"),
        ("a.toml", "a = 1\na = 2\n", "not TOML"),
        ("a.toml", "a = " + "[" * 5000, "nested too deeply"),
        ("a.toml", "a = " + "1" * 5000, "not TOML"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"a": 1, "a": 2}', "'a' comes twice"),
        ("a.json", '{"a": ' + "[" * 30000 + "]" * 30000 + "}", "nested too deeply"),
        ("a.json", "7", "no mapping"),
        ("a.ini", "", "of no known kind"),
    ],
)
def test_other_files_that_are_damaged_are_refused(tmp_path, name, text, problem):
    """X-09: the same of TOML, JSON, and what is none of these."""
    assert problem in refused(written(tmp_path, text, name))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """X-09: a missing file stops the start instead of meaning the defaults."""
    assert "No such file" in refused(tmp_path / "missing.yaml")
    assert "null" in refused(Path("a\0.yaml"))


def test_what_is_no_plain_file_is_refused_at_once(tmp_path):
    """Nobody writes to this pipe, and who opened it for reading would wait for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a plain file" in refused(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in refused(tmp_path / "folder.yaml")


def test_a_file_without_end_is_refused_by_its_size(tmp_path):
    """No more is read than settings can be long."""
    line = b"# 34567890\n"
    text = line * (MOST_BYTES // len(line) + 1)
    assert f"larger than {MOST_BYTES}" in refused(written(tmp_path, text))
    assert {} == read_settings(written(tmp_path, text[:MOST_BYTES]))


@pytest.mark.slow
def test_without_pyyaml_the_remedy_names_it(tmp_path):
    """YAML is an extra; its absence names the command, and TOML goes on."""
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from pathlib import Path\n"
        "from ucm.configuration.files import read_settings\n"
        "print(read_settings(Path(sys.argv[1])))\n"
        "try: read_settings(Path(sys.argv[2]))\n"
        "except ValueError as exc: print(exc)\n"
    )
    files = [written(tmp_path, "a = 1\n", "a.toml"), written(tmp_path, "a: 1\n")]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "{'a': 1}" in done.stdout
    assert "pip install PyYAML" in done.stdout


@pytest.mark.slow
@settings(deadline=None)
@given(
    data=st.binary(max_size=400) | st.text("{}[]&*!|>-?:,# \n\t'\"ab1\0", max_size=200),
    name=st.sampled_from(["f.yaml", "f.toml", "f.json"]),
)
def test_whatever_a_file_holds_it_is_settings_or_refused(tmp_path_factory, data, name):
    """X-09: there is no third way for a file to end."""
    path = written(tmp_path_factory.getbasetemp(), data, name)
    told = ""
    try:
        assert isinstance(read_settings(path), dict)
    except ConfigFileError as exc:
        told = str(exc)
    assert not told or (name in told and "\n" not in told)
