# SPDX-License-Identifier: Apache-2.0
"""Directories of ours that several processes come to at the same time."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from ucm.backends import _places
from ucm.backends.files import _share
from ucm.errors import ConfigError

MINE = _share.Manifest()
NAME = _share.MANIFEST


def claim(path):
    """Claim a directory as a tier does."""
    return _places.claim(path, NAME, MINE, "tiers.0.path")


class Other:
    """A process that claims the directory just before a call of this one, and fills it."""

    def __init__(self, monkeypatch, path, module, name):
        self._path, self._real, self._is_due = path, getattr(module, name), True
        monkeypatch.setattr(module, name, self.call)

    def call(self, *args):
        """Have the other process come first, once."""
        if self._is_due:
            self._is_due = False
            claim(self._path)
            (self._path / "blocks").mkdir()
        return self._real(*args)


@pytest.mark.parametrize(
    ("module", "name"),
    [(os, "listdir"), (_places, "give_name"), (_places, "_write_new")],
    ids=["looks", "publishes", "writes"],
)
def test_directory_is_of_all_who_come_at_the_same_time(
    tmp_path, monkeypatch, module, name
):
    """R-24: whichever step another one of the same process id is faster by, both have it."""
    Other(monkeypatch, tmp_path, module, name)
    assert MINE == claim(tmp_path)
    assert ["blocks", NAME] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("half", [b"", b'{"kind"'])
def test_manifest_that_is_not_whole_is_read_again(tmp_path, monkeypatch, half):
    """R-24: another machine may be writing it, or have done so just now."""
    (tmp_path / NAME).write_bytes(half)
    whole = msgspec.json.encode(MINE)
    monkeypatch.setattr(
        _places, "sleep", lambda seconds: (tmp_path / NAME).write_bytes(whole)
    )
    assert MINE == claim(tmp_path)


@pytest.mark.parametrize("text", [b"{", b'{"kind": "\xff"}'])
def test_manifest_that_stays_in_pieces_is_not_ours(tmp_path, monkeypatch, text):
    """R-24: it is read a few times, left as it is, and named."""
    (tmp_path / NAME).write_bytes(text)
    pauses = []
    monkeypatch.setattr(_places, "sleep", pauses.append)
    with pytest.raises(ConfigError, match="is not ours"):
        claim(tmp_path)
    assert 3 == len(pauses)
    assert text == (tmp_path / NAME).read_bytes()


def test_manifest_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """A directory that takes no manifest stays empty, and is nobody's."""

    def refuse(*args):
        raise OSError(5, "refused")

    monkeypatch.setattr(_places, "give_name", refuse)
    with pytest.raises(OSError, match="refused"):
        claim(tmp_path)
    assert [] == os.listdir(tmp_path)


def test_directory_is_ours_behind_a_loss_of_power(tmp_path, monkeypatch):
    """R-24: what was put outlasts it where that is asked for, and nobody could use it any more."""
    kept, fsync = {}, os.fsync

    def keep(fd):
        info = os.fstat(fd)
        is_folder = stat.S_ISDIR(info.st_mode)
        here = Path(f"/proc/self/fd/{fd}")
        kept[info.st_ino] = os.listdir(fd) if is_folder else here.read_bytes()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", keep)
    claim(tmp_path)
    (tmp_path / "blocks").mkdir()
    manifest = tmp_path / NAME
    manifest.write_bytes(kept.get(manifest.stat().st_ino, b""))
    assert NAME in kept.get(tmp_path.stat().st_ino, ())
    assert MINE == claim(tmp_path)
