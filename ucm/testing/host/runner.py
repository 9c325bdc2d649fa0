# SPDX-License-Identifier: Apache-2.0
"""
One rank's model runner: calls the hooks of a step in order, and computes.

The order is that of vLLM's two model runners, with their variants. The first calls
``handle_preemptions`` before it overwrites anything by itself, the second after. With
speculation results are asked for before ``wait_for_save``, a drafter runs in between, and
on the first runner stages before the last never come to it. A forward pass may run in
parts, and each hook may be called again.
"""

import pickle  # noqa: TID251 - what the engine does with metadata
from collections import Counter
from collections.abc import Callable

import attrs

from ucm.layout import KVLayout
from ucm.testing.host.choices import Choices
from ucm.testing.host.content import POISON, Memory, Pages
from ucm.testing.host.hooks import WorkerHooks
from ucm.testing.host.requests import KVOutput
from ucm.testing.host.rules import HostAssertionError, Rule, require
from ucm.testing.host.settings import HostSettings
from ucm.testing.host.steps import Step

__all__ = ["FakeRunner", "ForwardContext", "Wrong"]


@attrs.frozen
class ForwardContext:
    """What a connector is given of a forward pass; nothing is computed if None."""

    attn_metadata: dict[str, object] | None


@attrs.frozen
class Wrong:
    """Content that was found wrong before a forward pass."""

    error: HostAssertionError
    block: int
    reader: str


