# SPDX-License-Identifier: Apache-2.0
"""
Who is to report what: the expectations that reports are checked against.

A load is registered when the engine allocates for it, a delayed free when a request
finishes and its blocks are kept. Each is reported once by every rank; then it is over.
"""

import attrs

from ucm.testing.host.requests import KVOutput
from ucm.testing.host.rules import Rule, require

__all__ = ["Registrations"]


@attrs.define
class _Entry:
    """What is open for one request and direction."""

    ranks_left: set[int]
    blocks: frozenset[int] = frozenset()


class Registrations:
    """
    Open loads and open delayed frees.

    Args:
        num_ranks: Workers that each report.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._receiving: dict[str, _Entry] = {}
        self._sending: dict[str, _Entry] = {}
        self.known: set[str] = set()
        """Requests that the engine has."""
        self.loading_now: set[int] = set()
        """Blocks that the step in hand loads before its forward pass."""

    def load_begins(self, request_id: str, blocks: frozenset[int]) -> None:
        """Expect every rank to report a load once."""
        self._receiving[request_id] = _Entry(set(self._ranks), blocks)

    def free_delayed(self, request_id: str) -> None:
        """Expect every rank to report a finished request once."""
        self._sending[request_id] = _Entry(set(self._ranks))

    def ended(self, request_id: str) -> None:
        """Expect nothing more of a request."""
        for entries in (self._receiving, self._sending):
            entry = entries.get(request_id)
            if entry is not None and not entry.ranks_left:
                del entries[request_id]

    def is_open(self, request_id: str) -> bool:
        """Return whether anything of a request is still to be reported."""
        return request_id in self._receiving or request_id in self._sending

    def waiting(self) -> dict[str, list[int]]:
        """Return by request which ranks have yet to report, for messages."""
        return {
            f"{direction} {name}": sorted(entry.ranks_left)
            for direction, entries in (
                ("load of", self._receiving),
                ("free of", self._sending),
            )
            for name, entry in entries.items()
        }

    def check(self, rank: int, output: KVOutput, *, is_single_group: bool) -> None:
        """
        Check what a rank reports, and take it off what is expected.

        Raises:
            HostAssertionError: It may not be reported.
        """
        received = output.finished_recving or set()
        for name in sorted(output.failed_recving - received):
            require(
                holds=False,
                rule=Rule.FAILED_NOT_RECEIVED,
                message="failed_recving without finished_recving",
                request=name,
                rank=rank,
            )
        if output.invalid_block_ids:
            self._check_blocks(
                rank, output.invalid_block_ids, is_single_group=is_single_group
            )
        for name in sorted(received):
            self._take(self._receiving, "finished_recving", name, rank)
        for name in sorted(output.finished_sending or ()):
            self._take(self._sending, "finished_sending", name, rank)

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "loads_expected": len(self._receiving),
            "frees_expected": len(self._sending),
        }

    def _check_blocks(
        self, rank: int, blocks: set[int], *, is_single_group: bool
    ) -> None:
        require(
            is_single_group,
            Rule.FAILED_BLOCKS,
            f"blocks {sorted(blocks)} of a layout with several groups",
            rank=rank,
        )
        loading = set(self.loading_now)
        for entry in self._receiving.values():
            loading |= entry.blocks
        require(
            blocks <= loading,
            Rule.FAILED_BLOCKS,
            f"no load fills blocks {sorted(blocks - loading)}",
            rank=rank,
        )

    def _take(
        self, entries: dict[str, _Entry], what: str, name: str, rank: int
    ) -> None:
        require(
            name in self.known,
            Rule.REPORT_UNKNOWN,
            f"{what}, but the engine has no such request",
            request=name,
            rank=rank,
        )
        entry = entries.get(name)
        if entry is None and entries is self._sending:
            require(
                holds=name not in self.known,
                rule=Rule.SENT_UNFINISHED,
                message=f"{what}, but its blocks are not kept for a save",
                request=name,
                rank=rank,
            )
        require(
            entry is not None,
            Rule.REPORT_UNREGISTERED,
            f"{what}, but nothing was registered",
            request=name,
            rank=rank,
        )
        assert entry is not None  # said before
        require(
            rank in entry.ranks_left,
            Rule.REPORT_TWICE,
            f"{what}, once more",
            request=name,
            rank=rank,
        )
        entry.ranks_left.remove(rank)
