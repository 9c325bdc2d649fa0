# SPDX-License-Identifier: Apache-2.0
"""What writers on a share are called."""

import os
import subprocess
import sys

import pytest

from ucm.backends.files import _share

_IN_A_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork")


@pytest.mark.slow
def test_processes_of_two_containers_have_two_names() -> None:
    """X-03: of one machine, with the same id and start: a name that both had would be one writer's tally,
    and each would take the other's files away."""
    tried = subprocess.run([*_IN_A_CONTAINER, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("this machine makes no containers for its users")
    told = "from ucm.backends.files import _share; print(_share._identity(1))"
    command = [*_IN_A_CONTAINER, sys.executable, "-c", told]
    there = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    here = _share._identity(1)
    assert here.partition(".")[2] == there.strip().partition(".")[2]
    assert here != there.strip()
    assert here == _share._identity(1) != _share._identity(os.getpid())
