# SPDX-License-Identifier: Apache-2.0
"""
Questions to the store, which may block, in turn on a thread of their own.

Threading: ``ask`` on any thread, ``close`` once.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ucm.blocks import PackedKey
from ucm.cache.pending import Pending
from ucm.errors import (
    PipelineClosedError,
    StoreUnavailableError,
    UCMError,
    WorkerDiedError,
    text_of,
)
from ucm.pipeline.workers import CopyThread
from ucm.stores.abc import StoreStats
from ucm.stores.leases import told_count, told_each
from ucm.stores.wrap import WrapperStore
from ucm.threads import Lock, Threads

__all__ = ["KeptStore", "Questions"]

_T = TypeVar("_T")
_MOST = 1 << 15
"""Questions that wait: a store that hangs would keep their keys without end."""


class KeptStore(WrapperStore):
    """A store that stays open while a question to it does not return, and answers what was asked."""

    is_asked = False

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Ask it; what is no count of the keys is no answer."""
        return told_count("match", super().match(keys), len(keys))

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Ask it; what tells of more or fewer keys is no answer."""
        return told_each("contains", super().contains(keys), len(keys))

    def stats(self) -> StoreStats:
        """Ask it; what is something else is no answer."""
        told = super().stats()
        if not isinstance(told, StoreStats):
            raise StoreUnavailableError(f"stats told {told!r:.80}")
        return told

    def close(self) -> None:
        """Close it, if nobody is in it."""
        if not self.is_asked:
            super().close()


class Questions:
    """
    Asks one after the other.

    Args:
        lock: See ``Pending``.
        threads: Where the thread comes from.
    """

    def __init__(self, lock: Lock, threads: Threads) -> None:
        self._lock = lock
        self._thread = CopyThread("ucm-ask", lambda _: None, threads)
        self._asked: dict[Pending[object], None] = {}
        self._is_closing = self._is_over = False
        self.why_closed = "the cache is closed"
        """To whoever asks once it is."""

    def start(self) -> None:
        """
        Start the thread.

        Raises:
            PipelineClosedError: The system has no more of them.
        """
        try:
            self._thread.start()
        except RuntimeError as exc:
            why = f"the thread of questions did not start: {exc}"
            raise PipelineClosedError(why) from exc

    def ask(self, question: Callable[[], _T]) -> Pending[_T]:
        """
        Have something asked; what it raises is the error of the answer.

        An error that is none of ours is a store's that did not answer: no host can know
        what a store of somebody else's may raise. Nor does one answer before which too
        many wait.
        """
        answer: Pending[_T] = Pending(self._lock)
        if len(self._asked) >= _MOST:
            answer.end(None, StoreUnavailableError(f"{_MOST} questions wait for it"))
            return answer

        def run(answer: Pending[_T]) -> None:
            try:
                if not answer.is_done:
                    answer.end(question())
            except UCMError as exc:
                answer.end(None, exc)
            except BaseException as exc:  # noqa: BLE001 - told where the answer is awaited
                answer.end(None, _unavailable(exc))
            finally:
                self._asked.pop(answer, None)  # type: ignore[arg-type] # whatever type

        def died(answer: Pending[_T], error: WorkerDiedError) -> None:
            self._asked.pop(answer, None)  # type: ignore[arg-type] # whatever type
            answer.end(None, _closed() if self._is_closing else error)

        is_put = False
        try:
            self._asked[answer] = None  # type: ignore[index] # of whatever type
            self._thread.put(run, answer, died)
            is_put = True
        finally:
            if not is_put:  # who asks was interrupted
                self._asked.pop(answer, None)  # type: ignore[arg-type] # whatever type
        if self._is_over:  # perhaps since just now, and a store that hangs ends nothing
            answer.end(None, _closed())
        return answer

    def close(self, timeout: float) -> bool:
        """
        Let what was asked be answered for so long; what is left ends with an error.

        Returns:
            Whether nobody is in the store any more.
        """
        self._is_closing = True
        self._thread.stop()
        is_over = self._thread.join(timeout)
        self._is_over = True
        for answer in list(self._asked):
            answer.end(None, _closed())
        return is_over


def _closed() -> PipelineClosedError:
    return PipelineClosedError("the cache was closed meanwhile")


def _unavailable(error: BaseException) -> StoreUnavailableError:
    told = StoreUnavailableError(text_of(error))
    told.__cause__ = error
    return told
