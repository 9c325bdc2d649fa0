# SPDX-License-Identifier: Apache-2.0
"""Keys of prompts, key spaces and layouts of hosts."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucm
from ucm.errors import KeyFormatError, LayoutError

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "prefixes.json").read_text(encoding="utf-8")
)
LAYOUT = ucm.paged_layout({"a": 64, "b": 64}, block_tokens=4)
TOLD = {
    "model": "m",
    "weights": "w",
    "kv_dtype": "bfloat16",
    "engine": "host",
    "parallel": "tp=1",
    "settings": {"rope": 1.0},
}
KEYSPACE = ucm.keyspace_of(LAYOUT, **TOLD)
DEEP: list[object] = functools.reduce(lambda inner, _: [inner], range(100_000), [])
HASHER = ucm.PrefixHasher(KEYSPACE, 4)
tokens = st.lists(st.integers(0, 2**63 - 1), max_size=40)


class TestPrefixHasher:
    @pytest.mark.parametrize("prompt", GOLDEN["prompts"], ids=itertools.count())
    def test_keys_are_the_same_for_ever(self, prompt: dict) -> None:
        """What was stored by any release is found by this one."""
        hasher = ucm.PrefixHasher(ucm.KeySpace(**GOLDEN["keyspace"]), 16)
        keys = hasher.keys(prompt["tokens"], salt=prompt["salt"].encode())
        assert prompt["keys"] == [key.hex() for key in keys]

    @given(tokens, st.integers(0, 10))
    def test_prompt_can_be_hashed_in_parts(self, given: list[int], blocks: int) -> None:
        """Who decodes need not hash the whole prompt again for each block."""
        whole = HASHER.keys(given, salt=b"s")
        at = min(blocks, len(whole))
        if at:
            rest = HASHER.keys(given[at * 4 :], after=whole[at - 1])
            assert whole[at:] == rest

    @given(tokens, tokens)
    def test_equal_keys_mean_equal_prefixes(
        self, one: list[int], two: list[int]
    ) -> None:
        """As many keys are shared as whole blocks, and not one more."""
        pairs = zip(HASHER.keys(one), HASHER.keys(two), strict=False)
        shared = sum(mine == theirs for mine, theirs in pairs)
        same = (mine == theirs for mine, theirs in zip(one, two, strict=False))
        assert sum(itertools.takewhile(bool, same)) // 4 == shared

    def test_salt_and_each_field_of_the_key_space_change_every_key(self) -> None:
        """Neither a tenant nor a model ever finds what is another one's."""
        prompt = range(16)
        others = [
            ucm.keyspace_of(LAYOUT, **{**TOLD, name: "other"})
            for name in TOLD
            if name != "settings"
        ]
        others.append(ucm.keyspace_of(LAYOUT, **{**TOLD, "settings": {"rope": 2.0}}))
        wider = ucm.paged_layout({"a": 64, "b": 128}, block_tokens=4)
        others.append(ucm.keyspace_of(wider, **TOLD))
        found = [HASHER.keys(prompt), HASHER.keys(prompt, salt=b"t")]
        found += [ucm.PrefixHasher(other, 4).keys(prompt) for other in others]
        every = [key for keys in found for key in keys]
        assert len(every) == len(set(every))

    def test_tokens_may_be_any_integers(self) -> None:
        """A list, an array of numpy or a generator say the same."""
        want = HASHER.keys([1, 2, 3, 4])
        assert want == HASHER.keys(np.array([1, 2, 3, 4], np.int32))
        assert want == HASHER.keys(each for each in (1, 2, 3, 4))

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_bytes_are_a_token_each(self, kind: Callable[[bytes], Any]) -> None:
        """A model of bytes has them: eight of them are no token of 64 bits."""
        assert HASHER.keys(range(16)) == HASHER.keys(kind(bytes(range(16))))
        assert 3 == len(HASHER.keys(kind(b"not in eights")))

    @pytest.mark.parametrize(
        ("given", "options"),
        [
            ([1, 2, 3, -1], {}),
            ([1, 2, 3, 2**63], {}),
            ([1, 2, 3, 0.5], {}),
            (["a"] * 4, {}),
            ([1, 2, 3, 4], {"after": b"short"}),
            ([1, 2, 3, 4], {"after": bytes(32), "salt": b"s"}),
            ([1, 2, 3, 4], {"after": "a" * 32}),
            ([1, 2, 3, 4], {"salt": "tenant"}),
            ([1, 2, 3, 4], {"salt": None}),
        ],
    )
    def test_what_is_no_prompt_is_refused(self, given: list, options: dict) -> None:
        """A wrong key is a hit on foreign blocks, or a miss for ever."""
        with pytest.raises(KeyFormatError):
            HASHER.keys(given, **options)

    def test_key_space_of_other_keys_is_refused(self) -> None:
        """Keys of an engine and keys of a host do not mix in one key space."""
        foreign = ucm.KeySpace(**{**GOLDEN["keyspace"], "hash_algorithm": "sha256"})
        with pytest.raises(KeyFormatError, match="sha256"):
            ucm.PrefixHasher(foreign, 16)
        with pytest.raises(KeyFormatError, match="block_tokens=8"):
            ucm.PrefixHasher(KEYSPACE, 8)
        with pytest.raises(KeyFormatError, match="keyspace is KVLayout"):
            ucm.PrefixHasher(LAYOUT, 16)  # type: ignore[arg-type]


