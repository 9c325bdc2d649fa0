# SPDX-License-Identifier: Apache-2.0
"""A slab for which the system has no thread, or no room for what is beside its blocks."""

import contextlib
import errno
import gc
import os
import resource

import pytest

from tests.clocks import no_threads
from tests.stores.slab_kit import SLOT_BYTES, open_slab
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.stores.slab import _populate
from ucm.testing.store_blocks import make_keys, make_keyspace, save


def test_slab_whose_memory_gets_no_thread_is_left(tmp_path, monkeypatch):
    """R-25: it says so, and this process keeps no part of it: the next opening cuts it anew."""
    monkeypatch.setattr(_populate, "_STEP_BYTES", 1 << 20)
    path, num_blocks = tmp_path / "slab", 1024
    with (
        no_threads("ucm-populate"),
        pytest.raises(StoreUnavailableError, match="memory gets no thread: can't"),
    ):
        open_slab(path, num_blocks)
    with open_slab(path, 2 * num_blocks) as slab:
        assert ("", 2 * num_blocks * SLOT_BYTES) == (
            slab.capabilities.caveat,
            slab.stats().capacity_bytes,
        )
        assert 5 == save(slab, make_keys(5))


def test_remedy_for_too_few_open_files_removes_nothing(tmp_path):
    """R-24: wherever they run out, whoever did as the message said had thrown a slab away."""
    path, files, told = tmp_path / "slab", resource.RLIMIT_NOFILE, []
    with open_slab(path) as slab:
        assert 5 == save(slab, make_keys(5))
    gc.collect()  # what former tests have left would be let go amid this one
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = sorted({*range(len(used) + 12)} - used)
    before = resource.getrlimit(files)
    for limit in free[:12]:
        resource.setrlimit(files, (limit, before[1]))
        try:
            open_slab(path).close()
        except ConfigError as exc:
            told.append(str(exc))
        finally:
            resource.setrlimit(files, before)
    assert 6 <= len(told)
    for each in told:
        assert "Too many open files" in each
        assert each.endswith("have more files open (ulimit -n).")
    with open_slab(path) as slab:
        assert 5 == slab.match(make_keys(5))


def test_slab_that_cannot_be_opened_keeps_no_descriptor(tmp_path):
    """R-63: its index and its lock held each other, and mapped files, until the collector came: of an
    agent, which collects rarely, each try took some more."""
    path, files, num_refused = tmp_path / "slab", resource.RLIMIT_NOFILE, 0
    open_slab(path).close()
    before = resource.getrlimit(files)
    gc.collect()
    gc.disable()
    try:
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = sorted({*range(len(used) + 12)} - used)
        for limit in free[4:10]:
            resource.setrlimit(files, (limit, before[1]))
            with contextlib.suppress(ConfigError):
                open_slab(path).close()
                break
            num_refused += 1
            resource.setrlimit(files, before)
            assert len(used) == len(os.listdir("/proc/self/fd"))
    finally:
        resource.setrlimit(files, before)
        gc.enable()
    assert num_refused


def test_description_without_room_leaves_nothing(tmp_path):
    """R-24: each refused one had left an empty file, and a count of files has a limit, too."""
    path, files = tmp_path / "slab", resource.RLIMIT_FSIZE
    with open_slab(path) as slab:
        before = resource.getrlimit(files)
        resource.setrlimit(files, (10, before[1]))
        try:
            with pytest.raises(StoreUnavailableError, match="File too large"):
                slab.describe(make_keyspace())
        finally:
            resource.setrlimit(files, before)
        assert [] == os.listdir(path / "keyspaces")
        slab.describe(make_keyspace())
        assert 1 == len(os.listdir(path / "keyspaces"))


def test_key_spaces_are_told_where_no_descriptor_is_left_for_a_list(
    tmp_path, monkeypatch
):
    """R-25: others of the process may have the last one amid it; the engine's own thread asks, and ended."""
    with open_slab(tmp_path / "slab") as slab:
        slab.describe(make_keyspace())
        errors, listdir = [errno.EMFILE], os.listdir

        def refuse(path):
            if errors:
                raise OSError(errors[0], os.strerror(errors.pop()))
            return listdir(path)

        monkeypatch.setattr(os, "listdir", refuse)
        assert [make_keyspace()] == list(slab.keyspaces().values())
        assert not errors
