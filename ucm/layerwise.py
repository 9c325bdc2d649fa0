# SPDX-License-Identifier: Apache-2.0
"""
Layer-wise transfer: rows go while the forward pass runs.

``RowSaves`` submits a row of the step's saves as soon as its last layer, in the order of
execution, has run; rows whose layers tell nothing go when the step ends. A block is
stored with its last row only. ``RowLoads`` submits the first row of the step's loads at
once and each further one a few rows ahead of the layer that reads it; a layer waits for
its own row alone. A load that fails, whenever, is told when the step ends, and what was
computed from its blocks is discarded by the engine.

Threading: everything runs on the engine's thread.
"""

from collections.abc import Callable, Iterable, Sequence

import attrs

from ucm.blocks import GroupId, RowId
from ucm.devices.abc import Fence
from ucm.layout import GroupKind, KVLayout
from ucm.reasons import Reason
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind

__all__ = ["RowLoads", "RowSaves", "SpanGroup", "groups_of"]


@attrs.define
class SpanGroup:
    """
    Tickets of one step whose rows go together.

    Args:
        digest: Key space of their keys.
        orders: What is to be saved or loaded.
        row_ids: Rows of each of them.
        at_end: The rows are final when the step ends only, whatever a layer says.
        submitted: Rows that were submitted.
        transfer_ids: The tickets.
    """

    digest: bytes
    orders: Sequence[SpanOrder]
    row_ids: frozenset[RowId]
    at_end: bool = False
    submitted: set[RowId] = attrs.Factory(set)
    transfer_ids: Sequence[int] = attrs.field(init=False)

    @transfer_ids.default
    def _own_transfer_ids(self) -> Sequence[int]:
        return [order.transfer_id for order in self.orders]

    def submit(self, runtime: Runtime, row_ids: Iterable[RowId], fence: Fence) -> None:
        """Submit those of the rows that are the tickets' own and were not before."""
        new = [row for row in row_ids if self.lacks(row)]
        if not new:
            return
        if self.submitted:
            runtime.add_rows(self.transfer_ids, new, fence)
        else:
            runtime.submit(self.digest, self.orders, fence, new)
        self.submitted.update(new)

    def lacks(self, row_id: RowId) -> bool:
        """Return whether a row is the tickets' own and was not submitted."""
        return row_id in self.row_ids and row_id not in self.submitted

    @property
    def is_whole(self) -> bool:
        """Whether every row was submitted."""
        return len(self.submitted) == len(self.row_ids)


def groups_of(
    layout: KVLayout, digest: bytes, orders: Iterable[SpanOrder]
) -> list[SpanGroup]:
    """
    Put a plan's loads, or its saves, together as their rows go.

    Saves by group of layers; loads by request as well, since one that fails ends the
    others of its request.
    """
    rows = {
        group.group_id: frozenset(row.row_id for row in group.rows)
        for group in layout.groups
    }
    together: dict[tuple[str, int], list[SpanOrder]] = {}
    for order in orders:
        request = order.request_id if order.kind is TransferKind.LOAD else ""
        together.setdefault((request, order.group_id), []).append(order)
    groups = []
    for (_, group_id), alike in together.items():
        group = layout.group(GroupId(group_id))
        # States may still move behind the forward pass.
        at_end = group.kind is GroupKind.STATE
        groups.append(SpanGroup(digest, alike, rows[group.group_id], at_end))
    return groups


