# SPDX-License-Identifier: Apache-2.0
"""What writers on a share are called, and what is known of those that have ended."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.test_files_ledger import count, open_ledger
from ucm.backends.files import _identity
from ucm.backends.files._ledger import Seen

_IN_A_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork")


@pytest.mark.slow
def test_processes_of_two_containers_have_two_names() -> None:
    """X-03: of one machine, with the same id and start: a name that both had would be one writer's tally,
    and each would take the other's files away."""
    tried = subprocess.run([*_IN_A_CONTAINER, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("this machine makes no containers for its users")
    told = "from ucm.backends.files import _identity; print(_identity.identity(1))"
    command = [*_IN_A_CONTAINER, sys.executable, "-c", told]
    there = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    here = _identity.identity(1)
    assert here.partition(".")[2] == there.strip().partition(".")[2]
    assert here != there.strip()
    assert here == _identity.identity(1) != _identity.identity(os.getpid())


def test_process_is_known_whatever_it_calls_itself() -> None:
    """A name that is no UTF-8, as of one that is cut, ended a walk through the share."""
    own, comm = _identity.identity(os.getpid()), Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"n\xc3")
        assert _identity.is_alive(own)
    finally:
        comm.write_bytes(before)


def test_process_knows_itself_alone_where_no_boot_is_told(
    tmp_path, monkeypatch
) -> None:
    """X-03: no agent with such a tier could start where /proc has processes alone."""
    monkeypatch.setattr(_identity, "_BOOT", tmp_path / "boot_id")
    assert 0 == count(open_ledger(tmp_path)).own.blocks
    own = _identity.identity(os.getpid())
    assert _identity.is_alive(own)
    monkeypatch.setattr(_identity, "_NOWHERE", "another process's")
    assert not _identity.is_alive(own)


def test_nobody_is_told_dead_for_want_of_a_descriptor() -> None:
    """R-63: what others are at would be removed as that of who has ended."""
    own = _identity.identity(os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            _identity.is_alive(own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "another machine's", "nobody's"])
def test_turn_of_a_process_that_has_ended_is_taken_at_once(tmp_path, whose) -> None:
    """An agent that was killed amid a walk had all be full for a minute; of another machine nobody knows."""
    told = (
        "import os, pathlib, sys; from tests.backends.test_files_ledger import open_ledger; "
        "open_ledger(pathlib.Path(sys.argv[1]))._begin(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", told, str(tmp_path)], check=True)
    file, ledger = tmp_path / "room" / "collecting", open_ledger(tmp_path)
    if whose != "ours":
        name = "0" * 32 + file.read_text()[32:]
        file.write_text(name if whose == "another machine's" else "")
    assert Seen() == count(ledger)
    assert (1 if whose == "ours" else 0) == count(ledger).number
