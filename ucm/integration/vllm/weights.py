# SPDX-License-Identifier: Apache-2.0
"""
What a rank knows of its weights, and how it notices that they are being written.

The scheduler numbers its doubts (``ucm.scheduler.weights``); a plan brings the number of
the latest. A new number has the weights read on a thread of its own, and the next report
answers. A rank that sees its weights being written knows before the scheduler does: from
then on it neither saves nor loads until a plan comes that knows as well.

No hook says that weights are written. The methods by which engines do it are watched on
the objects themselves, by attributes that ``close`` takes back. What is not there is not
watched; a digest needs no watching.

Threading: the engine's thread, on which it also writes weights; the reading has its own.
"""

import contextlib
import functools
import inspect
import secrets
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ucm.integration.digest import Reading, read_weights
from ucm.scheduler.messages import WeightsNews
from ucm.threads import Event, Threads
from ucm.tracing import WEIGHTS_READ, Log

__all__ = ["EngineParts", "WeightsKeeper", "calling_parts"]

_MAX_FRAMES = 40
"""Between a hook and the worker that asked for it; about six."""
_WRITERS = (
    "finish_weight_update",
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
)
_DRAFTERS = ("drafter", "speculator")


@attrs.frozen(eq=False)
class EngineParts:
    """
    What of an engine has to do with weights, in one rank.

    Args:
        models: All whose layers write KV.
        owners: Runner and worker.
    """

    models: tuple[torch.nn.Module, ...] = ()
    owners: tuple[Any, ...] = ()


def calling_parts() -> EngineParts:
    """
    Return what of the engine calls a connector's hook.

    A connector is not given the model whose blocks it stores. Whoever registers the KV
    cache has it, in all releases: the runner, and behind it the worker.
    """
    owners: list[Any] = []
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        one = frame.f_locals.get("self")
        if callable(getattr(type(one), "get_model", None)) and one not in owners:
            owners.append(one)
        frame = frame.f_back
    models = [owner.get_model() for owner in owners[:1]]
    for owner in owners[:1]:
        drafters = (getattr(owner, name, None) for name in _DRAFTERS)
        models += [getattr(each, "model", None) for each in drafters]
    found = dict.fromkeys(m for m in models if isinstance(m, torch.nn.Module))
    return EngineParts(tuple(found), tuple(owners))


@attrs.define(eq=False)
class _Job:
    """
    A reading under way.

    Args:
        given_up: Set by the engine's thread, when nobody wants it any more.
        over: Set by the reading's own thread, behind ``reading``.
        reading: None if it was given up.
    """

    given_up: Event
    over: Event
    reading: Reading | None = None


@attrs.frozen(eq=False)
class _Watched:
    """
    A method that is watched on its object.

    Args:
        owner: The object.
        name: Of the method.
        call: What stands in the method's place.
        former: What stood there before: another connector's, or None for the class's.
    """

    owner: Any
    name: str
    call: Callable[..., Any]
    former: Callable[..., Any] | None

    def take_back(self) -> None:
        """Leave the object as it was, unless somebody else stands before us now."""
        if vars(self.owner).get(self.name) is not self.call:
            return
        if self.former is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.former)


