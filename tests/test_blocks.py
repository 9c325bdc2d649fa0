# SPDX-License-Identifier: Apache-2.0
"""Keys: canonical bytes that are the same in every process that may share blocks."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import attr
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.blocks import (
    KEY_SCHEMA_VERSION,
    BlockHash,
    BlockId,
    BlockKey,
    BlockSpan,
    GroupId,
    KeyPacker,
    KeySpace,
    PackedKey,
    ShardId,
    keyspace_prefix,
)
from ucm.errors import KeyFormatError

GOLDEN = Path(__file__).parent / "golden"
SPACE = KeySpace(
    model="model",
    weights="revision",
    kv_dtype="bfloat16",
    layout="fingerprint",
    block_tokens=16,
    parallel="tp=1,pp=1",
    hash_algorithm="sha256",
    engine="vllm/cpu/vec",
)
_RUN = """
import runpy, sys
*sys.path[:0], golden = sys.argv[1:]
runpy.run_path(golden + "/make_keys.py", run_name="__main__")
"""
KEY = BlockKey(SPACE.digest, GroupId(1), ShardId(2), BlockHash(bytes(range(32))))

keys = st.builds(
    BlockKey,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 0xFFFF).map(GroupId),
    st.integers(0, 0xFFFF).map(ShardId),
    st.binary(min_size=8, max_size=64).map(BlockHash),
)


def find_python(minor: int) -> str | None:
    """Return a Python 3.*minor* that runs, from the path or from pyenv."""
    name = f"python3.{minor}"
    versions = Path.home() / ".pyenv" / "versions"
    found = [shutil.which(name), *sorted(versions.glob(f"3.{minor}.*/bin/{name}"))]
    for path in filter(None, found):
        # A shim is found but does not run where its version is not chosen.
        probe = subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if not probe.returncode:
            return str(path)
    return None


def make_keys(python: str, hash_seed: int, imports: list[Path]) -> bytes:
    """Return the golden vectors as another process makes them."""
    return subprocess.run(
        [python, "-B", "-c", _RUN, *map(str, imports), str(GOLDEN)],
        env={"PYTHONHASHSEED": str(hash_seed), "PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
    ).stdout


class TestGoldenVectors:
    """The bytes that are checked in are the bytes that every process makes."""

    def test_keyspaces_still_have_their_bytes(self) -> None:
        """X-08: each checked-in key space encodes to the bytes beside it."""
        vectors = json.loads((GOLDEN / "keys.json").read_text())["keyspaces"]
        assert vectors
        for vector in vectors:
            keyspace = KeySpace(**vector["fields"])
            assert vector["encoded"] == keyspace.encode().hex()
            assert vector["digest"] == keyspace.digest.hex()

    def test_keys_still_have_their_bytes(self) -> None:
        """X-08: each checked-in key packs to, and unpacks from, the bytes beside it."""
        vectors = json.loads((GOLDEN / "keys.json").read_text())["keys"]
        assert vectors
        for vector in vectors:
            key = BlockKey(
                bytes.fromhex(vector["keyspace_digest"]),
                GroupId(vector["group_id"]),
                ShardId(vector["shard_id"]),
                BlockHash(bytes.fromhex(vector["block_hash"])),
            )
            assert vector["packed"] == key.pack().hex()
            assert key == BlockKey.unpack(bytes.fromhex(vector["packed"]))

    def test_a_key_is_the_documented_struct(self) -> None:
        """The packed form is what the module's text says, byte by byte."""
        packed = KEY.pack()
        assert KEY_SCHEMA_VERSION == packed[0]
        assert SPACE.digest == packed[1:17]
        assert (1, 2) == struct.unpack(">HH", packed[17:21])
        assert bytes(range(32)) == packed[21:]

    @pytest.mark.slow
    @pytest.mark.parametrize("minor", sorted({sys.version_info.minor, 11, 12, 13}))
    def test_every_python_and_hash_seed_makes_the_same_bytes(
        self, minor: int, tmp_path: Path
    ) -> None:
        """X-08: another Python version with another hash seed makes equal vectors."""
        is_own = minor == sys.version_info.minor
        python = sys.executable if is_own else find_python(minor)
        if python is None:
            pytest.skip(f"no Python 3.{minor} at hand")
        for package in (attr, attrs):
            assert package.__file__
            source = Path(package.__file__).parent
            shutil.copytree(source, tmp_path / source.name)
        expected = (GOLDEN / "keys.json").read_bytes()
        for hash_seed in (0, 4711):
            root = Path(__file__).parents[1]
            assert expected == make_keys(python, hash_seed, [tmp_path, root])