class FakeRunner:
    """
    One rank.

    Args:
        rank: Which.
        hooks: The connector's side.
        memory: ``[rows][blocks, page]``.
        layout: The engine's groups, with this rank's rows.
        shard: Which part of a block it computes; ranks of one part compute the same.
        choices: Take the decisions.
        settings: The engine.
        seen: Counts what happens.
        between: See ``FakeHost``.
    """

    def __init__(
        self,
        rank: int,
        hooks: WorkerHooks,
        memory: Memory,
        layout: KVLayout,
        *,
        shard: int,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
        between: Callable[[], None],
    ) -> None:
        self.rank = rank
        self._shard = shard
        self._hooks = hooks
        self._memory = memory
        self._layout = layout
        self._pages = Pages(layout)
        self._choices = choices
        self._settings = settings
        self._odds = settings.odds
        self._between = between
        self._seen = seen
        self._context = ForwardContext(None)
        self._wrong: list[Wrong] = []
        for row in range(layout.num_rows):
            memory[row][:] = POISON
        # By layer: the group and row that it reads first, or writes last.
        self._place: dict[str, tuple[int, int]] = {
            name: (at, row.row_id)
            for at, group in enumerate(layout.groups)
            for row in group.rows
            for name in row.layer_names
        }
        self.layers = [name for name in layout.layers if name in self._place]
        drafts = self.layers[len(self.layers) - settings.draft_layers :]
        self.later = frozenset(drafts if settings.defers_saves else ())
        """Layers that run after results were asked for."""
        places = [(self._place[name], name) for name in self.layers]
        firsts, lasts = dict(reversed(places)), dict(places)
        self._reads_first = {name: place for place, name in firsts.items()}
        self._writes_last = {name: place for place, name in lasts.items()}

    def begin(self, step: Step) -> None:
        """Do all that comes before the forward pass."""
        hooks = self._hooks
        metadata = pickle.loads(step.metadata)  # noqa: S301 - ours
        if self._settings.overwrites_first:
            self._overwrite(step)
            self._between()
        first: Callable[..., None] = hooks.handle_preemptions
        second: Callable[..., None] = hooks.bind_connector_metadata
        if self._choices.chance("bind first", self._odds.bind_first):
            self._seen["bound_first"] += 1
            first, second = second, first
        self._call(first, metadata)
        self._call(second, metadata)
        if not self._settings.overwrites_first:
            self._overwrite(step)
        layers = dict.fromkeys(self.layers)
        self._context = ForwardContext(dict(layers) if step.scheduled else None)
        # From here on the engine may write to what it was handed out.
        if step.fresh:
            self._seen["poisoned"] += len(step.fresh)
            for row in range(self._layout.num_rows):
                self._memory[row][step.fresh] = POISON
        if step.output.has_sync_kv_loads:
            self._call(hooks.start_load_kv, self._context)

    def _overwrite(self, step: Step) -> None:
        """Clear blocks and copy onto others, as the plan was told."""
        cleared = step.output.new_block_ids_to_zero or []
        copied = [each.dst_block_id for each in step.output.kv_cache_block_copies or ()]
        for row in range(self._layout.num_rows):
            self._memory[row][cleared] = 0
            self._memory[row][copied] = POISON

    def check(self, step: Step) -> list[Wrong]:
        """
        Return what is wrong with the content that the forward pass relies on.

        What is loaded while it runs is looked at layer by layer instead.

        Args:
            step: Fills blocks from the engine's own cache first.
        """
        self._wrong = []
        for at, each in enumerate(step.passes):
            if each.copies:
                self._pages.write(
                    self._memory, self._shard, at, each.copies, each.copy_states
                )
            self._seen["checked_blocks"] += len(each.reads)
            if not step.output.has_sync_kv_loads:
                self._look(step, at)
        return self._wrong

    def read_layer(self, step: Step, name: str) -> list[Wrong]:
        """Wait for what a layer reads; return what is wrong up to here."""
        if step.scheduled and name in self._place:
            self._hooks.wait_for_layer_load(name)
        if step.output.has_sync_kv_loads and name in self._reads_first:
            self._look(step, *self._reads_first[name])
        return self._wrong

    def write_layer(self, step: Step, name: str, tainted: set[str]) -> None:
        """
        Compute a layer.

        Args:
            step: What.
            name: Of the layer; one of another rank's computes nothing here.
            tainted: Requests that some rank computes from wrong content.
        """
        for part in range(self._settings.parts):
            if part:
                self._seen["part"] += 1
                self.read_layer(step, name)
            if name in self._writes_last:
                self._write(step, name, tainted, part)
            if step.scheduled and name in self._place:
                _, row = self._place[name]
                metadata = self._context.attn_metadata
                self._hooks.save_kv_layer(name, self._memory[row], metadata)

    def _write(self, step: Step, name: str, tainted: set[str], part: int) -> None:
        """Compute what one part of the pass does to the row that a layer completes."""
        at, row = self._writes_last[name]
        each = step.passes[at]
        mine = slice(part, None, self._settings.parts)
        writes = each.writes[mine]
        if writes:
            self._pages.write(
                *(self._memory, self._shard, at, writes, each.write_states[mine]),
                only_row=row,
            )
        bad = [
            block
            for block, writer in zip(writes, each.writers[mine], strict=True)
            if writer in tainted
        ]
        if bad:
            self._pages.poison(self._memory, at, bad, only_row=row)

    def end(self, step: Step, tainted: set[str]) -> KVOutput:
        """Do all that comes after the forward pass and return what is told."""
        hooks = self._hooks
        if not step.output.has_sync_kv_loads:
            self._call(hooks.start_load_kv, self._context)
        early = self._settings.defers_saves and bool(step.scheduled)
        early = early or self._choices.chance("early", self._odds.early_results)
        if early:
            self._seen["results_first"] += 1
        else:
            self._call(hooks.wait_for_save)
        output = self._results(step)
        for layer in self.layers:
            if layer in self.later:
                self._seen["drafted"] += bool(step.scheduled)
                self.read_layer(step, layer)
                self.write_layer(step, layer, tainted)
        if step.scheduled and self.rank in self._settings.silent_ranks:
            self._seen["never_asked"] += 1
        else:
            if early:
                self._call(hooks.wait_for_save)
            self._call(hooks.clear_connector_metadata)
        for wrong in self._wrong:
            if wrong.block not in output.invalid_block_ids:
                raise wrong.error
        return output

    def load_weights(self, version: int) -> None:
        """Compute other bytes from now on; those that are there are wrong."""
        self._pages.weights = version

    def check_null_block(self) -> None:
        """
        Look whether the null block is as it was.

        Raises:
            HostAssertionError: Somebody wrote to it.
        """
        for row in range(self._layout.num_rows):
            require(
                (self._memory[row][0] == POISON).all(),
                Rule.NULL_BLOCK,
                "it was written to",
                rank=self.rank,
                row=row,
            )

    def _results(self, step: Step) -> KVOutput:
        """Ask for results once or more; nothing may be told twice."""
        hooks = self._hooks
        output = KVOutput(finished_sending=set(), finished_recving=set())
        for _ in range(self._times()):
            found = hooks.get_transfer_results(step.output.finished_req_ids.copy())
            self._add(output.finished_sending, found.finished_sending)
            self._add(output.finished_recving, found.finished_recving)
            self._add(output.failed_recving, found.failed_recving)
        for _ in range(self._times()):
            blocks = hooks.get_block_ids_with_load_errors()
            twice = output.invalid_block_ids & blocks
            require(not twice, Rule.ERRORS_TWICE, f"{sorted(twice)}", rank=self.rank)
            output.invalid_block_ids |= blocks
        for _ in range(self._times()):
            metadata = hooks.build_connector_worker_meta()
            if output.kv_connector_worker_meta is None:
                output.kv_connector_worker_meta = metadata
            elif metadata is not None:
                output.kv_connector_worker_meta = (
                    output.kv_connector_worker_meta.aggregate(metadata)
                )
        return output

    def _add(self, told: set[str] | None, new: set[str] | None) -> None:
        assert told is not None  # made so
        for name in sorted(new or ()):
            require(
                name not in told,
                Rule.REPORT_TWICE,
                "twice in a step",
                request=name,
                rank=self.rank,
            )
            told.add(name)

    def _times(self) -> int:
        times = 1
        while times < 3 and self._choices.chance("repeat", self._odds.repeat):
            self._seen["repeated"] += 1
            times += 1
        return times

    def _call(self, hook: Callable[..., object], *args: object) -> None:
        """Call a hook once or more."""
        for _ in range(self._times()):
            hook(*args)

    def _look(self, step: Step, at: int, only_row: int | None = None) -> None:
        each = step.passes[at]
        if each.reads and self._pages.first_wrong(
            *(self._memory, self._shard, at, each.reads, each.read_states, only_row)
        ):
            self._wrong += self._explain(step, at, only_row)

    def _explain(self, step: Step, at: int, only_row: int | None) -> list[Wrong]:
        """Name every block of a group that is wrong."""
        wrong = []
        each = step.passes[at]
        for block, state, (name, index) in zip(
            each.reads, each.read_states, each.readers, strict=True
        ):
            found = self._pages.first_wrong(
                self._memory, self._shard, at, [block], [state], only_row
            )
            if found is not None:
                page = self._memory[found[1]][block]
                nothing = (page == POISON).all()
                error = HostAssertionError(
                    Rule.CONTENT,
                    "nothing was written" if nothing else f"{bytes(page[:16]).hex()}…",
                    step=step.number,
                    request=name,
                    rank=self.rank,
                    group=self._layout.groups[at].group_id,
                    index=index,
                    block=block,
                    row=found[1],
                )
                wrong.append(Wrong(error, block, name))
        return wrong
