# SPDX-License-Identifier: Apache-2.0
"""The header that travels with a block: exact bytes, and nothing else is taken."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ucm.backends.abc import Fetched, Verdict, block_checksum
from ucm.backends.envelope import GARBAGE, HEADER_BYTES, MAX_KEY_BYTES, Envelope

GOLDEN = {
    Envelope(b"k", 0, 0): (
        "55434d4201010000" + "00" * 16 + "6b" + "00" * 95 + "5a61e81a0445681a"
    ),
    Envelope(bytes(range(53)), 65536, 0x0123456789ABCDEF): (
        "55434d420135000000000000000100000123456789abcdef"
        + bytes(range(53)).hex()
        + "00" * 43
        + "531cd84cf8ac7df0"
    ),
}
KEY, DATA = b"key", b"some bytes"
SOUND = Envelope(KEY, len(DATA), 5).encode()


def opened(value, key=KEY, nbytes=10):
    """Return what became of a value, and what is in the target."""
    target = bytearray(b"\xee" * nbytes)
    return Envelope.open(value, key, memoryview(target)), bytes(target)


class TestHeader:
    @pytest.mark.parametrize(("envelope", "text"), GOLDEN.items())
    def test_bytes_stay_what_they_are(self, envelope, text):
        """Golden vectors: another release reads what this one wrote."""
        assert text == envelope.encode().hex()
        assert envelope == Envelope.decode(bytes.fromhex(text))

    @given(
        st.binary(min_size=1, max_size=MAX_KEY_BYTES),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
    )
    def test_round_trip(self, key, nbytes, checksum):
        """What is written is read, whatever the key's bytes are."""
        envelope = Envelope(key, nbytes, checksum)
        assert envelope == Envelope.decode(envelope.encode())

    @pytest.mark.parametrize("key", [b"", b"k" * (MAX_KEY_BYTES + 1)])
    def test_key_that_has_no_room_is_refused(self, key):
        """A key is never cut."""
        with pytest.raises(ValueError, match="key of"):
            Envelope(key, 1, 1).encode()

    @given(st.binary(max_size=2 * HEADER_BYTES))
    def test_garbage_is_told(self, data):
        """No bytes but a header's are taken, and none raise."""
        assert Envelope.decode(data) is None

    @pytest.mark.parametrize("at", range(HEADER_BYTES))
    def test_each_byte_counts(self, at):
        """A header with any byte changed is garbage."""
        changed = bytearray(SOUND)
        changed[at] ^= 0x40
        assert Envelope.decode(bytes(changed)) is None

    @pytest.mark.parametrize(
        "fields",
        [
            (b"UCMX", 1, 3, 0, 1, 1, b"key"),
            (b"UCMB", 2, 3, 0, 1, 1, b"key"),
            (b"UCMB", 1, 3, 1, 1, 1, b"key"),
            (b"UCMB", 1, 0, 0, 1, 1, b""),
            (b"UCMB", 1, 97, 0, 1, 1, b"k" * 96),
            (b"UCMB", 1, 3, 0, 1, 1, b"keyx"),
        ],
        ids=["magic", "version", "reserved", "no key", "long key", "behind the key"],
    )
    def test_well_summed_but_wrong_header_is_garbage(self, fields):
        """Each field is looked at, not only the sum over all."""
        head = struct.pack(">4sBBHQQ96s", *fields)
        header = head + struct.pack(">Q", xxh3_64_intdigest(head))
        assert Envelope.decode(header) is None


class TestValue:
    def test_sound_value_is_opened(self):
        """Its bytes are in the target, and its checksum is told as it was put."""
        assert (Fetched(Verdict.DONE, 5), DATA) == opened(SOUND + DATA)
        assert (Fetched(Verdict.DONE, 5), DATA) == opened(memoryview(SOUND + DATA))

    @pytest.mark.parametrize(
        ("value", "key", "nbytes"),
        [
            (SOUND + DATA, b"kez", len(DATA)),
            (SOUND + DATA, KEY, len(DATA) - 1),
            (SOUND + DATA, KEY, len(DATA) + 1),
            (SOUND + DATA[:-1], KEY, len(DATA) - 1),
            (SOUND + DATA + b"x", KEY, len(DATA) + 1),
            (SOUND + DATA + b"x", KEY, len(DATA)),
            (SOUND[:-1], KEY, len(DATA)),
            (b"", KEY, 0),
            (DATA, KEY, len(DATA)),
        ],
    )
    def test_other_value_leaves_the_target_alone(self, value, key, nbytes):
        """Another key's, cut, too long or foreign: garbage, and nothing is copied."""
        assert (GARBAGE, b"\xee" * nbytes) == opened(value, key, nbytes)

    def test_checksum_is_bound_to_the_key(self):
        """Equal bytes under another key have another checksum; golden."""
        assert 0x107C08B23B1FA1C9 == block_checksum(KEY, DATA)
        assert block_checksum(KEY, DATA) != block_checksum(b"kez", DATA)
        assert block_checksum(KEY, DATA) == block_checksum(KEY, memoryview(DATA))