def test_tenant_of_a_salt_is_the_same_for_ever() -> None:
    """R-41: engines, hosts and releases that share a slab count a tenant's blocks for one number; no salt is nobody."""
    assert (0xCA978112, 0) == (ucm.tenant_of(b"a"), ucm.tenant_of(b""))


@pytest.mark.parametrize("salt", ["tenant", "", None])
def test_tenant_of_a_text_is_refused(salt: Any) -> None:
    """As by the hasher: an empty text would be nobody's without a word."""
    with pytest.raises(KeyFormatError, match="salt is"):
        ucm.tenant_of(salt)


class TestKeySpace:
    def test_layout_and_settings_are_part_of_it(self) -> None:
        """The host says the rest; nothing that decides bytes has a default."""
        assert LAYOUT.fingerprint() == KEYSPACE.layout
        assert (4, '{"rope": 1.0}') == (KEYSPACE.block_tokens, KEYSPACE.settings)

    @pytest.mark.parametrize("field", ["model", "weights", "kv_dtype", "engine"])
    def test_empty_field_is_refused(self, field: str) -> None:
        """What is not known is not equal."""
        with pytest.raises(KeyFormatError, match=field):
            ucm.keyspace_of(LAYOUT, **{**TOLD, field: ""})

    def test_text_that_no_file_takes_is_refused(self) -> None:
        """Half a character was found when the first key was made, by a bare error."""
        with pytest.raises(KeyFormatError, match="model"):
            ucm.keyspace_of(LAYOUT, **{**TOLD, "model": "m\ud800"})

    @pytest.mark.parametrize("value", [object(), float("nan"), {1j}, DEEP])
    def test_settings_that_are_no_json_are_refused(self, value: object) -> None:
        """Their text might differ from process to process."""
        with pytest.raises(KeyFormatError, match="settings"):
            ucm.keyspace_of(LAYOUT, **{**TOLD, "settings": {"x": value}})


class TestPagedLayout:
    def test_a_row_is_made_for_each_layer(self) -> None:
        """In the order of the mapping, which is that of execution."""
        assert ("a", "b") == LAYOUT.layers
        assert 128 == LAYOUT.max_block_bytes

    def test_numbers_of_numpy_are_numbers(self) -> None:
        """A product of a shape is one; half a byte is none."""
        small = np.int8(64)
        layout = ucm.paged_layout({"a": small, "b": small}, block_tokens=np.int8(4))
        assert LAYOUT.fingerprint() == layout.fingerprint()
        wide = ucm.paged_layout({"a": 64}, block_tokens=16)
        keyspace = ucm.keyspace_of(wide, **TOLD)
        keys = ucm.PrefixHasher(keyspace, np.int8(16)).keys(range(32))
        assert ucm.PrefixHasher(keyspace, 16).keys(range(32)) == keys
        with pytest.raises(LayoutError, match=r"layer 'a' has 64\.5 for the bytes"):
            ucm.paged_layout({"a": 64.5}, block_tokens=4)

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"a": 0}, "layer 'a' has 0 for"),
            ({"a": "64"}, "layer 'a' has '64' for"),
            ({"a": np.zeros(4)}, "layer 'a' has ndarray for"),
            (["a"], "page_bytes is list: give"),
        ],
    )
    def test_what_is_no_number_of_bytes_is_named(self, given: Any, told: str) -> None:
        """The array itself for its bytes is the mistake that is made first."""
        with pytest.raises(LayoutError, match=told):
            ucm.paged_layout(given, block_tokens=4)

    def test_no_layer_is_refused(self) -> None:
        """There is nothing to store."""
        with pytest.raises(LayoutError):
            ucm.paged_layout({}, block_tokens=4)
