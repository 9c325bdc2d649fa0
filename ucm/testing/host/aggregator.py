# SPDX-License-Identifier: Apache-2.0
"""
The outputs of all ranks as one, after ``KVOutputAggregator`` of vLLM 0.32.

A request counts as sent or received once every rank has said so, in whatever step.
"""

from collections.abc import Iterable

from ucm.testing.host.requests import KVOutput

__all__ = ["Aggregator"]


class Aggregator:
    """
    Counts the reports of ranks.

    Args:
        num_ranks: Reports that each request needs.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._receiving: dict[str, int] = {}
        self._sending: dict[str, int] = {}
        self._failed: set[str] = set()

    def aggregate(self, outputs: Iterable[KVOutput]) -> KVOutput:
        """Return what the scheduler is to hear."""
        received: set[str] = set()
        sent: set[str] = set()
        told = KVOutput(expected_finished_count=self._num_ranks)
        for output in outputs:
            self._count(self._receiving, output.finished_recving, received)
            self._count(self._sending, output.finished_sending, sent)
            told.invalid_block_ids |= output.invalid_block_ids
            self._failed |= output.failed_recving
            metadata = output.kv_connector_worker_meta
            if told.kv_connector_worker_meta is None:
                told.kv_connector_worker_meta = metadata
            elif metadata is not None:
                told.kv_connector_worker_meta = told.kv_connector_worker_meta.aggregate(
                    metadata
                )
        told.failed_recving = self._failed & received
        self._failed -= received
        told.finished_recving = received or None
        told.finished_sending = sent or None
        return told

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "half_received": len(self._receiving),
            "half_sent": len(self._sending),
            "half_failed": len(self._failed),
        }

    def _count(
        self, counts: dict[str, int], names: set[str] | None, complete: set[str]
    ) -> None:
        for name in names or ():
            counts[name] = counts.get(name, 0) + 1
            if counts[name] == self._num_ranks:
                del counts[name]
                complete.add(name)