class RowSaves:
    """
    The saves of one step after the other.

    Args:
        runtime: Carries them out.
        layout: Rows and layers.
    """

    def __init__(self, runtime: Runtime, layout: KVLayout) -> None:
        self._runtime = runtime
        self._all_rows = tuple(RowId(row) for row in range(layout.num_rows))
        self._saved_by = {layer: row for row, layer in layout.row_save_layer.items()}
        self._groups: Sequence[SpanGroup] = ()

    def begin(self, groups: Sequence[SpanGroup]) -> None:
        """Take the saves of a step; what the former step left unfinished is dropped."""
        self.drop()
        self._groups = groups

    def drop(self) -> None:
        """Give up the saves whose rows did not all come: their step ended before."""
        for group in self._groups:
            if not group.submitted:
                self._runtime.decline(group.digest, group.orders, Reason.UNSUBMITTED)
            elif not group.is_whole:
                self._runtime.abandon(group.transfer_ids, Reason.UNFINISHED)
        self._groups = ()

    def layer_done(self, layer_name: str, make_fence: Callable[[], Fence]) -> None:
        """
        Submit a layer's row if the layer is the last to write it.

        Args:
            layer_name: Any layer; those without a row of their own are passed over.
            make_fence: Makes a fence behind the layer's write; called if it is needed.
        """
        row = self._saved_by.get(layer_name)
        if row is None:
            return
        groups = [each for each in self._groups if each.lacks(row) and not each.at_end]
        if groups:
            fence = make_fence()
            for group in groups:
                group.submit(self._runtime, (row,), fence)

    def finish(self, make_fence: Callable[[], Fence]) -> None:
        """Submit all rows that are left: the forward pass is over."""
        if not all(group.is_whole for group in self._groups):
            fence = make_fence()
            for group in self._groups:
                group.submit(self._runtime, self._all_rows, fence)
        self._groups = ()


class RowLoads:
    """
    The loads of one step after the other.

    Args:
        runtime: Carries them out.
        layout: Rows and layers.
        ahead: Rows that are submitted beyond the one that is waited for.
    """

    def __init__(self, runtime: Runtime, layout: KVLayout, ahead: int) -> None:
        self._runtime = runtime
        self._ahead = ahead
        self._row_of = {name: layout.row_of(name) for name in layout.layers}
        self._order = list(dict.fromkeys(self._row_of.values()))
        self._place = {row: at for at, row in enumerate(self._order)}
        self._groups: list[SpanGroup] = []
        self._failed: list[SpanGroup] = []
        self._waited: set[RowId] = set()
        self._num_submitted = 0
        """So many rows, in the order of execution."""
        self._fence: Fence | None = None

    def begin(self, groups: Sequence[SpanGroup], fence: Fence) -> list[int]:
        """
        Take the loads of a step, a group for each request, and submit their first row.

        What the former step left is ended first; returns and raises as ``finish``.
        """
        late = self.finish()
        self._groups = list(groups)
        self._waited = set()
        self._num_submitted = 0
        self._fence = fence
        self._submit_until(0)
        return late

    def wait_for(self, layer_name: str) -> None:
        """
        Block until a layer's row is there, and submit those a few rows ahead.

        A request one of whose rows failed is not waited for again, and no further row
        of it is submitted.

        Raises:
            DeviceTimeoutError: A copy goes on that was given up long ago.
        """
        row = self._row_of.get(layer_name)
        if row is None or row in self._waited:
            return
        self._waited.add(row)
        self._submit_until(self._place[row] + self._ahead)
        for group in list(self._groups):
            if self._runtime.wait_rows(group.transfer_ids, (row,)):
                self._runtime.abandon(group.transfer_ids, Reason.ROW_FAILED)
                self._groups.remove(group)
                self._failed.append(group)

    def finish(self) -> list[int]:
        """
        Block until the loads of the step are over; nothing writes blocks any more.

        A load whose rows were not all waited for has come too late for some layer: it
        fails.

        Returns:
            Those that came too late and were over nevertheless: their end is none.

        Raises:
            DeviceTimeoutError: A copy goes on that was given up long ago.
        """
        unasked: set[int] = set()
        over, self._groups, self._failed = self._groups + self._failed, [], []
        for group in over:
            if not self._waited.issuperset(group.row_ids):
                self._runtime.abandon(group.transfer_ids, Reason.UNASKED)
                unasked.update(group.transfer_ids)
        for group in over:
            unasked.difference_update(self._runtime.wait_loaded(group.transfer_ids))
        self._fence = None
        return sorted(unasked)

    def _submit_until(self, place: int) -> None:
        """Submit the rows up to a place in the order of execution that were not before."""
        rows = self._order[self._num_submitted : place + 1]
        if self._fence is None or not rows:
            return
        for group in self._groups:
            group.submit(self._runtime, rows, self._fence)
        self._num_submitted += len(rows)
