# SPDX-License-Identifier: Apache-2.0
"""What memory has of a file goes straight to who asked; what may hang goes by way of a piece."""

import errno
from concurrent import futures

import pytest

from tests.backends.test_files_reading import LENGTHS, ask, came_of, make_file
from tests.kit.hooked import Hooked
from ucm import native, xxh3
from ucm.backends._gate import Gate
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.files._reading import LEFT, find_reader


@pytest.fixture
def system(tmp_path_factory, monkeypatch):
    """Have native code make calls that a test sets."""
    system = Hooked()
    library = system.build(tmp_path_factory.mktemp("hooked"))
    monkeypatch.setattr(native, "LIBRARY", library)
    return system


def read(path, nbytes, gate=None):
    """Read a file; return what came, and the target."""
    asked = ask(path, nbytes)
    (came,) = find_reader(native.LIBRARY).read([asked], gate or Gate())
    return came, bytes(asked.target)


@pytest.mark.parametrize("is_digested", [True, False])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_memory_has_comes_by_few_calls(
    system, tmp_path, nbytes, is_digested, monkeypatch
):
    """Header and bytes, and nothing by way of a piece: at once, or as much as the CPU's cache has
    when it is digested."""
    if not is_digested:
        monkeypatch.setattr(xxh3, "DIGESTER", None)
    content = make_file(tmp_path / "file", nbytes)
    came = read(tmp_path / "file", nbytes)
    assert (came_of(content, digested=is_digested), content[HEADER_BYTES:]) == came
    few = -(-nbytes // (1 << 18)) if is_digested else 1
    assert (few, 0) == (system.calls.count("preadv2"), system.calls.count("pread"))


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EINTR])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_may_hang_goes_by_way_of_a_piece(system, tmp_path, nbytes, error):
    """X-14: of a mount that has no such call, and of what would have to be waited for."""
    content = make_file(tmp_path / "file", nbytes)
    system.errors["preadv2"] = error
    came = read(tmp_path / "file", nbytes)
    assert (came_of(content), content[HEADER_BYTES:]) == came
    assert 0 < system.calls.count("pread")
    assert "hang" not in system.calls


@pytest.mark.parametrize("most", [1, HEADER_BYTES - 1, HEADER_BYTES, 4096, 1 << 18])
def test_what_memory_has_not_comes_by_way_of_a_piece(system, tmp_path, most):
    """Wherever that begins, amid the header, too."""
    nbytes = LENGTHS[-1]
    content = make_file(tmp_path / "file", nbytes)
    system.has(most)
    came = read(tmp_path / "file", nbytes)
    assert (came_of(content), content[HEADER_BYTES:]) == came


@pytest.mark.parametrize(
    ("call", "error"), [("open", 0), ("pread", errno.EAGAIN)], ids=["open", "piece"]
)
def test_who_leaves_amid_a_call_gets_nothing_more(system, tmp_path, call, error):
    """X-14: one that hung comes back, and finds that its caller has gone; nothing comes straight, nor
    by way of a piece."""
    make_file(tmp_path / "file", 5)
    gate = Gate()
    system.errors["preadv2"] = error
    system.before = lambda name: gate.leave() if name == call else None
    came, target = read(tmp_path / "file", 5, gate)
    assert (LEFT, b"\1" * 5) == (came.error, target)


def test_who_leaves_waits_for_what_is_read_straight(system, tmp_path):
    """Behind it the memory is the caller's alone; it takes as long as a copy."""
    make_file(tmp_path / "file", 5)
    gate = Gate()
    with futures.ThreadPoolExecutor(1) as pool:
        leavers, waiting = [], set()

        def leave(name):
            if name == "preadv2":
                leavers.append(pool.submit(gate.leave))
                waiting.update(futures.wait(leavers, 0.05).not_done)

        system.before = leave
        read(tmp_path / "file", 5, gate)
        leavers[0].result(60.0)
    assert set(leavers) == waiting
    assert [1, 0] == list(gate.words)
