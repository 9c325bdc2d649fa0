# SPDX-License-Identifier: Apache-2.0
"""
What operators and trainers do to a simulated engine: reset, sleep, load weights.

Bytes depend on the version of the weights, so that a block of former weights is wrong
content wherever it is loaded.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tests.integration.vllm.weights_kit import TinyModel
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.worker import WorkerHalf
from ucm.testing.host import FakeHost
from ucm.testing.host.content import Memory

__all__ = ["WeightActs"]


class WeightActs:
    """
    Does one of them, now and then.

    Args:
        host: The engine.
        scheduler: The connector's.
        workers: The connector's, by rank.
        models: By rank, what the connector reads.
        memories: By rank, the KV memory.
        dice: Decide.
        idle: Lets the connector's threads go on.
        seen: Counts what was done.
    """

    def __init__(
        self,
        host: FakeHost,
        scheduler: SchedulerHalf,
        workers: Sequence[WorkerHalf],
        models: Sequence[TinyModel],
        memories: Sequence[Memory],
        *,
        dice: random.Random,
        idle: Callable[[], None],
        seen: Counter[str],
    ) -> None:
        self._host = host
        self._scheduler = scheduler
        self._workers = workers
        self._models = models
        self._memories = memories
        self._dice = dice
        self._idle = idle
        self._seen = seen
        self._version = 1

    def act(self) -> None:
        """Do something that may mean other weights."""
        what = self._dice.choice(["touch", "reset", "renew", "renew", "sleep"])
        if what == "touch":  # the same weights, while requests run
            self._load(self._version, is_seen=True)
        elif self._host.pause(self._idle):
            getattr(self, f"_{what}")()
        else:
            what = "busy"  # the engine would refuse
        self._seen[f"weights {what}"] += 1

    def _reset(self) -> None:
        """Reset the engine's own cache, and perhaps the connector's."""
        order = [self._host.scheduler.pool.forget]
        if self._dice.random() < 0.5:
            order.append(self._reset_connector)
        for each in order:
            each()

    def _reset_connector(self) -> None:
        assert self._scheduler.reset_cache() is True

    def _renew(self) -> None:
        """Load other weights, or those of before, and reset."""
        self._version = self._dice.choice([1, 2, 3])
        self._load(self._version, is_seen=self._dice.random() < 0.5)
        self._reset()

    def _load(self, version: int, *, is_seen: bool) -> None:
        for model in self._models:
            (model.load_weights if is_seen else model.fill)(float(version))
        self._host.load_weights(version - 1)

    def _sleep(self) -> None:
        """Take the memory away for a while."""
        self._reset_connector()
        self._host.scheduler.pool.forget()
        for worker in self._workers:
            worker.unregister()
        kept = [[np.array(row) for row in memory] for memory in self._memories]
        self._idle()
        for memory, before in zip(self._memories, kept, strict=True):
            for row, was in zip(memory, before, strict=True):
                np.testing.assert_array_equal(was, row)
                row[1:] = 0x5A
        for worker in self._workers:
            worker.restore()
