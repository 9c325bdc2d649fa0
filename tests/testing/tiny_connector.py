# SPDX-License-Identifier: Apache-2.0
"""
A small correct connector over a dictionary, to be spoilt in one way at a time.

It saves each full block some steps after it was computed, and fences and defers as it
must. A rank is one step further with each step it is given; nothing here has a thread.
"""

from types import SimpleNamespace

import attrs

from ucm.layout import KVLayout

LAG = 3


@attrs.frozen
class Ticket:
    """Blocks of a request, as (position of the group, block, hash)."""

    number: int
    request_id: str
    blocks: tuple[tuple[int, int, bytes], ...]


@attrs.frozen
class Plan:
    """What the scheduler's side sends."""

    step: int
    loads: tuple[Ticket, ...] = ()
    saves: tuple[Ticket, ...] = ()
    written: frozenset[int] = frozenset()
    deferred: tuple[str, ...] = ()
    padding: bytes = b""


@attrs.frozen
class Report:
    """What the workers' sides send back: numbers of saves that were read."""

    read: tuple[int, ...]

    def aggregate(self, other: "Report") -> "Report":
        """Put another one behind this one."""
        return Report(self.read + other.read)


class TinyScheduler:
    """The scheduler's side; loads within the step if *in_step*."""

    requires_kv_delivery = False

    def __init__(
        self, layout: KVLayout, num_ranks: int, store: dict, *, in_step: bool = False
    ) -> None:
        self.layout = layout
        self.num_ranks = num_ranks
        self.store = store
        self.in_step = in_step
        self.step = self.numbers = 0
        self.requests: dict = {}
        self.asked: dict[str, int] = {}
        self.cursors: dict[str, list[int]] = {}
        self.loads: list[Ticket] = []
        self.reading: dict[int, tuple[str, int]] = {}
        self.deferred: list[str] = []

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {"reading": len(self.reading), "cursors": len(self.cursors)}

    def on_new_request(self, request) -> None:
        """Remember a request."""
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, computed):
        """Return the tokens of the longest stored prefix of whole blocks."""
        self.asked[request.request_id] = computed
        align = self.layout.alignment_tokens
        end = (request.num_tokens - self.in_step) // align * align
        while end > computed and not self._has(request, computed, end):
            end -= align
        if computed % align or end <= computed:
            return 0, False
        return end - computed, not self.in_step

    def _has(self, request, computed: int, end: int) -> bool:
        return all(
            (rank, at, name) in self.store
            for at, group in enumerate(self.layout.groups)
            for i in self._needed(group, computed, end)
            for name in [self._name(request, group, i)]
            for rank in range(self.num_ranks)
        )

    def _needed(self, group, computed: int, end: int) -> range:
        first = max(computed // group.block_tokens, group.window_blocks(end).start)
        return range(first, end // group.block_tokens)

    def _name(self, request, group, i: int) -> bytes:
        return request.block_hashes[self.layout.hash_index(group, i)]

    def update_state_after_alloc(self, request, blocks, external) -> None:
        """Order a load into the blocks behind those computed."""
        if not external:
            return
        wanted = []
        computed = self.asked[request.request_id]
        for at, (group, table) in enumerate(
            zip(self.layout.groups, blocks.get_block_ids(), strict=True)
        ):
            wanted += [
                (at, table[i], self._name(request, group, i))
                for i in self._needed(group, computed, computed + external)
            ]
        self.numbers += 1
        self.loads.append(Ticket(self.numbers, request.request_id, tuple(wanted)))

    def build_connector_meta(self, output):
        """Save what becomes full, fence what is overwritten."""
        self.step += 1
        loads, self.loads = tuple(self.loads), []
        deferred, self.deferred = tuple(self.deferred), []
        written: set[int] = {block for load in loads for _, block, _ in load.blocks}
        saves = []
        for name in output.preempted_req_ids:
            self._forget_life(name)
        loading = {load.request_id for load in loads if self.in_step}
        for name, count in output.num_scheduled_tokens.items():
            if name in loading:
                continue  # if the load fails, what is computed on it is garbage
            saves += self._saves(output, name, count)
        for new in output.scheduled_new_reqs:
            written.update(*new.block_ids)
        for new in output.scheduled_cached_reqs.new_block_ids:
            written.update(*(new or ()))
        return Plan(self.step, loads, tuple(saves), frozenset(written), deferred)

    def _forget_life(self, name: str) -> None:
        """Keep no blocks of an earlier life: the next one may be loading when it ends."""
        self.cursors.pop(name, None)
        for number, (reader, left) in self.reading.items():
            if reader == name:
                self.reading[number] = "", left

    def _saves(self, output, name: str, count: int) -> list[Ticket]:
        request = self.requests[name]
        tables = output.kv_connector_block_state.get_block_ids(name)
        end = request.num_computed_tokens + count
        known = len(request.block_hashes) * self.layout.hash_block_tokens
        cursors = self.cursors.setdefault(name, [0] * len(tables))
        blocks = []
        for at, (group, table) in enumerate(
            zip(self.layout.groups, tables, strict=True)
        ):
            full = min(end, known) // group.block_tokens
            blocks += [
                (at, table[i], self._name(request, group, i))
                for i in range(cursors[at], full)
                if table[i]
            ]
            cursors[at] = full
        if not blocks:
            return []
        self.numbers += 1
        self.reading[self.numbers] = (name, self.num_ranks)
        return [Ticket(self.numbers, name, tuple(blocks))]

    def update_connector_output(self, output) -> None:
        """Count what was read."""
        report = output.kv_connector_worker_meta
        for number in report.read if report else ():
            name, left = self.reading.pop(number)
            if left > 1:
                self.reading[number] = name, left - 1

    def request_finished_all_groups(self, request, blocks):
        """Keep blocks that are still read."""
        name = request.request_id
        self.requests.pop(name, None)
        self.asked.pop(name, None)
        self.cursors.pop(name, None)
        keeps = any(name == each for each, _ in self.reading.values())
        if keeps and name not in self.deferred:
            self.deferred.append(name)
        return keeps, None

    def reset_cache(self) -> bool:
        """Forget everything."""
        self.store.clear()
        return True


class TinyWorker:
    """One worker's side."""

    def __init__(self, rank: int, layout: KVLayout, memory, store: dict) -> None:
        self.rank = rank
        self.layout = layout
        self.memory = memory
        self.store = store
        self.plan: Plan | None = None
        self.done: set[tuple[str, int]] = set()
        self.saves: list[tuple[int, Ticket]] = []
        self.loads: list[tuple[int, Ticket]] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.bad_blocks: set[int] = set()
        self.deferred: set[str] = set()
        self.read: list[int] = []
        self.step = 0

    def _once(self, what: str) -> bool:
        key = what, self.plan.step
        new = key not in self.done
        self.done.add(key)
        return new

    def handle_preemptions(self, plan) -> None:
        """Read what is going to be overwritten."""
        for entry in self.saves.copy():
            if plan.written.intersection(block for _, block, _ in entry[1].blocks):
                self._save(entry)

    def bind_connector_metadata(self, plan) -> None:
        """Take the plan."""
        self.plan = plan
        self.step = plan.step

    def clear_connector_metadata(self) -> None:
        """Forget the plan."""
        self.plan = None

    def start_load_kv(self, context) -> None:
        """Take loads; carry them out if they are needed at once."""
        if self._once("load"):
            for load in self.plan.loads:
                self.loads.append((self.step, load))

    def wait_for_layer_load(self, name) -> None:
        """Do nothing."""

    def save_kv_layer(self, name, layer, metadata) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Take saves."""
        if self._once("save"):
            self.saves += [(self.step, save) for save in self.plan.saves]
            self.deferred.update(self.plan.deferred)

    def get_transfer_results(self, finished):
        """Do what is due, and tell what is over."""
        for entry in self.saves.copy():
            if entry[0] + LAG <= self.step:
                self._save(entry)
        for entry in self.loads.copy():
            if entry[0] + LAG <= self.step:
                self.loads.remove(entry)
                self.load(entry[1])
                self.received.add(entry[1].request_id)
        reading = {save.request_id for _, save in self.saves}
        sent = self.deferred - reading
        self.deferred -= sent
        received, self.received = self.received, set()
        failed, self.failed = self.failed, set()
        return SimpleNamespace(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=failed & received,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell what could not be loaded, once."""
        blocks, self.bad_blocks = self.bad_blocks, set()
        return blocks

    def build_connector_worker_meta(self):
        """Tell which saves were read."""
        read, self.read = self.read, []
        return Report(tuple(read)) if read else None

    def load(self, ticket: Ticket) -> None:
        """Copy blocks into the engine's memory."""
        for at, block, name in ticket.blocks:
            pages = self.store.get((self.rank, at, name))
            if pages is None:
                self.failed.add(ticket.request_id)
                continue
            for row, page in zip(self._rows(at), pages, strict=True):
                self.memory[row][block] = page

    def _save(self, entry: tuple[int, Ticket]) -> None:
        self.saves.remove(entry)
        self.read.append(entry[1].number)
        for at, block, name in entry[1].blocks:
            self.store[self.rank, at, name] = [
                self.memory[row][block].copy() for row in self._rows(at)
            ]

    def _rows(self, at: int) -> list[int]:
        return [row.row_id for row in self.layout.groups[at].rows]


class WorkerInStep(TinyWorker):
    """Loads before the forward pass, and tells of blocks that it could not load."""

    fail_at = 0

    def start_load_kv(self, context) -> None:
        """Load at once."""
        if self._once("load"):
            for load in self.plan.loads:
                self.load(load)
                type(self).fail_at += 1
                if type(self).fail_at % 5 == 0 and load.blocks:
                    _, block, _ = load.blocks[-1]
                    self.memory[0][block] = 0
                    self.bad_blocks.add(block)
