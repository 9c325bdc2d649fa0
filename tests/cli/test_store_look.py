# SPDX-License-Identifier: Apache-2.0
"""``ucm store ls``, ``stat`` and ``verify`` tell what is there, and change nothing."""

import os
import time

import attrs
import pytest

from tests.cli.store_kit import CHAT, TOKENS, ask, keys_of, snapshot, tell
from tests.stores.slab_kit import Child, RawSlab, die, open_slab
from ucm.cli.main import NOT_WELL, UNREADABLE, USAGE
from ucm.fates import Fate
from ucm.stores.slab import SlabSurvey, facts_of
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save, uses_at


class TestLs:
    def test_key_spaces_are_listed_with_their_shares(self, path):
        """Who has how much: model, blocks, bytes and share of each key space."""
        answer = ask("store", "ls", path)
        assert 5 == answer["blocks"]
        rows = [
            (row["model"], row["blocks"], row["share"]) for row in answer["keyspaces"]
        ]
        assert [("chat", 3, 0.6), ("code", 2, 0.4)] == rows
        assert attrs.asdict(CHAT) == answer["keyspaces"][0]["keyspace"]

    def test_ages_are_those_of_the_uses(self, path):
        """The newest use and the oldest are told, in seconds before now."""
        keys = keys_of(CHAT, list(range(100, 108)))
        now = time.monotonic_ns()
        with open_slab(path) as store:
            save(store, keys, uses=uses_at([now - 7200 * 10**9, now - 3600 * 10**9]))
        answer = ask("store", "ls", path, "--prefix", keys[0].hex()[:46])
        assert 7200 == pytest.approx(answer["keyspaces"][0]["oldest_age_s"], abs=300)
        assert 3600 == pytest.approx(
            answer["keyspaces"][0]["newest_age_s"], abs=300
        ) or (1 == answer["blocks"])

    def test_keys_are_listed_whole_up_to_a_limit(self, path):
        """A listing is bounded, says so, and never cuts a key."""
        code, said, complaint = tell(
            "store",
            "ls",
            path,
            "--keys",
            "--limit",
            2,
            "--keyspace",
            CHAT.digest.hex(),
        )
        assert 0 == code
        listed = [line.split()[0] for line in said.splitlines()]
        assert {key.hex() for key in keys_of(CHAT, TOKENS)} >= set(listed)
        assert 2 == len(listed)
        assert "2 of 3" in complaint

    def test_prompt_ids_choose_its_blocks_with_their_salt(self, path, tmp_path):
        """A prompt's blocks are found by its tokens, if they are keys of ours."""
        salted = keys_of(CHAT, TOKENS, b"tenant", shard=1)
        with open_slab(path) as store:
            save(store, salted)
        prompt = tmp_path / "ids.json"
        prompt.write_text(str(TOKENS[:9]))
        choice = ("--keys", "--keyspace", CHAT.digest.hex()[:8], "--prompt", prompt)
        plain = ask("store", "ls", path, *choice)
        own = ask("store", "ls", path, *choice, "--salt", "tenant")
        assert {key.hex() for key in keys_of(CHAT, TOKENS)[:2]} == {
            row["key"] for row in plain["keys"]
        }
        assert {key.hex() for key in salted[:2]} == {row["key"] for row in own["keys"]}
        # As of a variable that is not set: nobody's blocks for somebody's.
        assert USAGE == tell("store", "ls", path, *choice, "--salt", "")[0]

    def test_text_of_a_key_space_is_no_markup_and_no_command(self, path):
        """Nothing that somebody named a model after does anything to a terminal."""
        evil = attrs.evolve(CHAT, model="[b]x\x1b[2J\n")
        with open_slab(path) as store:
            store.describe(evil)
            save(store, keys_of(evil, TOKENS))
        _, said, _ = tell("store", "ls", path)
        assert "[b]x\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}" in said


class TestStat:
    def test_occupancy_and_users_are_told(self, path):
        """How full, who uses it, and whether all of its memory is there."""
        with open_slab(path) as store:
            lease = store.reserve(make_keys(1), BLOCK_BYTES)
            answer = ask("store", "stat", path)
            lease.discard()
        (found,) = answer["classes"]
        assert (5, 1, 2) == (
            found["committed_blocks"],
            found["reserved_slots"],
            found["free_slots"],
        )
        assert (1, True, 8, 2) == (
            found["users"],
            answer["is_in_use"],
            found["slots"],
            answer["keyspaces"],
        )

    def test_writer_that_died_is_told_and_named(self, path):
        """Slots that nobody will ever commit are seen before somebody needs them."""
        store = open_slab(path)
        store.reserve(make_keys(2), BLOCK_BYTES)
        number = store._slab.owner_id
        die(store)
        (found,) = ask("store", "stat", path)["classes"]
        assert ([number], 2, 0) == (
            found["dead_writers"],
            found["reserved_by_dead"],
            found["users"],
        )

    def test_lock_that_is_held_is_told_with_its_process(self, path):
        """A stopped process that has the lock is found by its number."""
        with open_slab(path) as store, store._slab.index.locked():
            (found,) = ask("store", "stat", path)["classes"]
            _, text, _ = tell("store", "stat", path)
        assert [os.getpid()] == found["locked_by"]
        assert f"its lock is held by process {os.getpid()}\n" in text

    def test_tenants_and_retained_blocks_are_counted(self, path):
        """Whose share is used, and what stays because somebody wished it."""
        later = time.monotonic_ns() + 3600 * 10**9
        with open_slab(path) as store:
            save(store, make_keys(2), uses=uses_at([later, later], tenant=7))
        (found,) = ask("store", "stat", path)["classes"]
        assert ([[8, 2]], 2) == (found["tenants"], found["retained_blocks"])

    def test_key_is_told_by_its_state(self, path):
        """One block: where it is, or that it is not there."""
        key = keys_of(CHAT, TOKENS)[0]
        there = ask("store", "stat", path, "--key", key.hex())
        assert ("committed", BLOCK_BYTES, CHAT.digest.hex()) == (
            there["state"],
            there["nbytes"],
            there["keyspace_digest"],
        )
        gone = make_keys(1)[0].hex()
        absent = ask("store", "stat", path, "--key", gone, code=NOT_WELL)
        assert "absent" == absent["state"]

    def test_several_classes_are_told_apart(self, tmp_path):
        """Models with blocks of other sizes have slots of their own."""
        root = tmp_path / "slab"
        with open_slab(root, 64) as store:
            save(store, make_keys(2))
        with open_slab(root, 64), SlabSurvey(root) as survey:
            (found,) = facts_of(survey).classes
            assert (2, 2 * BLOCK_BYTES) == (found.committed_blocks, found.block_bytes)


