# SPDX-License-Identifier: Apache-2.0
"""
The library without a face: store, device and runtime, for callers on any thread.

The pipeline runs on a loop of ours, on a thread of its own: a host's loop is never held
by what becomes of tickets, and one that ends with work pending leaves it to be finished
(``docs/decisions/0013-whose-loop.md``). What a call comes to is a ``Pending``; a face
says how that is waited for.

Threading: the verbs are called on any thread and never block; ``open`` and ``close``
do. Notices are handed out on our loop, but not while ``close`` has the runtime.
"""

import contextlib
import math
from collections import deque
from collections.abc import Sequence

from ucm.affinity import AffinityPlan
from ucm.agent.client import AgentClient
from ucm.blocks import KeySpace, ShardId
from ucm.cache.asking import Asking
from ucm.cache.fetches import Fetches
from ucm.cache.forked import WHY_CLOSED, left_in_children
from ucm.cache.measuring import measured, statistics_of
from ucm.cache.orders import Asked, Orders
from ucm.cache.pending import Pending
from ucm.cache.questions import KeptStore, Questions
from ucm.cache.room import Room
from ucm.cache.serving import Serving
from ucm.cache.transfers import Statistics, Transfer
from ucm.cache.users import BlockUsers
from ucm.config import UCMConfig
from ucm.devices.abc import Device, EventRef, Fence
from ucm.layout import KVLayout
from ucm.metrics import Counters, Snapshot
from ucm.pipeline.outcomes import Outcome, OutcomeKind
from ucm.pipeline.recorder import Notice
from ucm.pipeline.save import OwnStages
from ucm.pipeline.tickets import Direction
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.spans import TicketBytes
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import Log

__all__ = ["Core"]

_TURN = 256  # taken in at once: others on our loop have their turn between


