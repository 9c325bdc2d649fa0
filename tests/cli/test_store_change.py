# SPDX-License-Identifier: Apache-2.0
"""``ucm store rm`` and ``compact`` take what they were told, and nothing else."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.store_kit import CHAT, CODE, TOKENS, ask, keys_of, snapshot, tell
from tests.stores.slab_kit import die, open_slab
from ucm.blocks import GroupId, KeyPacker, ShardId
from ucm.cli.main import NOT_WELL, UNREADABLE, USAGE
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.stores.slab import SlabStore, SlabSurvey, compact, facts_of
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save


def left(path: Path) -> list[bool]:
    """Return which of the five blocks are stored."""
    with open_slab(path) as store:
        return store.contains(keys_of(CHAT, TOKENS) + keys_of(CODE, TOKENS[:8]))


class TestRm:
    def test_key_space_goes_and_the_other_stays(self, path):
        """What a model left behind goes by its key space alone."""
        chosen = ("--keyspace", CHAT.digest.hex()[:12], "--yes")
        assert 3 == ask("store", "rm", path, *chosen)["forgotten"]
        assert [False] * 3 + [True] * 2 == left(path)

    def test_keys_and_prefixes_choose(self, path):
        """One block by its key, several by how their keys begin."""
        first, second, _ = keys_of(CHAT, TOKENS)
        keys = ("--key", first.hex(), "--key", second.hex(), "--yes")
        assert 2 == ask("store", "rm", path, *keys)["forgotten"]
        begins = KeyPacker(CODE.digest, GroupId(0), ShardId(0)).prefix.hex()
        assert 2 == ask("store", "rm", path, "--prefix", begins, "--yes")["forgotten"]
        assert [False, False, True, False, False] == left(path)

    def test_conditions_of_several_kinds_must_all_be_true(self, path):
        """A key of one model is not removed with the key space of another."""
        key = keys_of(CHAT, TOKENS)[0].hex()
        chosen = ("--key", key, "--keyspace", CODE.digest.hex(), "--yes")
        assert 0 == ask("store", "rm", path, *chosen)["matched"]
        assert [True] * 5 == left(path)

    def test_salt_is_the_bytes_that_were_given(self, path, tmp_path):
        """One that is no text names its blocks as any other, and ends nothing."""
        salt, prompt = b"\xff\xfe", tmp_path / "ids.json"
        with open_slab(path) as store:
            save(store, keys_of(CHAT, TOKENS[:4], salt))
        prompt.write_text(json.dumps(TOKENS[:5]))
        chosen = ("--keyspace", CHAT.digest.hex(), "--prompt", prompt, "--yes")
        words = (*chosen, "--salt", os.fsdecode(salt))
        assert 1 == ask("store", "rm", path, *words)["forgotten"]
        assert [True] * 5 == left(path)

    def test_prompt_goes_on_all_ranks(self, path, tmp_path):
        """All parts of a prompt's blocks go; its salt keeps those of others."""
        others = keys_of(CHAT, TOKENS[:4], b"tenant")
        with open_slab(path) as store:
            save(store, keys_of(CHAT, TOKENS[:4], shard=1) + others)
        prompt = tmp_path / "ids.json"
        prompt.write_text(json.dumps(TOKENS[:5]))
        chosen = ("--keyspace", CHAT.digest.hex(), "--prompt", prompt, "--yes")
        assert 2 == ask("store", "rm", path, *chosen)["forgotten"]
        with open_slab(path) as store:
            assert [True] == store.contains(others)

    def test_nothing_goes_in_a_dry_run(self, path):
        """What would go is told, and every byte stays."""
        before = snapshot(path)
        answer = ask("store", "rm", path, "--all", "--dry-run")
        assert (5, 5 * BLOCK_BYTES, 0) == (
            answer["matched"],
            answer["nbytes"],
            answer["forgotten"],
        )
        assert before == snapshot(path)

    def test_nothing_goes_without_a_yes(self, path, monkeypatch):
        """It asks, and says how a program does without; silence is a no."""
        with open(os.devnull) as silence:
            monkeypatch.setattr("sys.stdin", silence)
            code, _, complaint = tell("store", "rm", path, "--all")
        assert NOT_WELL == code
        assert "Forget 5 blocks, 480 B? (--yes does not ask)" in complaint
        assert [True] * 5 == left(path)

    @pytest.mark.parametrize(
        "words",
        [
            (),
            ("--all", "--prefix", "02"),
            ("--salt", "x"),
            ("--salt", ""),
            ("--keyspace", "", "--prefix", "02"),  # of a variable that is not set
            ("--keyspace", "", "--all"),
        ],
    )
    def test_unclear_call_changes_nothing(self, path, words):
        """Who does not say which blocks, or contradicts himself, removes none."""
        assert USAGE == tell("store", "rm", path, *words, "--yes")[0]
        assert [True] * 5 == left(path)

    def test_engine_that_has_it_open_finds_it_gone_at_once(self, path):
        """Blocks go from under a running engine as by eviction: it computes them."""
        with open_slab(path) as store:
            assert 1 == store.match(keys_of(CHAT, TOKENS)[:1])
            ask("store", "rm", path, "--all", "--yes")
            assert 0 == store.match(keys_of(CHAT, TOKENS))
            save(store, make_keys(3))
            assert list(map(payload, make_keys(3))) == load(store, make_keys(3))
            assert [] == store.audit()

    @pytest.mark.parametrize(
        "text", [b"", b"[1, 2", b'{"a": 1}', b"[1.5]", b"[-1]", b"\xff\0", b"[" * 5000]
    )
    def test_prompt_that_is_none_is_one_line(self, path, tmp_path, text):
        """A file that has no token ids removes nothing."""
        prompt = tmp_path / "ids"
        prompt.write_bytes(text)
        chosen = ("--keyspace", CHAT.digest.hex(), "--prompt", prompt, "--yes")
        code, _, complaint = tell("store", "rm", path, *chosen)
        assert (UNREADABLE, 1) == (code, complaint.count("\n"))
        assert [True] * 5 == left(path)


