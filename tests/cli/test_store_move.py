# SPDX-License-Identifier: Apache-2.0
"""``ucm store export``, ``import`` and ``warm``: every byte comes back, or none."""

import errno
import io
import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.cli.store_kit import CHAT, CODE, TOKENS, ask, keys_of, tell
from tests.stores.slab_kit import SLOT_BYTES, Child, RawSlab, open_slab
from ucm.cli.main import NOT_WELL, UNREADABLE, USAGE
from ucm.cli.store.move import _written
from ucm.errors import StoreError
from ucm.stores.exports import ExportReader, ExportWriter, Section, Start
from ucm.stores.slab import SlabStore, SlabSurvey
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    load,
    make_keys,
    payload,
    save,
    uses_at,
)

CHATS, CODES = keys_of(CHAT, TOKENS), keys_of(CODE, TOKENS[:8])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a slab with three blocks of one model and two of another."""
    path = tmp_path / "slab"
    with open_slab(path) as store:
        save(store, CHATS)
        save(store, CODES)
        store.describe(CHAT)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return an empty slab."""
    path = tmp_path / "other"
    open_slab(path).close()
    return path


@pytest.fixture
def file(path, tmp_path) -> Path:
    """Return an export of all five."""
    file = tmp_path / "blocks.ucmx"
    ask("store", "export", path, file)
    return file


def contents(path: Path) -> dict[bytes, bytes]:
    """Return the blocks of a slab, verified."""
    with open_slab(path) as store:
        known = [key for key in CHATS + CODES if store.contains([key])[0]]
        return dict(zip(known, load(store, known), strict=True)) if known else {}