class TestVerify:
    def test_damaged_block_is_named_and_forgotten_when_told(self, path):
        """Damage is told with its key and exit code 1; only --forget changes anything."""
        good, bad = keys_of(CHAT, TOKENS)[:2]
        RawSlab(path).put(bad, b"\0" * BLOCK_BYTES)
        answer = ask("store", "verify", path, code=NOT_WELL)
        assert ([bad.hex()], 0) == (
            [each["key"] for each in answer["damaged"]],
            answer["forgotten"],
        )
        told = ask("store", "verify", path, "--forget", code=NOT_WELL)
        assert 1 == told["forgotten"]
        assert 4 == ask("store", "verify", path)["blocks"]
        with open_slab(path) as store:
            assert [True, False] == store.contains([good, bad])
            assert [Fate.CORRUPT] == [told.fate for told in store.fates([bad])]

    def test_record_of_another_key_is_damage(self, path):
        """Right bytes under a key that they were not saved as are found, too."""
        raw = RawSlab(path)
        slot = raw.slot_of(keys_of(CHAT, TOKENS)[0])
        raw.records["key"][slot, 3] ^= 1
        answer = ask("store", "verify", path, code=NOT_WELL)
        assert "hash of another key" in answer["damaged"][0]["problem"]

    def test_rate_is_kept(self, path):
        """Verifying takes no more of the memory's bandwidth than it was given."""
        answer = ask("store", "verify", path, "--rate", 5 * BLOCK_BYTES * 20)
        assert 1 / 20 <= answer["seconds"]

    def test_block_that_goes_meanwhile_is_no_damage(self, path):
        """What is evicted amid its reading is neither well nor damaged."""
        with SlabSurvey(path) as survey, open_slab(path) as store:
            (surveyed,) = survey.classes
            (blocks,) = surveyed.blocks()
            key = blocks.key(0)
            store.forget([key])
            save(store, make_keys(4))
            with pytest.raises(LookupError):
                surveyed.fetch(blocks, 0, memoryview(bytearray(4096)))


class TestHarmless:
    @pytest.mark.parametrize(
        "words",
        [
            ("ls",),
            ("ls", "--keys"),
            ("stat",),
            ("verify",),
            ("rm", "--all", "--dry-run"),
        ],
    )
    def test_looking_changes_not_a_byte(self, path, words):
        """A command that looks may be run at any time, beside whatever else runs."""
        before = snapshot(path)
        assert 0 == tell("store", words[0], path, *words[1:])[0]
        assert before == snapshot(path)

    @pytest.mark.slow
    def test_engine_goes_on_while_it_is_looked_at(self, tmp_path):
        """With a process that saves, reads and forgets all the time all answers come."""
        root = tmp_path / "slab"
        with open_slab(root, 32), Child(root, "churn", 32, 1) as child:
            for _ in range(20):
                child.say()
                assert 0 == tell("store", "verify", root)[0]
                assert 0 == tell("store", "ls", root, "--keys")[0]
                assert 0 == tell("store", "stat", root)[0]

    @pytest.mark.parametrize("verb", ["ls", "stat"])
    @pytest.mark.parametrize("digits", ["", "xyz", "00" * 90, "0 0", "-"])
    def test_key_that_is_none_is_refused(self, path, digits, verb):
        """A key is hexadecimal, and as long as keys are."""
        code, _, complaint = tell("store", verb, path, "--key", digits)
        assert (USAGE, 1) == (code, complaint.count("\n"))

    @pytest.mark.parametrize("digits", [CHAT.digest.hex()[:3], "fffff", "xyz" * 30])
    def test_key_space_that_is_none_says_how_many_digits(self, path, digits):
        """A key space may be shortened, to an odd number of digits as well."""
        told = tell("store", "ls", path, "--keyspace", CHAT.digest.hex()[:5])
        assert 0 == told[0]
        code, _, complaint = tell("store", "ls", path, "--keyspace", digits)
        assert (USAGE, True) == (code, "or of one that is described 4" in complaint)

    def test_missing_directory_is_not_made(self, tmp_path):
        """Looking for a slab that is not there leaves no trace."""
        code, _, complaint = tell("store", "rm", tmp_path / "no", "--all", "--yes")
        assert (UNREADABLE, 1) == (code, complaint.count("\n"))
        assert [] == list(tmp_path.iterdir())
