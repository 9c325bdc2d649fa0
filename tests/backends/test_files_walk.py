# SPDX-License-Identifier: Apache-2.0
"""A walk through a share: what it finds, what it removes, and what it costs."""

import errno
import os
import tracemalloc

import pytest

from ucm.backends.files._share import Share
from ucm.backends.files._walk import Walk

NBYTES = 10


def fill(root, num_files, num_places=4):
    """Make files of blocks, the first one the oldest, in several directories."""
    files = []
    for at in range(num_files):
        place = root / f"{at % num_places:02x}" / f"{at % 3:02x}"
        place.mkdir(parents=True, exist_ok=True)
        files.append(place / f"{at:064x}")
        files[-1].write_bytes(b"x" * NBYTES)
        os.utime(files[-1], (at, at))
    return files


def there(files):
    """Return the numbers of files that are there."""
    return [at for at, file in enumerate(files) if file.exists()]


def refusing(monkeypatch, wrong, error):
    """Have the mount refuse to remove some files."""
    real = os.unlink

    def unlink(path, **how):
        if os.fspath(path) in map(str, wrong):
            raise OSError(error, os.strerror(error), path)
        real(path, **how)

    monkeypatch.setattr(os, "unlink", unlink)


class TestEvict:
    @pytest.mark.parametrize(("wanted", "num_left"), [(200, 20), (95, 9), (0, 0)])
    def test_oldest_of_all_directories_go(self, tmp_path, wanted, num_left):
        """As few as there have to be, wherever they lie."""
        files = fill(tmp_path, 20)
        walk = Walk(str(tmp_path))
        assert (20, 200) == (walk.num_files, walk.nbytes)
        assert 20 - num_left == walk.evict(wanted)
        assert [*range(20 - num_left, 20)] == there(files)
        assert (num_left, num_left * NBYTES) == (walk.num_files, walk.nbytes)

    def test_empty_share_has_nothing_to_remove(self, tmp_path):
        """Nor is that an error."""
        walk = Walk(str(tmp_path))
        assert (0, 0, 0) == (walk.num_files, walk.nbytes, walk.evict(0))

    def test_what_another_machine_removed_makes_room_and_is_not_counted(
        self, tmp_path, monkeypatch
    ):
        """X-02: before its directory is listed, or between that and the removal."""
        files = fill(tmp_path, 12)
        walk = Walk(str(tmp_path))
        files[0].unlink()
        refusing(monkeypatch, files[1:2], errno.ENOENT)
        assert 2 == walk.evict(80)
        assert (8, 80) == (walk.num_files, walk.nbytes)
        assert [1, *range(4, 12)] == there(files)

    def test_next_ones_go_for_those_that_stay(self, tmp_path, monkeypatch):
        """R-51: what the mount refuses to remove takes its room."""
        files = fill(tmp_path, 12)
        refusing(monkeypatch, files[:3], errno.EPERM)
        walk = Walk(str(tmp_path))
        assert 6 == walk.evict(60)
        assert (6, 60) == (walk.num_files, walk.nbytes)
        assert [0, 1, 2, 9, 10, 11] == there(files)

    def test_mount_that_goes_away_ends_it(self, tmp_path, monkeypatch):
        """R-51: nothing is known of what is left."""
        share = Share(tmp_path / "s", touch_s=0, orphan_s=3600, lasting=False)
        share.claim("tiers.0.path")
        files = fill(tmp_path / "s" / "blocks", 4)
        refusing(monkeypatch, files, errno.ESTALE)
        assert None is share.collect(20, 10)

    @pytest.mark.parametrize("ahead", [40, 10**10])
    def test_clock_that_was_set_back_leaves_no_block_for_ever(self, tmp_path, ahead):
        """What was used at a time to come is as old as that is far, however far."""
        files = fill(tmp_path, 20)
        for file in files[:3]:
            os.utime(file, (20 + ahead, 20 + ahead))
        os.utime(files[10], (24, 24))  # by a clock that is a little ahead
        walk = Walk(str(tmp_path))
        assert 6 == walk.evict(140, now_ns=20 * 10**9)
        assert [*range(6, 20)] == there(files)

    def test_what_is_used_amid_a_walk_goes_last(self, tmp_path, monkeypatch):
        """A walk may last an hour: what was put meanwhile went first, as if of a time to come."""
        share = Share(tmp_path / "s", touch_s=0, orphan_s=3600, lasting=False)
        share.claim("tiers.0.path")
        files = fill(tmp_path / "s" / "blocks", 4)
        monkeypatch.setattr(share, "_now", iter([10.0, 100.0]).__next__)
        counted = share.collect(39, 30, alive=lambda: os.utime(files[3], (50, 50)))
        assert (3, 1) == (counted.num_blocks, counted.num_evicted)
        assert [1, 2, 3] == there(files)

    def test_time_that_no_array_takes_is_no_hindrance(self, tmp_path):
        """Of one such block no walk came to an end, and the share was full for good."""
        share = Share(tmp_path / "s", touch_s=0, orphan_s=3600, lasting=False)
        share.claim("tiers.0.path")
        files = fill(tmp_path / "s" / "blocks", 4)
        os.utime(files[3], (10**10, 10**10))
        os.utime(files[2])
        counted = share.collect(20, 10)
        assert (1, 3) == (counted.num_blocks, counted.num_evicted)
        assert [2] == there(files)

    def test_strange_directories_are_left_alone(self, tmp_path):
        """R-24: what no writer of ours has made is neither counted nor removed."""
        files = fill(tmp_path, 4)
        other = tmp_path / "old" / "00"
        other.mkdir(parents=True)
        strange = other / files[0].name
        strange.write_bytes(b"mine")
        walk = Walk(str(tmp_path))
        assert (4, 4) == (walk.num_files, walk.evict(0))
        assert b"mine" == strange.read_bytes()


class TestCost:
    @pytest.mark.slow
    def test_few_bytes_are_kept_of_a_file(self, tmp_path):
        """An agent with a terabyte of blocks does not hold each one's path in memory."""
        share = Share(tmp_path / "s", touch_s=0, orphan_s=3600, lasting=False)
        share.claim("tiers.0.path")
        fill(tmp_path / "s" / "blocks", 3000, 40)
        tracemalloc.start()
        try:
            counted = share.collect(3000 * NBYTES - 1, 2000 * NBYTES)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (2000, 1000) == (counted.num_blocks, counted.num_evicted)
        assert 100 * 3000 > peak
