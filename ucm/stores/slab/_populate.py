# SPDX-License-Identifier: Apache-2.0
"""
Giving a slab in memory its memory: once, in the background, and never too much.

One process at a time has the turn; when it dies, another one goes on. Nobody waits for
it but for the first piece. An extent whose pages are all there is marked as populated,
and only then does a class come to use it. Where memory becomes short the slab stays as
large as it is. The others follow at its heels, so that their copies meet no missing page table.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from ucm.affinity import give_way, leave_one_cpu, num_hashing
from ucm.errors import StoreUnavailableError
from ucm.stores.abc import StoreGrowth
from ucm.stores.slab._arena import Arena
from ucm.stores.slab._creation import least_room
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._files import ARENA, DATA, Directory
from ucm.stores.slab._locks import Turn
from ucm.stores.slab._memory import populate

__all__ = ["Populator"]

_STEP_BYTES = 64 << 20
_PIECE_BYTES, _AMPLE_BYTES = 4 << 20, 2 << 30
_SPARE_BYTES, _SPARE_SHARE = 64 << 20, 16
_NAP_S, _FIRST_NAP_S = 0.1, 0.005
_FIRST_S = 1.0
_JOIN_S = 5.0
_TOLD_SHARES, _TOLD_BYTES = 10, 8 << 30
"""It is told of as often; of a large one more often, so that it is soon of use to a device."""
_ENDED = threading.Event()
_ENDED.set()


def _ignore(growth: StoreGrowth) -> None:
    """Tell nobody."""


@attrs.frozen
class _Step:
    """Extents that are populated together, and their bytes."""

    extents: slice
    start: int
    stop: int


class Populator:
    """
    One process's part in it.

    Args:
        directory: Of the slab.
        geometry: How it is cut.
        arena: Its table.
        memory: All of its data, mapped.
        check: Raises ``StoreUnavailableError`` once the slab is not to be touched.
        collapses: Memory may come in huge pages.

    Raises:
        ConfigError: A file is not ours.
        OSError: A file cannot be opened.
    """

    def __init__(
        self,
        directory: Directory,
        geometry: Geometry,
        arena: Arena,
        memory: npt.NDArray[np.uint8],
        check: Callable[[], None],
        *,
        collapses: bool = True,
    ) -> None:
        self._collapses = collapses
        self._watcher: Callable[[StoreGrowth], None] = _ignore
        self._telling = threading.Lock()
        self._last_word: str | None = None
        """Why there will be no more memory; empty when all is there."""
        self._directory = directory
        self._geometry = geometry
        self._arena = arena
        self.memory = memory
        self._check = check
        with contextlib.ExitStack() as undo:
            self._turn = Turn(directory.open(ARENA))
            undo.callback(self._turn.close)
            self._data_fd = directory.open(DATA)
            undo.pop_all()
        self._has_turn = False
        self._num_threads = max(1, num_hashing(0) // 2)
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """
        Come back with the first piece there, or soon; the rest goes on behind.

        Raises:
            StoreUnavailableError: The system starts no thread for it.
        """
        steps = self._steps()
        deadline = time.monotonic() + _FIRST_S
        if self._is_done(steps[0]):
            self._try(self._populate, steps[0])
        is_over = self._advance(steps[0])
        while not is_over and time.monotonic() < deadline:
            self._ends.wait(_FIRST_NAP_S)
            is_over = self._advance(steps[0])
        left = steps[1:] if is_over else steps
        if left and not self._ends.is_set():
            thread = threading.Thread(
                target=self._run, args=(left,), name="ucm-populate", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as exc:
                problem = f"the slab's memory gets no thread: {exc}"
                raise StoreUnavailableError(problem) from exc
            self._thread = thread
        else:
            if not self._ends.is_set():  # or why there is no more was told
                self._tell_last("")
            self.abandon()

    def watch(self, tell: Callable[[StoreGrowth], None]) -> None:
        """Have *tell* called as memory comes, and with the last word."""
        with self._telling:
            self._watcher, last_word = tell, self._last_word
        if last_word is not None:
            self._tell(last_word)

    @property
    def is_growing(self) -> bool:
        """Whether an extent may still get its memory: some have none, and we wait for it."""
        at_work = self._thread is not None and self._thread.is_alive()
        return at_work and not self._arena.populated.all()

    def close(self) -> None:
        """Go on no further; waits for the step that is under way. Idempotent."""
        self._ends.set()
        if self._thread is None:
            self.abandon()
        else:
            self._thread.join(_JOIN_S)

    def abandon(self) -> None:
        """Close the files, as a death does, and take no lock. Idempotent."""
        self._ends = _ENDED  # that of a forked child may be locked for ever
        self._let_go()

    def _let_go(self) -> None:
        self._turn.close()
        fd, self._data_fd = self._data_fd, -1
        if fd >= 0:
            os.close(fd)

    def _run(self, steps: list[_Step]) -> None:
        leave_one_cpu()
        give_way()  # a first prompt is computed meanwhile
        try:
            self._go_on(steps)
        finally:  # however late: others wait for the turn
            self._let_go()

    def _go_on(self, steps: list[_Step]) -> None:
        nbytes = self._geometry.data_bytes
        shares = max(_TOLD_SHARES, nbytes // _TOLD_BYTES)
        told = 0
        for step in steps:
            is_mine = not self._is_done(step)
            while not self._advance(step):
                self._ends.wait(_NAP_S)
            if self._ends.is_set():
                return
            # Of what others have populated we lack the page tables.
            if not (self._has_turn and is_mine) and not self._try(self._populate, step):
                return
            share = shares * step.stop // nbytes
            if share > told and step is not steps[-1]:
                told = share
                self._tell("")
        self._tell_last("")

    def _advance(self, step: _Step) -> bool:
        """Do a step if nobody has and it is our turn; return whether it is over."""
        if not self._ends.is_set() and not self._is_done(step):
            self._try(self._grow, step)
        return self._ends.is_set() or self._is_done(step)

    def _try(self, act: Callable[..., None], *arguments: _Step) -> bool:
        """Do something; end all of this, and return False, if it fails."""
        try:
            act(*arguments)
        except StoreUnavailableError:  # lost, or closed meanwhile
            self._ends.set()
        except OSError as exc:
            self._give_up(str(exc))
        return not self._ends.is_set()

    def _grow(self, step: _Step) -> None:
        self._check()
        if not self._take_turn() or self._is_done(step):
            return  # whoever had the turn has done it, and is over
        rest = step
        while rest.start < step.stop:
            stop = self._stop_of(rest)
            if stop == rest.start:
                return
            piece, rest = attrs.evolve(rest, stop=stop), attrs.evolve(rest, start=stop)
            self._populate(piece, collapses=self._collapses)
        self._arena.populated[step.extents] = True

    def _populate(self, step: _Step, *, collapses: bool = False) -> None:
        self._check()
        memory = self.memory[step.start : step.stop]
        where = memory, self._data_fd, step.start
        populate(*where, self._num_threads, collapses=collapses)

    def _is_done(self, step: _Step) -> bool:
        return bool(self._arena.populated[step.extents].all())

    def _take_turn(self) -> bool:
        self._has_turn = self._has_turn or self._turn.take()
        return self._has_turn

    def _stop_of(self, rest: _Step) -> int:
        """
        Return up to where a step may be done now, its start if not; whoever exceeds it is killed.

        Where little is left that is a piece: others look at the same moment, and fill as much.
        """
        least = least_room(self._directory)
        spare = min(_SPARE_BYTES, self._geometry.data_bytes // _SPARE_SHARE)
        if least.left < rest.stop - rest.start + spare:
            self._give_up(f"{least.left} bytes are left of {least.what}")
            return rest.start
        if least.left >= _AMPLE_BYTES:
            return rest.stop
        return min(rest.stop, (rest.start // _PIECE_BYTES + 1) * _PIECE_BYTES)

    def _give_up(self, reason: str) -> None:
        self._tell_last(reason)
        self._ends.set()
        self._turn.close()

    def _tell_last(self, problem: str) -> None:
        with self._telling:  # whoever watches from now on is told at once
            self._last_word = problem
        self._tell(problem)

    def _tell(self, problem: str) -> None:
        geometry, populated = self._geometry, self._arena.populated
        # From the start on: where memory was given back there are gaps.
        first = len(populated) if populated.all() else int(populated.argmin())
        nbytes = min(first * geometry.extent_bytes, geometry.data_bytes)
        self._watcher(StoreGrowth(nbytes, geometry.data_bytes, problem))

    def _steps(self) -> list[_Step]:
        geometry = self._geometry
        many = max(1, _STEP_BYTES // geometry.extent_bytes)
        return [
            _Step(
                slice(at, at + many),
                at * geometry.extent_bytes,
                min((at + many) * geometry.extent_bytes, geometry.data_bytes),
            )
            for at in range(0, geometry.num_extents, many)
        ]