class TestKeySpace:
    """All that must be equal for bytes to be interchangeable."""

    @pytest.mark.parametrize("field", attrs.fields_dict(KeySpace))
    def test_each_field_changes_the_digest(self, field: str) -> None:
        """X-08: key spaces that differ in one field only have different digests."""
        value = 32 if field == "block_tokens" else "another"
        assert SPACE.digest != attrs.evolve(SPACE, **{field: value}).digest

    def test_text_moved_between_fields_changes_the_bytes(self) -> None:
        """Lengths are part of the encoding, so neighbours cannot trade characters."""
        one = attrs.evolve(SPACE, kv_dtype="ab", layout="c")
        other = attrs.evolve(SPACE, kv_dtype="a", layout="bc")
        assert one.encode() != other.encode()

    def test_the_digest_is_the_start_of_every_packed_key(self) -> None:
        """Schema version and digest are the prefix by which a key space is cleared."""
        assert KEY.pack().startswith(keyspace_prefix(SPACE.digest))
        assert 17 == len(keyspace_prefix(SPACE.digest))

    def test_diff_names_the_fields_that_differ(self) -> None:
        """Each differing field comes with both values, mine first; others do not."""
        other = attrs.evolve(SPACE, weights="another", block_tokens=32)
        assert {
            "weights": ("revision", "another"),
            "block_tokens": (16, 32),
        } == SPACE.diff(other)
        assert {} == SPACE.diff(attrs.evolve(SPACE))

    @pytest.mark.parametrize(
        "field", [name for name in attrs.fields_dict(KeySpace) if "tokens" not in name]
    )
    @pytest.mark.parametrize("value", ["", None, 7])
    def test_a_field_that_is_no_text_is_refused(
        self, field: str, value: object
    ) -> None:
        """An empty or untyped field would make unlike key spaces equal."""
        with pytest.raises(KeyFormatError, match=field):
            attrs.evolve(SPACE, **{field: value})

    @pytest.mark.parametrize("value", [0, -16])
    def test_block_tokens_below_one_is_refused(self, value: int) -> None:
        """A block hash covers at least one token."""
        with pytest.raises(ValueError, match="block_tokens"):
            attrs.evolve(SPACE, block_tokens=value)


