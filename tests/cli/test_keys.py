# SPDX-License-Identifier: Apache-2.0
"""``ucm keys``: from a slab's own descriptions or from files."""

import json

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.call import call
from tests.doctor.test_keys import KEY, SPACE
from tests.stores.slab_kit import open_slab
from tests.stores.test_slab_directory import tree

OTHER = attrs.evolve(SPACE, kv_dtype="fp8/bfloat16/None", block_tokens=32)


@pytest.fixture
def slab(tmp_path):
    """Return the path of a slab that describes two key spaces."""
    with open_slab(tmp_path / "slab") as store:
        store.describe(SPACE)
        store.describe(OTHER)
    return tmp_path / "slab"


class TestExplain:
    def test_key_is_explained_by_the_slab_that_has_it(self, slab):
        """C.4: which hash identity this is: each part, and each field behind it."""
        told = call("keys", "explain", KEY.pack().hex(), "--store", slab)
        assert (0, "") == (told.code, told.err)
        assert SPACE.model in told.out
        answer = call("keys", "explain", "--json", KEY.pack().hex(), "--store", slab)
        assert attrs.asdict(SPACE) == answer.json()["keyspace"]
        assert 2 == answer.json()["shard_id"]

    def test_key_alone_says_its_parts(self):
        """No store is needed for that."""
        told = call("keys", "explain", "--json", KEY.pack().hex())
        assert 0 == told.code
        assert b"12345678".hex() == told.json()["block_hash"]

    def test_key_space_that_nobody_describes_is_not_well(self, slab):
        """The slab has forgotten it, or it is another one's."""
        key = attrs.evolve(KEY, keyspace_digest=bytes(16)).pack().hex()
        told = call("keys", "explain", key, "--store", slab)
        assert 1 == told.code
        assert "describes its key space" in told.out

    @pytest.mark.parametrize("key", ["xyz", "01", "é", "02" * 9999])
    def test_what_is_no_key_is_one_line(self, key):
        """A misread digit is the caller's."""
        told = call("keys", "explain", key)
        assert 2 == told.code
        assert told.is_tidy()


class TestDiff:
    def test_fields_that_differ_are_told(self, slab, tmp_path):
        """C.5: zero hits between two engines are one line with the setting's name; from
        a slab, from two files, or from both."""
        before = tree(tmp_path)
        first, second = SPACE.digest.hex(), OTHER.digest.hex()
        file = slab / "keyspaces" / f"{second}.json"
        for names in ((first[:6], second[:6]), (KEY.pack().hex(), file)):
            told = call("keys", "diff", "--json", *names, "--store", slab)
            assert 1 == told.code
            fields = {each["field"] for each in told.json()["differences"]}
            assert {"kv_dtype", "block_tokens"} == fields
        told = call("keys", "diff", first, second, "--store", slab)
        assert "--kv-cache-dtype" in " ".join(told.out.split())
        assert before == tree(tmp_path)

    def test_equal_ones_are_well(self, slab):
        """Then the reason lies elsewhere."""
        name = SPACE.digest.hex()
        told = call("keys", "diff", name, name, "--store", slab)
        assert 0 == told.code
        assert "equal" in told.out

    def test_what_is_not_known_is_the_callers_and_what_is_damaged_is_not(
        self, slab, tmp_path
    ):
        """The line lists what is known, or says how to name it; a file that cannot be read
        is 3."""
        name = SPACE.digest.hex()
        told = call("keys", "diff", "ffff", "eeee", "--store", slab)
        assert 2 == told.code
        assert SPACE.digest.hex()[:8] in told.err
        assert "4 digits" in call("keys", "diff", name[:3], name, "--store", slab).err
        assert "--store" in call("keys", "diff", name, name).err
        (tmp_path / "bad.json").write_text("{")
        for name in (tmp_path / "bad.json", tmp_path / "missing.json"):
            told = call("keys", "diff", name, name)
            assert 3 == told.code
            assert told.is_tidy()

    def test_store_that_is_none_is_one_line_and_untouched(self, slab, tmp_path):
        """R-24: foreign, missing and damaged directories alike."""
        (tmp_path / "theirs").mkdir(0o700)
        (tmp_path / "theirs" / "data").write_text("x")
        (slab / "keyspaces" / f"{SPACE.digest.hex()}.json").write_text("{")
        before = tree(tmp_path)
        for path in (tmp_path / "theirs", tmp_path / "missing", slab):
            told = call("keys", "diff", "ffff", "eeee", "--store", path)
            assert 3 == told.code
            assert told.is_tidy()
        assert before == tree(tmp_path)


@pytest.mark.slow
@settings(deadline=None)
@given(
    data=st.binary(max_size=80)
    | st.dictionaries(
        st.sampled_from([*attrs.fields_dict(type(SPACE)), "x"]),
        st.text(max_size=5) | st.integers() | st.just("{\x1b[31m"),
    ).map(lambda more: json.dumps({**attrs.asdict(SPACE), **more}).encode())
)
def test_whatever_a_file_holds_there_is_an_answer_or_one_line(tmp_path_factory, data):
    """No file makes a traceback or moves a terminal's cursor."""
    base = tmp_path_factory.getbasetemp()
    (base / "a.json").write_bytes(msgspec.json.encode(attrs.asdict(SPACE)))
    (base / "b.json").write_bytes(data)
    told = call("keys", "diff", base / "a.json", base / "b.json")
    assert told.is_tidy()
    assert "\x1b" not in told.out