class WeightsKeeper:
    """
    Answers the scheduler's doubts about one rank's weights.

    Reads them once when it is made: only then it is sure what they are.

    Args:
        parts: Of the engine; without models nothing can be told.
        threads: Where the clock and threads come from.
        log: Told how long a reading took.
        on_sleep: Called before the engine takes memory away.
        on_wake: Called when it is back.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        threads: Threads,
        log: Log,
        on_sleep: Callable[[], None],
        on_wake: Callable[[], None],
    ) -> None:
        self._models = parts.models
        self._threads = threads
        self._log = log
        self._epoch = 0
        self._job: _Job | None = None
        self._is_wanted = self._is_written = False
        self._has_stepped = self._is_torn = False
        self._secret = b""
        base = self._read(lambda: False)
        assert base is not None  # nobody gave it up
        self._last = base
        self._answer: bytes | None = self._name(base)
        self._base = self._name(base)
        self._told: object = None
        self._is_closed = False
        self._watched: list[_Watched] = []
        for owner in (*parts.models, *parts.owners):
            for name in _WRITERS:
                self._watch(owner, name, before=self.written, after=self.written)
        for owner in parts.owners:
            self._watch(owner, "sleep", before=on_sleep)
            self._watch(owner, "discard", before=on_sleep)
            self._watch(owner, "wake_up", after=on_wake)

    @property
    def is_written(self) -> bool:
        """Whether weights were written that the scheduler does not know of yet."""
        return self._is_written

    def begin_step(self, epoch: int) -> None:
        """Take the number that a plan brings; a new one has the weights read."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._is_written = self._has_stepped = False
            self._is_wanted, self._answer = True, None
            self._give_up()
        self._has_stepped |= self._is_written
        if self._is_wanted and self._job is None:
            job = _Job(self._threads.event(), self._threads.event())
            run = functools.partial(self._run, job)
            with contextlib.suppress(RuntimeError):  # no thread; a later step tries
                self._threads.thread(run, "ucm-weights").start()
                self._job = job

    def written(self) -> None:
        """Take note that the weights are written; on the engine's thread."""
        # What a step computed in between is of weights that nobody has read.
        self._is_torn |= self._has_stepped
        self._is_written = True
        self._is_wanted, self._answer = False, None
        self._give_up()

    def news(self) -> WeightsNews | None:
        """Return what the scheduler does not know yet."""
        self._take_over()
        present = (self._epoch, self._is_written, self._answer)
        has_news = self._is_written or self._answer is not None
        if not has_news or present == self._told:
            return None
        self._told = present
        is_torn = self._is_torn
        self._is_torn &= self._is_written
        return WeightsNews(
            epoch=self._epoch,
            is_written=self._is_written,
            is_torn=is_torn,
            digest=self._answer,
            base=self._base,
        )

    def wait(self, timeout: float) -> None:
        """Block up to *timeout* seconds for an answer."""
        if self._job is not None:
            self._job.over.wait(timeout)

    def pause(self, timeout: float) -> bool:
        """
        End a reading, before memory goes away; the next step begins it again.

        Returns:
            Whether it has ended within *timeout* seconds.
        """
        job = self._job
        self._give_up()
        return job is None or job.over.wait(timeout)

    def close(self, timeout: float) -> None:
        """End a reading and watch nothing any more. Idempotent."""
        self._is_wanted, self._is_closed = False, True
        self.pause(timeout)
        watched, self._watched = self._watched, []
        for each in watched:
            each.take_back()

    def _watch(
        self,
        owner: Any,  # noqa: ANN401 - whatever the engine has
        name: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        method = getattr(owner, name, None)
        if not callable(method) or not hasattr(owner, "__dict__"):
            return

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the engine's
            if before is not None and not self._is_closed:
                before()
            try:
                return method(*args, **kwargs)
            finally:
                if after is not None and not self._is_closed:
                    after()

        former = vars(owner).get(name)
        setattr(owner, name, call)
        self._watched.append(_Watched(owner, name, call, former))

    def _give_up(self) -> None:
        if self._job is not None:
            self._job.given_up.set()
            self._job = None

    def _run(self, job: _Job) -> None:
        """Read, on a thread of its own."""
        try:
            job.reading = self._read(job.given_up.is_set)
        finally:
            job.over.set()

    def _take_over(self) -> None:
        """Take the answer of a reading that is over."""
        job = self._job
        if job is None or not job.over.is_set():
            return
        self._job, self._is_wanted = None, False
        self._answer = b"" if job.reading is None else self._name(job.reading)

    def _read(self, is_given_up: Callable[[], bool]) -> Reading | None:
        started = self._threads.monotonic()
        reading = read_weights(self._models, is_given_up)
        if reading is not None and self._models:
            took = self._threads.monotonic() - started
            self._log.info(WEIGHTS_READ, epoch=self._epoch, elapsed_s=round(took, 3))
        return reading

    def _name(self, reading: Reading) -> bytes:
        """Return what is equal for equal weights; empty when that cannot be told."""
        if not reading.hides_as(self._last):
            self._secret = secrets.token_bytes(16)
        self._last = reading
        return reading.digest and reading.digest + self._secret