class TestBlockKey:
    """One stored part of one block."""

    @given(keys)
    def test_unpack_gives_back_what_was_packed(self, key: BlockKey) -> None:
        """Every key survives its canonical bytes."""
        assert key == BlockKey.unpack(key.pack())

    @given(keys, keys)
    def test_keys_are_equal_exactly_if_their_bytes_are(
        self, one: BlockKey, other: BlockKey
    ) -> None:
        """No two keys share bytes, and equal keys never differ in them."""
        assert (one == other) == (one.pack() == other.pack())

    @given(st.binary(max_size=90))
    def test_any_bytes_are_a_key_or_refused(self, data: bytes) -> None:
        """Unpacking foreign bytes raises our error, or the key packs to these bytes."""
        try:
            key = BlockKey.unpack(data)
        except KeyFormatError:
            return
        assert data == key.pack()

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"keyspace_digest": bytes(15)}, "digest has 15 bytes"),
            ({"keyspace_digest": bytes(17)}, "digest has 17 bytes"),
            ({"group_id": -1}, "group -1"),
            ({"group_id": 65536}, "group 65536"),
            ({"shard_id": -1}, "shard -1"),
            ({"shard_id": 65536}, "shard 65536"),
            ({"block_hash": bytes(7)}, "hash has 7 bytes"),
            ({"block_hash": bytes(65)}, "hash has 65 bytes"),
            ({"version": KEY_SCHEMA_VERSION + 1}, "schema version 3"),
        ],
    )
    def test_a_field_out_of_range_is_refused(
        self, change: dict[str, object], problem: str
    ) -> None:
        """A key that could not be packed cannot be made."""
        with pytest.raises(KeyFormatError, match=problem):
            attrs.evolve(KEY, **change)

    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            (b"", "0 bytes are too few"),
            (KEY.pack()[:20], "20 bytes are too few"),
            (KEY.pack()[:28], "hash has 7 bytes"),
            (KEY.pack() + bytes(33), "hash has 65 bytes"),
            (b"\x03" + KEY.pack()[1:], "schema version 3 is not 2"),
        ],
    )
    def test_malformed_bytes_are_refused(self, data: bytes, problem: str) -> None:
        """Short, long and foreign bytes are told apart in the message."""
        with pytest.raises(KeyFormatError, match=problem):
            BlockKey.unpack(data)

    def test_explain_tells_every_part(self) -> None:
        """Each part of a key is told in a form that people can compare."""
        assert {
            "version": KEY_SCHEMA_VERSION,
            "keyspace_digest": SPACE.digest.hex(),
            "group_id": 1,
            "shard_id": 2,
            "block_hash": bytes(range(32)).hex(),
        } == KEY.explain()

    def test_explain_lists_the_keyspace_only_if_it_is_the_keys_own(self) -> None:
        """A key space is listed where its digest matches, and denied otherwise."""
        own, foreign = KEY.explain(SPACE), KEY.explain(attrs.evolve(SPACE, model="b"))
        assert (True, attrs.asdict(SPACE)) == (
            own["keyspace_matches"],
            own["keyspace"],
        )
        assert foreign["keyspace_matches"] is False
        assert "keyspace" not in foreign


class TestKeyPacker:
    """The fast path of lookups."""

    @given(keys, st.lists(st.binary(min_size=8, max_size=64)))
    def test_packs_what_block_keys_pack(
        self, key: BlockKey, hashes: list[bytes]
    ) -> None:
        """For each hash, in order, the packer gives the bytes of ``BlockKey.pack``."""
        packer = KeyPacker(key.keyspace_digest, key.group_id, key.shard_id)
        expected = [
            attrs.evolve(key, block_hash=BlockHash(one)).pack() for one in hashes
        ]
        assert expected == packer.pack(hashes)

    def test_a_prefix_out_of_range_is_refused(self) -> None:
        """A packer of a malformed prefix cannot be made."""
        with pytest.raises(KeyFormatError, match="group 65536"):
            KeyPacker(SPACE.digest, GroupId(65536), ShardId(0))


class TestBlockSpan:
    """What travels through a pipeline."""

    def test_a_span_is_as_long_as_its_blocks(self) -> None:
        """The length of a span counts blocks."""
        packed = PackedKey(KEY.pack())
        span = BlockSpan(GroupId(0), (BlockId(4), BlockId(5)), (packed, packed))
        assert 2 == len(span)

    @pytest.mark.parametrize(("blocks", "num_keys"), [((), 0), ((1,), 0), ((1,), 2)])
    def test_a_span_without_one_key_per_block_is_refused(
        self, blocks: tuple[BlockId, ...], num_keys: int
    ) -> None:
        """A span has at least one block and exactly one key for each."""
        with pytest.raises(KeyFormatError, match=f"{len(blocks)} blocks"):
            BlockSpan(GroupId(0), blocks, (KEY.pack(),) * num_keys)