class TestCompact:
    def test_slots_of_the_dead_and_empty_extents_come_back(self, path):
        """What nobody needs is anybody's again, and all blocks stay."""
        store = open_slab(path)
        store.reserve(make_keys(2), BLOCK_BYTES)
        die(store)
        answer = ask("store", "compact", path)
        assert (2, True) == (answer["slots"], answer["extents"] > 0)
        with SlabSurvey(path) as survey:
            facts = facts_of(survey)
        assert (0, answer["extents"]) == (
            facts.classes[0].reserved_slots,
            facts.unowned_extents,
        )
        assert [True] * 5 == left(path)
        assert (0, 0) == (
            compact(path, memory=False).slots,
            compact(path, memory=False).extents,
        )

    def test_engine_goes_on_behind_it(self, path):
        """A live engine takes the extents again when it needs them."""
        with open_slab(path) as store:
            ask("store", "compact", path)
            keys = make_keys(3, first=50)
            assert 3 == save(store, keys)
            assert list(map(payload, keys)) == load(store, keys)
            assert [] == store.audit()

    def test_extent_that_is_written_to_or_has_a_block_stays(self, path):
        """Neither a block nor a lease loses its slot."""
        with (
            open_slab(path) as store,
            store.reserve(make_keys(3), BLOCK_BYTES) as lease,
        ):
            assert 0 == compact(path, memory=False).extents
            for at in range(3):
                lease.slots.block(at)[:] = 1
            lease.seal(0, 3)
            assert 3 == lease.commit()

    def test_memory_goes_back_only_while_nobody_uses_it(self, memory_path):
        """A device may have pinned it: then it stays, and command and code say so."""
        with open_slab(memory_path, 64) as store:
            save(store, make_keys(1))
            again = ("store", "compact", memory_path, "--memory")
            live = ask(*again, code=NOT_WELL)
            assert 0 == live["nbytes"]
            assert NOT_WELL == tell(*again)[0]
            assert "" == ask("store", "compact", memory_path)["kept_because"]
            assert "pinned" in live["kept_because"]
        idle = ask("store", "compact", memory_path, "--memory")
        assert 0 < idle["nbytes"]
        with SlabSurvey(memory_path) as survey:
            facts = facts_of(survey)
        assert facts.data_bytes - idle["nbytes"] == facts.populated_bytes
        with open_slab(memory_path, 64) as store:
            assert list(map(payload, make_keys(1))) == load(store, make_keys(1))
            assert 64 == save(store, make_keys(64, first=100))


class TestJoin:
    def test_slab_that_is_gone_when_it_is_joined_is_not_made(self, tmp_path):
        """Between a look and the joining it may have been removed: nothing is made."""
        before = tmp_path.stat().st_mtime_ns
        for place in (tmp_path, tmp_path / "no"):
            with pytest.raises(ConfigError):
                SlabStore(
                    path=str(place),
                    capacity_bytes=1 << 20,
                    block_bytes=96,
                    joins_only=True,
                )
        assert [] == list(tmp_path.iterdir())
        assert before == tmp_path.stat().st_mtime_ns  # nor made for a moment

    def test_directory_without_a_slab_gets_none(self, tmp_path):
        """Whoever joins makes nothing: not the directory, and no slab in it."""
        empty = tmp_path / "empty"
        empty.mkdir(0o700)
        for place in (empty, tmp_path / "no"):
            with pytest.raises(StoreUnavailableError):
                SlabStore.join(place, block_bytes=96)
        assert [empty] == list(tmp_path.iterdir())
        assert [] == list(empty.iterdir())

    def test_slab_is_taken_as_it_is(self, path):
        """Joining neither cuts a slab anew nor drops what it holds."""
        with SlabStore.join(path, block_bytes=BLOCK_BYTES) as store:
            assert 8 == store.stats().capacity_blocks
            assert 5 == store.stats().committed_blocks

    def test_block_larger_than_an_extent_is_refused(self, path):
        """A slab that has no room for such a block is not made another one."""
        before = snapshot(path)
        with pytest.raises(StoreUnavailableError, match="extents"):
            SlabStore.join(path, block_bytes=1 << 14)
        assert before.keys() == snapshot(path).keys()
        assert [True] * 5 == left(path)
