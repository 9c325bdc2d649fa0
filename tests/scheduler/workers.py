# SPDX-License-Identifier: Apache-2.0
"""
The workers of the small engine: they carry out tickets at their own pace.

A save reads the content of its blocks when a worker gets to it, as late as the fences
allow, and must find what its keys say. Half of the tickets of several requests are not
read before their fence: what the plan says is lost of them is not read at all.
"""

import attrs

from tests.scheduler.model import SetIndex
from tests.scheduler.tables import Request, names_before
from ucm.layout import KVLayout
from ucm.scheduler.messages import Failure, SpanOrder, StepReport, TransferKind

Content = tuple[int, bytes] | None


@attrs.define
class Ticket:
    """A ticket in the hands of the workers."""

    order: SpanOrder
    to_read: set[int]
    to_release: set[int]
    to_settle: set[int]
    stored: bool = True
    lost: set[int] = attrs.Factory(set)

    @property
    def owners(self) -> set[tuple[str, int]]:
        """Whose blocks, by request and generation."""
        return {owner.life for owner in self.order.owners}

    @property
    def is_held(self) -> bool:
        """Whether a rank has not let go of blocks that it saves."""
        return bool(self.to_release) and self.order.kind is TransferKind.SAVE


@attrs.define
class Rank:
    """One worker: what it has to tell."""

    released: list[int] = attrs.Factory(list)
    settled: list[int] = attrs.Factory(list)
    loads_done: list[int] = attrs.Factory(list)
    failures: list[Failure] = attrs.Factory(list)
    deferred: set[tuple[str, int]] = attrs.Factory(set)
    loading: dict[str, set[int]] = attrs.Factory(dict)