class TestThereAndBack:
    def test_every_block_comes_back_byte_by_byte(self, path, other, file):
        """What was exported is what is loaded, in another slab with a seed of its own."""
        answer = ask("store", "import", file, other)
        assert (5, 5 * BLOCK_BYTES, 0) == (
            answer["blocks"],
            answer["nbytes"],
            answer["damaged"],
        )
        assert {key: payload(key) for key in CHATS + CODES} == contents(other)
        with open_slab(other) as store:
            assert {CHAT.digest: CHAT} == store.keyspaces()

    def test_what_is_stored_is_passed_over(self, other, file):
        """An import that was broken off goes on where it was."""
        ask(
            "store",
            "import",
            file,
            other,
            "--most",
            2 * BLOCK_BYTES,
            code=NOT_WELL,
        )
        assert 2 == len(contents(other))
        answer = ask("store", "import", file, other)
        assert (3, 2) == (answer["blocks"], answer["present"])

    def test_blocks_are_chosen_as_in_a_listing(self, path, other, tmp_path):
        """A key space alone, and as large slots as it needs."""
        file = tmp_path / "code"
        ask("store", "export", path, file, "--keyspace", CODE.digest.hex())
        ask("store", "import", file, other)
        assert set(CODES) == set(contents(other))

    def test_file_is_its_owners_alone_and_never_half(self, path, file):
        """Prompts can be guessed from blocks: nobody else reads them."""
        assert 0o600 == file.stat().st_mode & 0o777
        assert USAGE == tell("store", "export", path, file)[0]
        assert 0 == tell("store", "export", path, file, "--force")[0]
        assert {"slab", "blocks.ucmx"} == {each.name for each in file.parent.iterdir()}

    def test_damaged_block_is_left_out(self, path, other, tmp_path):
        """A block that does not verify travels no further."""
        RawSlab(path).put(CHATS[0], b"\0" * BLOCK_BYTES)
        file = tmp_path / "rest"
        assert 1 == ask("store", "export", path, file, code=NOT_WELL)["damaged"]
        assert 4 == ask("store", "import", file, other)["blocks"]

    def test_record_of_a_size_that_is_none_spoils_no_file(self, path, other):
        """One damaged record costs its block, and not all others."""
        raw = RawSlab(path)
        raw.records["nbytes"][raw.slot_of(CHATS[0])] = 1 << 60
        file = path.with_name("rest")
        assert 1 == ask("store", "export", path, file, code=NOT_WELL)["damaged"]
        assert 4 == ask("store", "import", file, other)["blocks"]

    def test_moments_and_tenants_travel(self, path, tmp_path):
        """Who was used last is kept longest there, too, and counts for the same tenant."""
        old = make_keys(2, first=70)
        hour = 3600 * 10**9
        with open_slab(path) as store:
            moments = [time.monotonic_ns() - hour, time.monotonic_ns() - 2 * hour]
            save(store, old, uses=uses_at(moments, tenant=9))
        file, target = tmp_path / "all", tmp_path / "target"
        ask("store", "export", path, file)
        open_slab(target).close()
        ask("store", "import", file, target)
        with SlabSurvey(target) as survey:
            (found,) = survey.classes[0].blocks()
        by_key = {found.key(at): at for at in range(len(found))}
        ages = [int(found.ages_ns[by_key[key]]) for key in old]
        assert [1, 2] == [round(age / hour) for age in ages]
        assert [10, 10, 0] == [
            int(found.places[by_key[key]]) for key in (*old, CHATS[0])
        ]

    @pytest.mark.parametrize("is_told", [True, False])
    def test_what_lay_in_a_file_is_older_by_that(self, path, tmp_path, is_told):
        """An export of yesterday displaces nothing of a slab that was used today."""
        file, target = tmp_path / "file", tmp_path / "target"
        now, day = time.monotonic_ns(), 24 * 3600 * 10**9
        then = time.time_ns() - day
        section = Section(CHAT.digest.hex(), BLOCK_BYTES, CHAT)
        start = Start(3, 3 * BLOCK_BYTES, [section], then if is_told else None)
        with file.open("wb") as made:
            writer = ExportWriter(made, start)
            for key in CHATS:
                writer.add(key, memoryview(payload(key)), 0, 0)
            writer.finish()
        os.utime(file, ns=(then, then if not is_told else time.time_ns()))
        with open_slab(target) as store:
            stored = make_keys(8)
            hours = [now - at * day // 24 for at in (0, 1, 2, 3, 4, 5, 30, 31)]
            save(store, stored, uses=uses_at(hours))
        answer = ask("store", "import", file, target, code=NOT_WELL)
        assert (2, 1) == (answer["blocks"], answer["no_room"])
        with open_slab(target) as store:
            assert [True] * 6 + [False] * 2 == store.contains(stored)

    def test_second_import_displaces_nothing_of_the_first(self, tmp_path):
        """Blocks of a prefix are a few nanoseconds apart, and stay in their order."""
        root, file, target = tmp_path / "slab", tmp_path / "file", tmp_path / "target"
        now, keys = time.monotonic_ns(), make_keys(12)
        with open_slab(root, 12) as store:
            save(store, keys, uses=uses_at([now - 16 * at for at in range(12)]))
        ask("store", "export", root, file)
        open_slab(target).close()
        for told in ((8, 0, 4), (0, 8, 4)):
            answer = ask("store", "import", file, target, code=NOT_WELL)
            assert told == (answer["blocks"], answer["present"], answer["no_room"])
        with open_slab(target) as store:
            assert [True] * 8 + [False] * 4 == store.contains(keys)

    @pytest.mark.parametrize("date", [1 << 90, -(1 << 90), 0])
    def test_date_that_somebody_made_up_harms_nothing(self, other, tmp_path, date):
        """One still to come is now, and one before all others is old."""
        file = tmp_path / "file"
        section = Section(CHAT.digest.hex(), BLOCK_BYTES, CHAT)
        with file.open("wb") as made:
            writer = ExportWriter(made, Start(1, BLOCK_BYTES, [section], date))
            writer.add(CHATS[0], memoryview(payload(CHATS[0])), (1 << 63) - 1, 0)
            writer.finish()
        assert 1 == ask("store", "import", file, other)["blocks"]
        assert {CHATS[0]: payload(CHATS[0])} == contents(other)

    def test_larger_blocks_come_into_slots_of_their_size(self, tmp_path):
        """An engine looks for blocks among the slots of its largest one."""
        root, file = tmp_path / "slab", tmp_path / "file"
        with SlabStore(
            path=str(root), capacity_bytes=1 << 20, block_bytes=9000
        ) as store:
            save(store, CHATS[:1], 9000)
            save(store, CHATS[1:], 500)
        target = tmp_path / "target"
        SlabStore(path=str(target), capacity_bytes=1 << 20, block_bytes=9000).close()
        ask("store", "export", root, file)
        ask("store", "import", file, target)
        with SlabStore.join(target, block_bytes=9000) as store:
            assert [payload(CHATS[0], 9000)] == load(store, CHATS[:1])
            assert [payload(CHATS[1], 500)] == load(store, CHATS[1:2])

    @pytest.mark.slow
    def test_engines_go_on_at_both_ends(self, tmp_path):
        """Two slabs that other processes use all the time, and each block verifies."""
        roots = [tmp_path / "one", tmp_path / "two"]
        with (
            open_slab(roots[0], 32),
            open_slab(roots[1], 32) as store,
            Child(roots[0], "churn", 32, 1) as one,
            Child(roots[1], "churn", 32, 2) as two,
        ):
            for _ in range(10):
                one.say()
                two.say()
                code = tell("store", "export", roots[0], tmp_path / "f", "--force")[0]
                assert 0 == code
                assert tell("store", "import", tmp_path / "f", roots[1])[0] in (
                    0,
                    1,
                )
                assert 0 == ask("store", "verify", roots[1])["num_damaged"]
            two.kill()
            assert [] == store.audit()


class TestWarm:
    def test_slab_is_made_and_filled_before_an_engine_joins(self, file, tmp_path):
        """After a start of the machine: made as the engine would, and hits at once."""
        root = tmp_path / "new"
        chosen = ("--capacity", 8 * SLOT_BYTES)
        assert 5 == ask("store", "warm", file, root, *chosen)["blocks"]
        with open_slab(root) as engine:
            assert [True] * 5 == engine.contains(CHATS + CODES)

    def test_hottest_come_first_and_nothing_goes_for_them(self, tmp_path):
        """Room for two of three: the two used last, and what is stored stays."""
        root, file, target = tmp_path / "slab", tmp_path / "file", tmp_path / "target"
        now, hour = time.monotonic_ns(), 3600 * 10**9
        with open_slab(root) as store:
            save(store, CHATS, uses=uses_at([now - 2 * hour, now, now - hour]))
        ask("store", "export", root, file)
        with open_slab(target) as store:
            stored = make_keys(6)
            save(store, stored, uses=uses_at([now - 100 * hour] * 6))
        ask("store", "warm", file, target, "--most", BLOCK_BYTES)
        with open_slab(target) as store:
            assert [False, True, False] == store.contains(CHATS)
        answer = ask("store", "warm", file, target)
        assert (1, 1, 1) == (answer["blocks"], answer["present"], answer["no_room"])
        with open_slab(target) as store:
            assert [True] * 6 == store.contains(stored)
            assert [False, True, True] == store.contains(CHATS)

    def test_import_makes_room_among_what_is_older(self, tmp_path):
        """The same with import: what was used before them goes, and nothing newer."""
        root, file, target = tmp_path / "slab", tmp_path / "file", tmp_path / "target"
        now, hour = time.monotonic_ns(), 3600 * 10**9
        with open_slab(root) as store:
            save(store, CHATS, uses=uses_at([now - 3 * hour] * 3))
        ask("store", "export", root, file)
        with open_slab(target) as store:
            stored = make_keys(8)
            save(store, stored, uses=uses_at([now - at * hour for at in range(8)]))
        assert 3 == ask("store", "import", file, target)["blocks"]
        with open_slab(target) as store:
            assert [True] * 5 + [False] * 3 == store.contains(stored)

    @pytest.mark.slow
    def test_blocks_wait_for_memory_that_is_still_coming(self, file, memory_path):
        """Of a slab that is being populated no block is refused for want of it."""
        root = memory_path
        chosen = ("--capacity", "256MiB")
        assert 5 == ask("store", "warm", file, root, *chosen)["blocks"]

    def test_slab_that_is_missing_is_not_made_unasked(self, file, tmp_path):
        """Without a capacity nobody knows how large it should be: it is asked for."""
        code, _, complaint = tell("store", "warm", file, tmp_path / "no")
        assert (UNREADABLE, True) == (code, "--capacity" in complaint)
        assert not (tmp_path / "no").exists()


def test_export_that_a_disk_is_too_small_for_is_named(tmp_path):
    """No space left is said of the file that was asked for, of which nothing stays."""
    file, full = tmp_path / "file", OSError(errno.ENOSPC, "No space left")
    with pytest.raises(OSError, match="left") as told, _written(file, force=False):
        raise full
    assert (str(file), []) == (told.value.filename, [*tmp_path.iterdir()])


class TestFormat:
    def test_file_is_as_documented(self, tmp_path):
        """Another program reads it by its description alone."""
        made = io.BytesIO()
        writer = ExportWriter(made, Start(1, 3, [Section(CHAT.digest.hex(), 96, CHAT)]))
        writer.add(CHATS[0], memoryview(b"abc"), -5, 7)
        writer.finish()
        data = made.getvalue()
        magic, version, size = struct.unpack_from("<8sII", data)
        assert (b"\x89UCM\r\n\x1a\n", 1) == (magic, version)
        at = 16 + size
        assert struct.pack("<Q", xxh3_64_intdigest(data[:at])) == data[at : at + 8]
        head = struct.unpack_from("<HHIqQQ", data, at + 8)
        seed = xxh3_64_intdigest(CHATS[0])
        assert (53, 0, 7, -5, 3, xxh3_64_intdigest(b"abc", seed)) == head
        assert data[at + 8 + 32 :].startswith(CHATS[0])
        assert data[at + 8 + 32 + 53 + 8 :].startswith(b"abc")
        end = struct.unpack_from("<HHIqQQ", data, len(data) - 40)
        assert (0, 0, 0, 0, 1, 3) == end

    @pytest.mark.parametrize(
        "text", [b'{"blocks": "\xff"}', b'{"a": ' + b"[" * 9000, b"{}"]
    )
    def test_start_that_says_nothing_known_is_refused(self, other, tmp_path, text):
        """Also one whose sum is right: somebody else may have made it."""
        start = struct.pack("<8sII", b"\x89UCM\r\n\x1a\n", 1, len(text)) + text
        file = tmp_path / "file"
        file.write_bytes(start + struct.pack("<Q", xxh3_64_intdigest(start)))
        code, _, complaint = tell("store", "import", file, other)
        assert (UNREADABLE, 1) == (code, complaint.count("\n"))

    def test_other_version_is_refused_by_its_number(self, file, other):
        """A file of a later release is not guessed at."""
        data = bytearray(file.read_bytes())
        data[8] = 2
        file.write_bytes(data)
        code, _, complaint = tell("store", "import", file, other)
        assert UNREADABLE == code
        assert "version 2" in complaint

    @pytest.mark.parametrize("kept", [0, 7, 20, 700, -41, -1])
    def test_file_that_was_cut_off_is_told_so(self, file, other, kept):
        """What came before the cut is stored, and the exit code says that it is not all."""
        file.write_bytes(file.read_bytes()[:kept])
        code, _, complaint = tell("store", "import", file, other)
        assert (UNREADABLE, 1) == (code, complaint.count("\n"))
        assert all(payload(key) == data for key, data in contents(other).items())

    def test_block_with_other_bytes_is_left_out(self, file, other):
        """A flipped bit costs its block alone."""
        data = bytearray(file.read_bytes())
        data[data.index(payload(CHATS[1])) + 3] ^= 1
        file.write_bytes(data)
        answer = ask("store", "import", file, other, code=NOT_WELL)
        assert (4, 1) == (answer["blocks"], answer["damaged"])
        assert CHATS[1] not in contents(other)

    def test_key_of_another_block_does_not_get_its_bytes(self, file, other):
        """A head that was changed ends the import: nobody can tell what follows."""
        data = bytearray(file.read_bytes())
        data[data.index(CHATS[0]) + 30] ^= 1
        file.write_bytes(data)
        assert UNREADABLE == tell("store", "import", file, other)[0]
        assert all(payload(key) == found for key, found in contents(other).items())

    @pytest.mark.slow
    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_no_file_makes_the_reader_do_anything_but_refuse(self, drawn):
        """Cut, flipped or made up: a ``StoreError``, or exactly what was written."""
        made = io.BytesIO()
        writer = ExportWriter(made, Start(2, 8, [Section(CHAT.digest.hex(), 96, CHAT)]))
        for key in CHATS[:2]:
            writer.add(key, memoryview(payload(key, 4)), 0, 0)
        writer.finish()
        data = bytearray(made.getvalue())
        for _ in range(drawn.draw(st.integers(1, 3))):
            at = drawn.draw(st.integers(0, len(data) - 1))
            data[at] = drawn.draw(st.integers(0, 255))
        data = data[: drawn.draw(st.integers(0, len(data)))]
        found = {}
        try:
            reader = ExportReader(io.BytesIO(data), "it")
            while (head := reader.next()) is not None:
                into = memoryview(bytearray(min(head.nbytes, 4096)))
                if head.nbytes <= 4096 and reader.take(head, into):
                    found[head.key] = bytes(into)
        except StoreError:
            pass
        assert found.items() <= {key: payload(key, 4) for key in CHATS[:2]}.items()
