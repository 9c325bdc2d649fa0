# SPDX-License-Identifier: Apache-2.0
"""Keys and key spaces for people."""

import attrs
import pytest

from ucm.blocks import BlockKey, KeySpace
from ucm.doctor.keys import (
    MEANINGS,
    differences,
    parse_key,
    parse_keyspace,
    pick,
)
from ucm.errors import KeyFormatError
from ucm.testing.store_blocks import make_keyspace

SPACE = attrs.evolve(
    make_keyspace(),
    parallel="shards=2,pp=1",
    settings='{"a":1,"rope":{"factor":2}}',
    hash_algorithm="sha256/",
)
KEY = BlockKey(SPACE.digest, 1, 2, b"12345678")


class TestDifferences:
    def test_every_field_has_its_meaning(self):
        """C.5: whichever field differs, it is said what it comes from."""
        assert attrs.fields_dict(KeySpace).keys() == MEANINGS.keys()

    @pytest.mark.parametrize("field", attrs.fields_dict(KeySpace))
    def test_field_that_differs_is_named_with_both_values(self, field):
        """C.5: which identity made this a miss."""
        value = 7 if field == "block_tokens" else "other"
        (found,) = differences(SPACE, attrs.evolve(SPACE, **{field: value}))
        assert (field, str(value), MEANINGS[field]) == (
            found.field,
            found.second,
            found.meaning,
        )
        assert str(getattr(SPACE, field)) == found.first

    def test_equal_key_spaces_do_not_differ(self):
        """A restart with nothing changed is equal."""
        assert [] == differences(SPACE, attrs.evolve(SPACE))

    def test_settings_and_ranks_are_compared_one_by_one(self):
        """Of a long text only what differs is shown."""
        other = attrs.evolve(
            SPACE,
            parallel="shards=2,pp=4",
            settings='{"rope":{"factor":4},"b":"x","a":1}',
        )
        assert [
            ("parallel.pp", "1", "4"),
            ("settings.b", "(not set)", "x"),
            ("settings.rope", '{"factor": 2}', '{"factor": 4}'),
        ] == [
            (each.field, each.first, each.second) for each in differences(SPACE, other)
        ]


class TestParsing:
    def test_key_is_read_as_it_is_written(self):
        """With or without 0x, in any case."""
        digits = KEY.pack().hex()
        for text in (digits, f"0x{digits}", digits.upper(), f" {digits}\n"):
            assert KEY == parse_key(text)

    @pytest.mark.parametrize("text", ["", "zz", "00", "01" * 30, "02" * 5000, "é" * 60])
    def test_what_is_no_key_is_refused(self, text):
        """Short, long, of another schema, or no digits."""
        with pytest.raises(KeyFormatError):
            parse_key(text)

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", "[" * 9999, '{"model": 1}', "\0", '{"\udcff": 1}']
    )
    def test_what_is_no_key_space_is_refused(self, text):
        """Fields that are missing or of another type; what a shell gave is perhaps no text."""
        with pytest.raises(KeyFormatError):
            parse_keyspace(text)

    def test_key_space_is_picked_by_digest_or_key(self):
        """The beginning of a digest will do, if it is only one's."""
        other = attrs.evolve(SPACE, model="other")
        known = {each.digest: each for each in (SPACE, other)}
        digest = SPACE.digest.hex()
        for name in (digest, digest[:4], digest[:6].upper(), KEY.pack().hex()):
            assert SPACE == pick(name, known)
        for name in ("", digest[:3], "ffff", f"{digest}0"):
            assert pick(name, known) is None
        twin = {b"\x12\x34" + bytes(14): SPACE, b"\x12\x34" + bytes(13) + b"1": other}
        assert pick("1234", twin) is None
