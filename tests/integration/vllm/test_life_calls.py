# SPDX-License-Identifier: Apache-2.0
"""What a request's life costs the scheduler's thread of an engine that is full."""

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.lives import SCHEDULER, WARM, WORKER, Engine, make_setup
from ucm.stores.slab import _opened
from ucm.stores.slab._locks import FileLock

MOST = {"match": 24, "allocated": 21, "finished": 21}
"""Calls of a life in each hook that it comes to once."""


def test_life_of_a_request_is_so_many_calls(tmp_path: Path) -> None:
    """R-18: look-up, load, plans and end of a request among 256 that decode: calls of functions, whose
    number depends on no machine; each is cold between two steps, and costs a microsecond."""
    engine = Engine(make_setup(tmp_path / "slab"))
    engine.run(WARM)
    before, engine.meter.counts = engine.lives, True
    engine.run(20)
    engine.worker.close()
    engine.half.close()
    lives = engine.lives - before
    assert 60 == lives
    calls = {part: engine.meter.calls[part] / lives for part in SCHEDULER}
    # Four times a second one of them looks at the slab's paths as well.
    assert MOST == {part: max(most, int(calls[part])) for part, most in MOST.items()}
    # Reports come in more or fewer steps, as the machine has time.
    assert sum(calls.values()) <= 118


@contextmanager
def lock_given_up() -> Iterator[Callable[[], int]]:
    """
    Yield how often others had the interpreter lock so far.

    One of them always waits for it, and it is taken from nobody meanwhile.
    """
    had, interval = [0], sys.getswitchinterval()
    is_over = threading.Event()

    def take() -> None:
        while not is_over.is_set():
            had[0] += 1
            time.sleep(0)  # gives it back at once

    waiting = threading.Thread(target=take)
    gc.disable()  # it may close files
    sys.setswitchinterval(100)
    waiting.start()
    try:
        yield lambda: had[0]
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        gc.enable()
        waiting.join()


def test_life_of_a_request_gives_the_interpreter_lock_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-18: none of an engine's hooks gives the interpreter lock up, not even for a short call of the
    system: it would wait for whoever of our threads takes it. Paths of a slab are looked at four times
    a second, and not here; a hook that came amid a change of the index has to wait for its end."""
    monkeypatch.setattr(_opened, "_LOOK_EVERY_S", 3600.0)
    locked = Counter[int]()
    enter = FileLock.__enter__

    def entered(lock: FileLock) -> None:
        locked[threading.get_ident()] += 1
        enter(lock)

    monkeypatch.setattr(FileLock, "__enter__", entered)
    me = threading.get_ident()
    engine = Engine(make_setup(tmp_path / "slab"))
    engine.run(WARM)
    given_up, waited = Counter[str](), Counter[str]()
    with lock_given_up() as count:

        def watch(half: object, name: str) -> None:
            call = getattr(half, name)

            def watched(*arguments: object, **named: object) -> object:
                before, waits = count(), locked[me]
                try:
                    return call(*arguments, **named)
                finally:
                    has_waited = locked[me] > waits
                    waited[name] += has_waited
                    given_up[name] += not has_waited and count() - before

            setattr(half, name, watched)

        for half, names in ((engine.half, SCHEDULER), (engine.worker, tuple(WORKER))):
            for name in names:
                watch(half, name)
        engine.run(60)
    engine.worker.close()
    engine.half.close()
    assert engine.hits
    assert not +given_up
    assert waited.total() < engine.hits
