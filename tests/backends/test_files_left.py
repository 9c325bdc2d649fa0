# SPDX-License-Identifier: Apache-2.0
"""What writers have put who have ended, and told before that."""

import errno
import os

import pytest

from tests.backends.test_files_ledger import count, make_block, open_ledger
from ucm.backends.files import _share


@pytest.fixture
def root(tmp_path):
    """Return a share that was counted while nothing was there; then somebody put a block, and has ended."""
    root = tmp_path / "share"
    count(open_ledger(root))
    make_block(root, 700)
    tally_of(root).touch()
    os.utime(tally_of(root), (1.0, 1.0))
    return root


def tally_of(root):
    """Return the tally of who has ended, idle for long and about to put another block."""
    return root / "room" / f"{'0' * 32}.1.1.7_1_700_300"


class TestLeft:
    def test_tally_of_who_has_ended_stays_until_it_is_counted(self, root):
        """R-63: who joins removed what no count had yet, and all put what would go over the bound."""
        late = open_ledger(root)
        count(late)  # the last count is a new one
        seen = open_ledger(root).look()
        assert (1, 700, 300) == (seen.blocks, seen.nbytes, seen.moving)

    def test_tally_of_who_has_ended_counts_until_all_is_counted(
        self, root, monkeypatch
    ):
        """R-63: a walk may take minutes, and what it has yet to count is there all the while."""
        other, walk, seen = open_ledger(root), _share.Walk, []

        def watched(*args):
            seen.append(other.look().nbytes)
            return walk(*args)

        monkeypatch.setattr(_share, "Walk", watched)
        count(open_ledger(root), known=1)
        assert [700] == seen
        told = other.look()
        assert (1, 700, 0) == (told.blocks, told.nbytes, told.moving)
        assert not tally_of(root).exists()

    def test_tally_stays_where_no_count_can_be_told(self, root, monkeypatch):
        """What others know of is what lies there, whatever this process has counted."""
        rename = os.rename

        def refuse(name, to):
            if "/count-" in to:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), to)
            rename(name, to)

        monkeypatch.setattr(os, "rename", refuse)
        count(open_ledger(root), known=1)
        assert 700 == open_ledger(root).look().nbytes
