# SPDX-License-Identifier: Apache-2.0
"""
How an engine's processes are while no step tells of it.

vLLM carries our numbers to its front end with the outputs of steps: an engine that is
idle, or hangs, tells nothing, and what was told last would stand for good. So each
process of an engine has a thread that looks every five seconds, whatever the engine does,
and leaves its gauges where the front end finds them (``signs``); that one reads them as
often (``stats``). Where it sees none, as those of another machine, steps alone tell.

Who asks in the slab's directory, as ``ucm top`` does, is told at once (``ucm.status``).
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.signs import (
    DIRECTORY,
    VERSION,
    Sign,
    leave,
    name_of,
    sweep,
    sweep_former,
)
from ucm.integration.vllm.worker import WorkerHalf
from ucm.metrics import Counters
from ucm.status import StatusServer, serve_status
from ucm.tracing import Log, num_dropped

__all__ = ["Vitals", "begin_vitals"]

_PERIOD_S: Final = 5.0
_JOIN_S: Final = 1.0


def begin_vitals(vllm_config: Any, half: object) -> "Vitals | None":  # noqa: ANN401 - vLLM's
    """Have one half of a connector looked after; None where there is nothing to see."""
    engine_id = getattr(vllm_config.kv_transfer_config, "engine_id", None)
    if not engine_id:
        return None
    vitals = None
    if isinstance(half, SchedulerHalf):
        vitals = Vitals(engine_id, "scheduler", half.counters, half.log, half.refresh)
        vitals.answer(half.store.directory, half.counts)
    elif isinstance(half, WorkerHalf):
        role = f"worker-{vllm_config.parallel_config.rank}"
        vitals = Vitals(engine_id, role, half.counters, half.log)
        vitals.answer(half.store.directory, half.counts)
    if vitals is not None:
        vitals.start()
    return vitals


@attrs.define
class Vitals:
    """
    One process's thread that looks how things stand.

    Args:
        engine_id: As the front end knows it.
        role: Which process, such as ``worker-0``.
        counters: Where gauges are; lost lines of the log are counted there.
        log: The process's log.
        look: Brings gauges up to date; may wait, and must be safe on another thread.
        directory: Where to leave them.
        clock: The machine's monotonic one, in seconds.
    """

    engine_id: str
    role: str
    counters: Counters
    log: Log
    look: Callable[[], None] = lambda: None
    directory: Path = DIRECTORY
    clock: Callable[[], float] = time.monotonic
    _began: float = attrs.field(init=False)
    _path: Path = attrs.field(init=False)
    _over: threading.Event = attrs.field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = attrs.field(init=False, default=None)
    _server: StatusServer | None = attrs.field(init=False, default=None)

    @_began.default
    def _now(self) -> float:
        return self.clock()

    @_path.default
    def _name(self) -> Path:
        return self.directory / name_of(self.engine_id, self.role)

    def start(self) -> None:
        """Look now and then, until ``close``."""
        self._thread = threading.Thread(
            target=self._run, name="ucm-vitals", daemon=True
        )
        self._thread.start()

    def answer(self, slab: Path | None, count: Callable[[], dict[str, int]]) -> None:
        """
        Tell who asks in a slab's directory, until ``close``.

        Args:
            slab: Where; None: the store has no directory, and nobody asks.
            count: Returns sizes; must be safe on another thread.
        """

        def told() -> dict[str, object]:
            self.look()
            now = self.counters.snapshot()
            numbers = {"counters": now.counters, "gauges": now.gauges}
            return {"engine": self.engine_id, "sizes": count(), **numbers}

        self._server = serve_status(slab, self.role, told)

    def close(self) -> None:
        """End the threads and take away what they left. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._take_away()

    def _take_away(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def tell(self) -> None:
        """Look once, and leave what there is to tell."""
        self.look()
        self.counters.reach("ucm_dropped_log_lines_total", num_dropped(self.log))
        sign = Sign(VERSION, self.clock(), self.counters.snapshot().gauges)
        with contextlib.suppress(OSError):
            leave(self._path, sign)
        sweep_former(self._path, self._began, sign.at)

    def _run(self) -> None:
        self.tell()
        sweep(self._path)
        while not self._over.wait(_PERIOD_S):
            self.tell()
        self._take_away()  # a look that took long has left one after the end
