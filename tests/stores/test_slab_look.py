# SPDX-License-Identifier: Apache-2.0
"""A look at a slab's place finds what an engine would meet there, and changes nothing."""

import os
import tempfile

import attrs
import pytest

from tests.stores.slab_kit import SLOT_BYTES, open_slab
from tests.stores.test_slab_directory import FOREIGN, make_tree, tree
from tests.stores.test_slab_room import GIB, MEMINFO, SYSTEMS, make_system
from ucm.config import HugePages, StoreConfig
from ucm.errors import ConfigError
from ucm.stores.slab import Mount, SlabStore, look, mount_of

CAPACITY = 8 * SLOT_BYTES


def config(path, **options):
    """Return settings of a store at a path."""
    return StoreConfig(path=str(path), capacity=CAPACITY, **options)


def problem_of(seen):
    """Return the one problem as text."""
    (problem,) = seen.problems
    return str(problem)


class TestPlace:
    def test_place_of_a_slab_to_come_is_well_and_stays_as_it_is(self, tmp_path):
        """Nothing is made; what is needed is capacity and index."""
        seen = look(config(tmp_path / "slab"), SLOT_BYTES)
        assert ((), 8, 0) == (seen.problems, seen.num_slots, seen.data_bytes)
        assert seen.needed_bytes > CAPACITY
        assert [] == os.listdir(tmp_path)

    def test_slab_that_is_there_is_told(self, tmp_path):
        """What it has already is not needed again."""
        open_slab(tmp_path / "slab").close()
        before = tree(tmp_path)
        seen = look(config(tmp_path / "slab"), SLOT_BYTES)
        assert ((), CAPACITY, (SLOT_BYTES,)) == (
            seen.problems,
            seen.data_bytes,
            seen.slot_sizes,
        )
        assert seen.needed_bytes <= CAPACITY
        assert before == tree(tmp_path)

    def test_live_slab_is_looked_at_beside_its_user(self, tmp_path):
        """Its user holds it, and does not notice."""
        with open_slab(tmp_path / "slab") as store:
            assert () == look(config(tmp_path / "slab")).problems
            assert 0 == store.stats().committed_blocks


class TestProblems:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_directory_of_somebody_else_is_named_and_untouched(self, tmp_path, name):
        """R-24: what an engine would refuse is found before it does."""
        make_tree(tmp_path / "theirs", FOREIGN[name])
        before = tree(tmp_path)
        seen = look(config(tmp_path / "theirs"), SLOT_BYTES)
        with pytest.raises(ConfigError) as caught:
            SlabStore(
                path=str(tmp_path / "theirs"),
                capacity_bytes=CAPACITY,
                block_bytes=SLOT_BYTES,
            )
        assert str(caught.value) == problem_of(seen)
        assert before == tree(tmp_path)

    def test_directory_that_others_may_write_to_is_named(self, tmp_path):
        """R-34: and how to mend it."""
        open_slab(tmp_path / "slab").close()
        (tmp_path / "slab").chmod(0o770)
        assert "chmod -R go-w" in problem_of(look(config(tmp_path / "slab")))

    def test_directory_that_is_meant_for_all_is_not_to_be_closed(self, tmp_path):
        """R-34: nobody is told to take /tmp away from all others."""
        tmp_path.chmod(0o1777)
        told = problem_of(look(config(tmp_path)))
        assert "chmod" not in told
        assert "below it" in told

    def test_slab_of_another_release_or_layout_is_named(self, tmp_path):
        """What the slab was made as and what is asked for now do not fit."""
        open_slab(tmp_path / "slab").close()
        large = look(attrs.evolve(config(tmp_path / "slab"), capacity=1 << 30), 1 << 28)
        assert "cut for another layout" in problem_of(large)
        manifest = tmp_path / "slab" / "slab.json"
        manifest.write_text(manifest.read_text().replace('"schema":', '"schema":9'))
        assert "another release made it" in problem_of(look(config(tmp_path / "slab")))

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda path: path.write_text("x"), "not a directory"),
            (lambda path: path.symlink_to("/dev/shm"), "leads to, /dev/shm, if"),
            (lambda path: os.mkfifo(path), "not a directory"),
            (lambda path: None, "parent does not exist. Make "),
        ],
    )
    def test_what_is_no_directory_is_named(self, tmp_path, make, told):
        """Nothing is waited for, and no link followed."""
        path = tmp_path / "slab"
        make(path)
        if not os.path.lexists(path):
            path = path / "deeper"
        assert told in problem_of(look(config(path)))

    def test_slab_that_was_cut_off_is_named(self, tmp_path):
        """The engine refuses it; the check called it well."""
        open_slab(tmp_path / "slab").close()
        os.truncate(tmp_path / "slab" / "data", 4096)
        told = problem_of(look(config(tmp_path / "slab")))
        assert "data has another size than it should" in told

    def test_place_that_cannot_be_written_to_is_named(self):
        """An engine could make nothing there: a mount that is read-only, or another user's
        directory, which this test looks at as somebody who is not root."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            os.chmod(name, 0o555)
            owner = os.geteuid()
            os.seteuid(owner or 65534)
            try:
                told = problem_of(look(config(f"{name}/slab")))
            finally:
                os.seteuid(owner)
        assert f"'{name}/slab': {name} cannot be written to. Use another" in told
        assert told.endswith(f"or let user {owner or 65534} write there.")

    def test_name_that_is_none_is_named(self):
        """A NUL cannot be in a path."""
        assert "null" in problem_of(look(config("/dev/shm/a\0b")))

    def test_capacity_below_a_block_is_named(self, tmp_path):
        """The arithmetic is in the message."""
        assert "= 0 slots" in problem_of(look(config(tmp_path / "slab"), 1 << 30))

    def test_wishes_that_the_machine_does_not_fulfil_are_named(self, tmp_path):
        """R-27: huge pages and nodes that are not there."""
        seen = look(config(tmp_path / "slab", numa="63"), system=tmp_path)
        assert "store.numa" in problem_of(seen)
        system = make_system(tmp_path / "system", {"proc/self/mountinfo": ""})
        wished = config(tmp_path / "slab", huge_pages=HugePages.REQUIRE)
        assert "store.huge_pages" in problem_of(look(wished, system=system))


def test_names_of_other_mounts_do_not_matter(tmp_path):
    """One that is no UTF-8, or has signs that end a line elsewhere, had a good slab be called damaged."""
    device = os.stat(tmp_path).st_dev
    line = f"2 1 {os.major(device)}:{os.minor(device)} / /own rw - ext4 /dev/vda rw\n"
    others = "".join(
        f"3 1 0:9 / /{name} rw - nfs s rw\n" for name in ("\udcfc", "\x85")
    )
    system = make_system(tmp_path / "system", {"proc/self/mountinfo": others + line})
    assert Mount("/own", "ext4", "rw") == mount_of(tmp_path, system)


def test_limits_of_memory_count(tmp_path):
    """R-26: the limit of a container is among the rooms of a slab."""
    files, rooms = SYSTEMS["version 2, limit of a parent"]
    system = make_system(
        tmp_path,
        {**files, "proc/meminfo": MEMINFO, "proc/self/mountinfo": ""},
    )
    seen = look(config("/dev/shm/ucm-look-test"), system=system)
    assert [4 * GIB, *rooms] == [room.left for room in seen.rooms[1:]]
    assert not os.path.lexists("/dev/shm/ucm-look-test")
