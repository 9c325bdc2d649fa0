# SPDX-License-Identifier: Apache-2.0
"""When files were changed, and since when an engine's process runs."""

import multiprocessing
import os
import time

import pytest

from ucm.integration.changes import engine_began_ns, last_change_ns

LIMIT_S = 20.0
"""A clock of files has ticks of a hundredth of a second at most: this is for what is not seen."""


@pytest.fixture
def place(tmp_path):
    """Return a directory behind a link, with a file that counts."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "weights").write_bytes(b"1")
    (tmp_path / "present").symlink_to("one")
    return tmp_path / "present"


def last(place):
    """Return when what counts was changed."""
    return last_change_ns(place, [place / "weights"])


def until_later(moment_ns, change, seen):
    """Do something again and again until a file system's clock, which has ticks, has gone on."""
    until = time.monotonic() + LIMIT_S
    change()
    while seen() <= moment_ns:
        assert time.monotonic() < until, "it is not seen"
        change()


def relink(place):
    """Have a link lead where it leads already."""
    place.unlink()
    place.symlink_to("one")


CHANGES = {
    "bytes": lambda place: (place / "weights").write_bytes(b"2"),
    "link": relink,
    "moved": lambda place: (
        place.resolve().rename(place.parent / "two"),
        (place.parent / "two").rename(place.parent / "one"),
    ),
}


class TestLastChange:
    @pytest.mark.parametrize("how", ["bytes", "link", "moved"])
    def test_what_leads_to_other_bytes_counts(self, place, how) -> None:
        """R-05: a file that is written, a link that is set anew and a directory that is put in
        another's place are changes."""
        before = last(place)
        until_later(before, lambda: CHANGES[how](place), lambda: last(place))

    def test_what_else_comes_does_not(self, place) -> None:
        """R-05: checkpoints beside the weights that an engine reads keep none from starting."""
        before = last(place)
        until_later(
            before,
            lambda: (place / "step-1").write_bytes(b"1"),
            lambda: (place / "step-1").stat().st_ctime_ns,
        )
        (place / "step-2").mkdir()
        assert place.stat().st_mtime_ns > before
        assert before == last(place)


def tell(queue) -> None:
    """Say since when this process runs, to whom it is an engine's and to whom not."""
    queue.put((engine_began_ns("EngineCore"), engine_began_ns("Worker")))


class TestBegan:
    @pytest.mark.slow
    def test_process_of_an_engine_tells_when_it_began(self) -> None:
        """R-05: one that was started under an engine's name says when, on the clock of files."""
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=tell, args=(queue,), name="EngineCore_DP0")
        before = time.time_ns()
        child.start()
        began, other = queue.get(timeout=60)
        after = time.time_ns()
        child.join(60)
        assert other is None
        tick = 10**9 // os.sysconf("SC_CLK_TCK")
        assert before - tick <= began <= after

    def test_host_is_no_engine(self) -> None:
        """R-05: files that were written by a host before it made an engine in its own process are
        no news to that."""
        assert engine_began_ns() is None