class Core(Asking):
    """
    A cache that is served.

    Args:
        config: Settings.
        layout: Groups and rows of the host's blocks.
        device: Registered with the host's memory; closed with this.
        keyspace: Under which blocks are stored.
        store: Opened; closed with this.
        shard: Which part of each block this process holds.
        log: The process's log; the caller's.
        threads: Where the clock, threads and locks come from.
        before_commit: Stages of the host's own.
        client: Of the agent that fetches from tiers; closed with this.
        affinity: Where copy threads run; as the system pleases if not given.
    """

    def __init__(
        self,
        config: UCMConfig,
        layout: KVLayout,
        device: Device,
        keyspace: KeySpace,
        store: Store,
        *,
        shard: ShardId,
        log: Log,
        threads: Threads = SYSTEM,
        before_commit: OwnStages | None = None,
        client: AgentClient | None = None,
        affinity: AffinityPlan | None = None,
    ) -> None:
        self.timeout, self.log = config.timeout, log
        self.new_event, self.now = threads.event, threads.monotonic  # for who waits
        self._device, self._digest = device, keyspace.digest
        self._counters = Counters()
        self._kept = KeptStore(store)
        self._runtime = Runtime(
            self._kept,
            device,
            layout=layout,
            config=config,
            counters=self._counters,
            log=log,
            shard=shard,
            threads=threads,
            before_commit=before_commit,
            affinity=affinity,
        )
        queue = config.queue
        sizes = TicketBytes.host(queue.span_bytes, is_synchronous=device.is_synchronous)
        orders = Orders(layout, shard, self._digest, sizes)
        self._lock, self._closing = threads.lock(), threads.lock()
        self._ends = threads.lock()  # of every ``Pending``: they end under the other
        super().__init__(self._kept, orders, Questions(self._ends, threads), threads)
        self.fetches = Fetches(
            *(client, self._kept, self._questions, orders),
            *(config, self._counters, threads),
        )
        self._asked: deque[tuple[Transfer, Asked, Fence, bool]] = deque()
        self._taking = threads.lock()  # of who makes tickets of what was asked for
        self._unwanted: deque[Transfer] = deque()
        self._open: dict[int, Transfer] = {}  # by the number of each ticket under way
        self._users = BlockUsers()
        self._room: Room[tuple[SpanOrder, Fence]] = Room(queue.tickets, queue.nbytes)
        self._serving = Serving(self._runtime, self._attend, self._questions, threads)
        self._is_polled, self._is_forked = True, False
        left_in_children(self)

    def open(self) -> None:
        """
        Start to serve; blocks until the pipeline runs.

        Raises:
            ConfigError: ``queue.staging_bytes`` is less than a block.
            PipelineClosedError: The loop did not come up.
        """
        self._is_open = True
        self._questions.start()
        if (refusal := self._serving.start(self.timeout.stuck)) is not None:
            self.close()
            raise refusal

    def save(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int,
        place: Place,
        after: EventRef | None,
        waits: bool,
    ) -> Transfer:
        """Have blocks saved; see ``Cache.save``."""
        if not self._is_open:  # a host's loop stands still: each call counts
            self._check_open()
        now_ns = int(self._threads.monotonic() * 1e9)
        asked = self._orders.check(Direction.SAVE, keys, blocks, group, place, now_ns)
        return self._begin(asked, after, waits=waits)

    def load(
        self, keys: Sequence[bytes], blocks: Sequence[int], *, group: int, place: Place
    ) -> Transfer:
        """Have blocks loaded; see ``Cache.load``."""
        self._check_open()
        asked = self._orders.check(
            Direction.LOAD, keys, blocks, group, place, self._now_ns()
        )
        if asked.blocks:
            self.touch(keys, group=group, place=place)
        return self._begin(asked, None, waits=False)

    def cancel(self, transfer: Transfer) -> None:
        """
        Want nothing more of a save or load; what is stored by then stays.

        Its blocks are released as soon as no copy touches them.
        """
        self._unwanted.append(transfer)
        self._have_attended()

    def statistics(self) -> Pending[Statistics]:
        """Ask how things stand."""
        self._check_open()
        return self._questions.ask(self._statistics)

    def measure(self) -> Snapshot:
        """Return all metrics since the start; any thread that may wait a second."""
        return measured(self._counters, self.open_transfers(), self)

    def open_transfers(self) -> list[Transfer]:
        """Return what is not over, in the order in which it was asked for."""
        if self._is_forked:
            return []
        with self._taking, self._lock:
            asked = [each[0] for each in self._asked]
            return list(dict.fromkeys([*self._open.values(), *asked]))

    def close(self) -> None:
        """
        Drain for ``timeout.shutdown``, end the rest, and let go of all. Idempotent.

        Every ``Pending`` has its end before the store is closed, which may take long.
        """
        if self._is_forked:
            return
        with self._closing:
            with self._lock:
                was_open, self._is_open, self._is_polled = self._is_open, False, False
            if not was_open:
                return
            self._take_in()
            with self._lock:
                in_line = self._room.drain()
            for order, _ in in_line:
                self._end_here(order.transfer_id, OutcomeKind.CANCELLED, Reason.CLOSED)
            self.fetches.close()
            self._kept.is_asked = not self._questions.close(self.timeout.shutdown)
            self._runtime.close(self._tell_all)

    def _tell_all(self) -> None:
        """Tell of each end, now that nothing runs; of a copy that goes on nobody sees it."""
        self._serving.join(self.timeout.shutdown)
        self._is_polled = True
        self._attend()
        for transfer in self.open_transfers():
            transfer.give_up()
        self._open.clear()

    def leave(self) -> None:
        """Be closed in a forked child, where nothing of ours runs; see ``forked``."""
        self._is_forked, self._is_open, self.fetches.is_open = True, False, False
        self._questions.why_closed = WHY_CLOSED

    # On whatever thread asks.

    def _begin(self, asked: Asked, after: EventRef | None, *, waits: bool) -> Transfer:
        """
        Take note of a save or load; what can be done later is.

        A host's loop stands still for as long as this takes.
        """
        transfer = Transfer(asked.direction, self._ends)
        if not asked.blocks:
            transfer.begin(())
            return transfer
        fence, is_begun = self._device.lease(after), False
        try:
            is_alone = self._ask_for(transfer, asked, fence, waits=waits)
            if transfer.is_load:
                self.fetches.loading(transfer, asked)
            if is_alone or transfer.is_load:  # for which somebody waits
                self._have_attended()
            is_begun = True
        finally:
            if not is_begun:
                self.undo(transfer)
        return transfer

    def _ask_for(
        self, transfer: Transfer, asked: Asked, fence: Fence, *, waits: bool
    ) -> bool:
        """Stand behind those who asked before; return whether there are none."""
        take = self._users.write if transfer.is_load else self._users.read
        entry = (transfer, asked, fence, waits)
        with self._lock:
            is_alone = not self._asked
            try:
                self._check_open()
                take(asked.blocks, transfer)
                self._asked.append(entry)
            finally:
                if not self._asked or self._asked[-1] is not entry:
                    self._users.undo(asked.blocks, transfer)
                    fence.close()
        return is_alone

    def undo(self, transfer: Transfer) -> None:
        """Let nothing go on for a caller who was interrupted, as by Ctrl-C."""
        with self._taking, self._lock:
            is_asked = transfer.orders or any(transfer is e[0] for e in self._asked)
        over = self.new_event()
        if is_asked and transfer.released.subscribe(over.set):
            self.cancel(transfer)
            over.wait(self.timeout.stuck)

    def _have_attended(self) -> None:
        (self._serving.wake if self._serving.is_serving else self._attend)()

    def _take_in(self, most: float = math.inf) -> None:
        """Make tickets of what was asked for by now; no signal's handler may cut in."""
        with self._taking:
            while self._asked and most > 0:
                most -= 1
                with self._lock:
                    transfer, asked, fence, waits = self._asked.popleft()
                orders = self._orders.of(asked)
                transfer.begin(orders)
                with self._lock:
                    self._users.count()
                    self._open.update(dict.fromkeys(transfer.orders, transfer))
                    if not transfer.is_load and not waits:
                        for order in orders:
                            self._room.enter(self._orders.nbytes(order))
                if waits:
                    self._stand_in_line(orders, fence)
                else:
                    self._runtime.submit(self._digest, orders, fence)

    def _stand_in_line(self, orders: Sequence[SpanOrder], fence: Fence) -> None:
        """Have orders wait for room, and refuse those for which the line is full."""
        until = self._threads.monotonic() + self.timeout.save
        for order in orders:
            number, nbytes = order.transfer_id, self._orders.nbytes(order)
            with self._lock:
                is_in_line = self._room.wait(number, (order, fence), nbytes, until)
            if not is_in_line:
                self._end_here(number, OutcomeKind.REFUSED, Reason.QUEUE_TICKETS)
        self._look_at_line()

    def _look_at_line(self) -> None:
        """Let those in for whom there is room, and end those who waited too long."""
        while True:
            has_failed = self._runtime.failure  # and nobody tells what became of more
            now = math.inf if has_failed else self._threads.monotonic()
            with self._lock:
                first = self._room.next(now)
                if first is None:
                    return
                (order, fence), is_in = first
                if is_in:
                    self._runtime.submit(self._digest, [order], fence)
            if not is_in:
                why = Reason.RUNTIME_FAILED if has_failed else Reason.DEADLINE
                self._end_here(order.transfer_id, OutcomeKind.CANCELLED, why)

    def _end_here(self, transfer_id: int, kind: OutcomeKind, reason: Reason) -> None:
        """End a part of a save that the pipeline has not heard of."""
        with self._lock:
            transfer = self._open.pop(transfer_id, None)
            if transfer is None:
                return  # a close has ended it
            self._users.give_back(transfer.orders[transfer_id].block_ids)
            transfer.hear(transfer_id, None)
            transfer.hear(transfer_id, Outcome(kind, reason))
        transfer.look()

    # On our loop.

    def _attend(self) -> None:
        """Take in what was asked for, and hand out what there is to poll."""
        with self._lock:  # of those who attend; who appends needs none
            unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]
        is_turn = self._serving.is_serving and not unwanted
        self._take_in(_TURN if is_turn else math.inf)  # behind which these have begun
        self._let_go(unwanted)
        with self._lock:
            notices = self._runtime.poll() if self._is_polled else []
        with contextlib.ExitStack() as each:  # one that fails loses no others
            each.callback(self._look_at_line)
            for notice in reversed(notices):
                each.callback(self._note, notice)
        if self._asked:
            self._serving.wake()

    def _let_go(self, unwanted: Sequence[Transfer]) -> None:
        """End what nobody wants any more; what is left ends with the close."""
        for orders in [each.orders for each in unwanted]:
            with self._lock:
                if not self._is_open:
                    return
                wanted = [each for each in orders if each in self._open]
                in_line = self._room.withdraw(orders)
            self._runtime.abandon(wanted, Reason.WITHDRAWN)
            for order, _ in in_line:
                self._end_here(
                    order.transfer_id, OutcomeKind.CANCELLED, Reason.WITHDRAWN
                )

    def _note(self, notice: Notice) -> None:
        transfer_id, outcome = notice.ticket.transfer_id, notice.outcome
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return
            order = transfer.orders[transfer_id]
            if outcome is None:
                self._users.give_back(order.block_ids)
            elif not transfer.is_load:
                self._room.leave(self._orders.nbytes(order))
            if transfer.hear(transfer_id, outcome):
                del self._open[transfer_id]
        transfer.look()
        if transfer.is_load and outcome is not None and outcome.reason is Reason.STUCK:
            transfer.give_up()

    def _statistics(self) -> Statistics:
        self._take_in()
        return statistics_of(
            self._counters,
            self._store.stats(),
            open_transfers=len(self.open_transfers()),
            waiting_parts=self._room.num_waiting,
            failure=self._runtime.failure,
        )