class Workers:
    """What the ranks have in hand, and what the engine's blocks really hold."""

    def __init__(self, num_ranks: int) -> None:
        self.index = SetIndex()
        self.content: dict[int, Content] = {}
        self.ranks = [Rank() for _ in range(num_ranks)]
        self.tickets: dict[int, Ticket] = {}
        self.fail_next_load: str | None = None
        self.failed: set[int] = set()
        self.seen: dict[str, int] = {}
        self.told: dict[tuple[str, str], set[int]] = {}

    def count(self, event: str) -> None:
        """Count an event, so that a test can see that it happened."""
        self.seen[event] = self.seen.get(event, 0) + 1

    def read(self, rank: int, transfer_id: int) -> None:
        """Let a rank read the blocks of a save; it finds what the keys say."""
        ticket = self.tickets[transfer_id]
        order = ticket.order
        for at, (block_id, block_hash) in enumerate(
            zip(order.block_ids, order.split_hashes(), strict=True)
        ):
            if at not in ticket.lost:
                assert (order.group_id, block_hash) == self.content[block_id]
        ticket.to_read.remove(rank)
        self.ranks[rank].released.append(transfer_id)

    def fence(self, transfer_id: int, lost: tuple[int, ...] | None) -> None:
        """Let the ranks read a save before its blocks are written, or lose these."""
        ticket = self.tickets[transfer_id]
        if lost is not None and transfer_id % 2:
            self.count("lost")
            assert len(ticket.order.owners) > 1
            ticket.lost.update(lost)
            return
        for rank in list(ticket.to_read):
            self.read(rank, transfer_id)

    def prefix_is_clean(self, layout: KVLayout, request: Request) -> bool:
        """Return whether what the next token reads is what it must be."""
        return all(
            self.content[request.tables[at][i]] == (at, name)
            for at, group in enumerate(layout.groups)
            for i, name in names_before(
                layout, group, request.family, request.computed
            ).items()
        )

    def settle(self, rank: int, transfer_id: int, *, stored: bool) -> None:
        """Let a save of a rank come to its end."""
        ticket = self.tickets[transfer_id]
        ticket.stored &= stored
        self.ranks[rank].settled.append(transfer_id)
        ticket.to_settle.remove(rank)

    def load(self, rank: int, transfer_id: int) -> None:
        """Let a load of a rank come to its end."""
        ticket = self.tickets[transfer_id]
        order = ticket.order
        fail, self.fail_next_load = self.fail_next_load, None
        for block_id, block_hash in zip(
            order.block_ids, order.split_hashes(), strict=True
        ):
            if len(ticket.to_read) == len(self.ranks):
                self.content[block_id] = (order.group_id, block_hash)
        if fail is not None:
            self.count(fail)
            bad = order.split_hashes()[-1]
            self.ranks[rank].failures.append(
                Failure(
                    transfer_id=transfer_id,
                    request_id=order.request_id,
                    generation=order.generation,
                    group_id=order.group_id,
                    bad_hash=bad if fail == "corrupt" else b"",
                    reason=fail,
                )
            )
            self.failed.add(order.generation)
        if order.generation in self.failed:
            self.content.update(dict.fromkeys(order.block_ids))
        ticket.to_read.remove(rank)
        self.ranks[rank].loads_done.append(transfer_id)

    def load_everywhere(self, order: SpanOrder) -> None:
        """Let a load come to its end on all ranks, within its step."""
        for rank in range(len(self.ranks)):
            self.load(rank, order.transfer_id)

    def work(self, rank: int, pick: int, *, stored: bool = True) -> bool:
        """Let a rank do one thing of those that it could do; tell whether it did."""
        todo = [
            transfer_id
            for transfer_id, ticket in self.tickets.items()
            if rank in ticket.to_read
            or (ticket.order.kind is TransferKind.SAVE and rank in ticket.to_settle)
        ]
        if not todo:
            return False
        transfer_id = todo[pick % len(todo)]
        ticket = self.tickets[transfer_id]
        if ticket.order.kind is TransferKind.LOAD:
            self.load(rank, transfer_id)
        elif rank in ticket.to_read:
            self.read(rank, transfer_id)
        else:
            self.settle(rank, transfer_id, stored=stored)
        return True

    def take_report(self, number: int) -> StepReport:
        """Return what a rank has to tell, and forget it."""
        rank = self.ranks[number]
        report = StepReport(
            rank=number,
            released=tuple(rank.released),
            settled_saves=tuple(rank.settled),
            loads_done=tuple(rank.loads_done),
            failures=tuple(rank.failures),
        )
        rank.released, rank.settled = [], []
        rank.loads_done, rank.failures = [], []
        self._note(report)
        return report

    def take_sent(self, number: int) -> set[str]:
        """Return the deferred requests of which a rank has released everything."""
        rank = self.ranks[number]
        waiting = set[tuple[str, int]]()
        for ticket in self.tickets.values():
            if number in ticket.to_release:
                waiting |= ticket.owners
        sent, rank.deferred = rank.deferred - waiting, rank.deferred & waiting
        return {request_id for request_id, _ in sent}

    def take_received(self, number: int) -> list[str]:
        """Return the requests whose loads have all ended on a rank."""
        loading = self.ranks[number].loading
        received = [request_id for request_id, ids in loading.items() if not ids]
        for request_id in received:
            del loading[request_id]
        return received

    def all_told(self, direction: str, request_id: str, rank: int) -> bool:
        """Take note that a rank told of a request; return whether all have."""
        told = self.told.setdefault((direction, request_id), set())
        assert rank not in told
        told.add(rank)
        if len(told) < len(self.ranks):
            return False
        del self.told[direction, request_id]
        return True

    def _note(self, report: StepReport) -> None:
        for transfer_id in report.released:
            self.tickets[transfer_id].to_release.remove(report.rank)
        for transfer_id in report.loads_done:
            ticket = self.tickets[transfer_id]
            ticket.to_release.remove(report.rank)
            ticket.to_settle.remove(report.rank)
            loading = self.ranks[report.rank].loading
            loading[ticket.order.request_id].remove(transfer_id)
        for failure in report.failures:
            if failure.bad_hash:
                for shard in range(len(self.ranks)):
                    self.index.drop(failure.group_id, [failure.bad_hash], shard)
        for transfer_id, ticket in list(self.tickets.items()):
            if ticket.to_settle or ticket.to_release:
                continue
            if not any(transfer_id in rank.settled for rank in self.ranks):
                order = self.tickets.pop(transfer_id).order
                if order.kind is TransferKind.SAVE and ticket.stored:
                    hashes = enumerate(order.split_hashes())
                    kept = [each for at, each in hashes if at not in ticket.lost]
                    self.index.put(order.group_id, kept, len(self.ranks))
