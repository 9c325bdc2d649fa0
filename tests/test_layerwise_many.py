# SPDX-License-Identifier: Apache-2.0
"""Steps of many layers and requests, which cost the engine's thread no more than their rows."""

from tests.rig import KEYSPACE_DIGEST, order
from tests.test_layerwise import Calls
from ucm.blocks import GroupId
from ucm.devices.events import DoneFence
from ucm.layerwise import RowLoads, SpanGroup, groups_of
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.pipeline.tickets import Direction

NUM_LAYERS, NUM_REQUESTS = 24, 5


class Row(int):
    """A row that counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other):
        """Compare, and count."""
        Row.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


class Asked(SpanGroup):
    """Tickets that note which rows somebody looks for."""

    def lacks(self, row_id):
        """Note the row."""
        self.asked.append(row_id)
        return super().lacks(row_id)


def layout_of(rows):
    """Return a layout with a layer for each row."""
    layers = tuple(
        RowLayout(row_id=row, page_bytes=8, layer_names=(f"layer.{at}",))
        for at, row in enumerate(rows)
    )
    group = GroupLayout(
        group_id=GroupId(0), kind=GroupKind.FULL, block_tokens=16, rows=layers
    )
    return KVLayout(groups=(group,), hash_block_tokens=16, engine_tag="test")


def load_all(layout, groups):
    """Run a step's loads; return the rows that were submitted, by ticket."""
    calls = Calls()
    loads = RowLoads(calls, layout, 2)
    loads.begin(groups, DoneFence())
    for layer in layout.layers:
        loads.wait_for(layer)
    loads.finish()
    rows = {}
    for said in calls.take():
        if said[0] in ("submit", "add"):
            rows.setdefault(said[1][0], []).extend(said[2])
    return rows


ORDERS = [
    order(number, Direction.LOAD, [number], [number], f"r{number}")
    for number in range(1, NUM_REQUESTS + 1)
]


def test_each_row_of_each_request_is_looked_at_once_in_a_step():
    """R-18: a layer looks at the rows that come with it, not again at those before."""
    rows = [*range(NUM_LAYERS)]
    groups = [Asked(KEYSPACE_DIGEST, [each], frozenset(rows)) for each in ORDERS]
    for group in groups:
        group.asked = []
    submitted = load_all(layout_of(rows), groups)
    assert dict.fromkeys(range(1, NUM_REQUESTS + 1), rows) == submitted
    assert [rows] * NUM_REQUESTS == [group.asked for group in groups]


def test_no_row_is_searched_for_among_the_others():
    """R-18: whether a row is a ticket's own takes no comparison with all of its rows."""
    rows = [*map(Row, range(NUM_LAYERS))]
    layout = layout_of(rows)
    groups = groups_of(layout, KEYSPACE_DIGEST, ORDERS)
    assert NUM_REQUESTS == len(groups)
    Row.compared = 0
    submitted = load_all(layout, groups)
    assert Row.compared <= NUM_REQUESTS * NUM_LAYERS
    assert {NUM_LAYERS} == set(map(len, submitted.values()))
