# SPDX-License-Identifier: Apache-2.0
"""Rows that go while the forward pass runs, on real threads and a real store."""

import attrs
import pytest

from tests.rig import KEYSPACE_DIGEST, LAYERS, LAYOUT, NUM_ROWS, keys_of, order, running
from ucm.blocks import GroupId, RowId
from ucm.devices.events import DoneFence
from ucm.errors import BlockCorruptError, DeviceTimeoutError
from ucm.layerwise import RowLoads, RowSaves, SpanGroup
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD
ROWS = tuple(RowId(row) for row in range(NUM_ROWS))
SHORT = {"timeout": {"save": 0.05, "load": 0.05, "fence": 0.02, "shutdown": 0.2}}


def group_of(*orders):
    """Return orders whose rows go together."""
    return SpanGroup(KEYSPACE_DIGEST, orders, frozenset(ROWS))


class Calls:
    """A runtime that notes what is asked of it; ``bad`` tickets have failed."""

    def __init__(self, bad=()):
        self.said = []
        self.bad = set(bad)

    def submit(self, digest, orders, fence, row_ids):
        """Note the first rows of tickets."""
        self.said.append(("submit", [one.transfer_id for one in orders], [*row_ids]))

    def add_rows(self, transfer_ids, row_ids, fence):
        """Note more rows."""
        self.said.append(("add", [*transfer_ids], [*row_ids]))

    def abandon(self, transfer_ids, reason):
        """Note tickets that are given up."""
        self.said.append(("abandon", [*transfer_ids], reason))

    def wait_rows(self, transfer_ids, row_ids):
        """Note a wait; tell of the failed."""
        self.said.append(("wait", [*transfer_ids], [*row_ids]))
        return [each for each in transfer_ids if each in self.bad]

    def wait_loaded(self, transfer_ids):
        """Note the last wait."""
        self.said.append(("loaded", [*transfer_ids]))
        return []

    def take(self):
        """Return what was said since the last call."""
        said, self.said = self.said, []
        return said


def save(number, first=0, blocks=2):
    """Return the order of one save."""
    return order(number, SAVE, range(first, first + blocks), range(1, 1 + blocks))


def load(number, request="r", blocks=2):
    """Return the order of one load."""
    return order(number, LOAD, range(blocks), range(20, 20 + blocks), request)


class TestRowSaves:
    def test_row_goes_after_its_last_layer_and_only_once(self):
        """S4-05, S4-07, S2-08: a row is submitted when the last of its layers has run,
        not before, and not again when the hook is called twice."""
        layers = ("a", "b", "c")
        rows = (("a", "c"), ("b",))
        layout = KVLayout(
            groups=(
                GroupLayout(
                    group_id=GroupId(0),
                    kind=GroupKind.FULL,
                    block_tokens=16,
                    rows=tuple(
                        RowLayout(row_id=RowId(at), page_bytes=8, layer_names=names)
                        for at, names in enumerate(rows)
                    ),
                ),
            ),
            hash_block_tokens=16,
            engine_tag="test",
            layer_order=layers,
        )
        calls, fences = Calls(), []
        saves = RowSaves(calls, layout)
        saves.begin(
            [SpanGroup(KEYSPACE_DIGEST, (save(1),), frozenset({RowId(0), RowId(1)}))]
        )

        def fence():
            fences.append(DoneFence())
            return fences[-1]

        said = []
        for layer in ("a", "b", "b", "c", "c"):
            saves.layer_done(layer, fence)
            said.append(calls.take())
        assert [[], [("submit", [1], [1])], [], [("add", [1], [0])], []] == said
        assert 2 == len(fences)
        saves.finish(fence)
        assert ([], 2) == (calls.take(), len(fences))

    def test_rows_without_a_hook_go_when_the_step_ends(self):
        """S4-10: what no layer has told of, because its layer did not run or tells
        nothing, is submitted behind the forward pass."""
        calls = Calls()
        saves = RowSaves(calls, LAYOUT)
        saves.begin([group_of(save(1))])
        saves.layer_done(LAYERS[1], DoneFence)
        saves.finish(DoneFence)
        assert [("submit", [1], [1]), ("add", [1], [0, 2])] == calls.take()

    def test_states_go_when_the_step_ends_whatever_a_layer_says(self):
        """A recurrent state may be moved behind the forward pass, when it is known how
        many guessed tokens hold: no hook of a layer submits it."""
        calls = Calls()
        saves = RowSaves(calls, LAYOUT)
        states = SpanGroup(
            KEYSPACE_DIGEST, (save(2, 10),), frozenset(ROWS), at_end=True
        )
        saves.begin([group_of(save(1)), states])
        for layer in LAYERS:
            saves.layer_done(layer, DoneFence)
        assert {1} == {number for said in calls.take() for number in said[1]}
        saves.finish(DoneFence)
        assert [("submit", [2], [0, 1, 2])] == calls.take()

    def test_step_without_saves_costs_no_fence(self):
        """A step that saves nothing makes no fence at any layer, and none at its end."""

        def fence():
            raise AssertionError("a fence was made")

        saves = RowSaves(Calls(), LAYOUT)
        saves.begin([])
        for layer in (*LAYERS, "of another model"):
            saves.layer_done(layer, fence)
        saves.finish(fence)

    def test_save_whose_forward_pass_failed_is_dropped(self):
        """A step that ended in an error leaves nothing behind: the next one, or the
        fence before it, gives its saves up."""
        with running() as rig:
            saves = RowSaves(rig.runtime, LAYOUT)
            saves.begin([group_of(save(1), save(2, 10))])
            saves.layer_done(LAYERS[0], DoneFence)
            saves.drop()
            outcomes = rig.settle()
            assert {Reason.UNFINISHED} == {one.reason for one in outcomes.values()}
            assert [1, 2] == sorted(rig.told(NoticeKind.RELEASED))
            assert 0 == rig.store.match(keys_of(0, 1))
            while rig.store.stats().reserved_blocks:
                rig.runtime.wait_for_notice(0.01)

    def test_stored_block_has_the_bytes_of_each_row_when_it_went(self):
        """X-01: rows are copied as they go, together they are one block, and it is
        found only when the last one is there."""
        with running() as rig:
            saves = RowSaves(rig.runtime, LAYOUT)
            content = rig.fill(range(1, 3), 1)
            saves.begin([group_of(save(1))])
            for layer in LAYERS[:-1]:
                saves.layer_done(layer, DoneFence)
            assert rig.runtime.num_open
            assert 0 == rig.store.match(keys_of(0, 1))
            saves.finish(DoneFence)
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind
            rig.memory[:] = 0
            rig.submit(order(2, LOAD, range(2), range(1, 3)))
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind
            assert content == rig.content(range(1, 3))


class TestQueue:
    def test_later_rows_of_an_accepted_save_are_not_refused(self):
        """A ticket is admitted with its first row; the queue being full by then does
        not cut it short."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate))
        with running({"queue": {"tickets": 1, "window": 1}}, plan) as rig:
            fence = rig.device.lease(None)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(1)], fence, ROWS[:1])
            rig.runtime._take_in()
            gate.wait_reached()
            rig.runtime.submit(KEYSPACE_DIGEST, [save(2, 10)], fence, ROWS[:1])
            rig.runtime.submit(KEYSPACE_DIGEST, [save(3, 20)], fence, ROWS[:1])
            rig.runtime.add_rows([1, 2, 3], ROWS[1:], fence)
            gate.open()
            ends = {number: one.kind for number, one in rig.settle().items()}
            assert OutcomeKind.COMMITTED is ends[1]
            assert OutcomeKind.COMMITTED is ends[2]
            assert OutcomeKind.REFUSED is ends[3]

    def test_save_whose_rows_never_come_ends_at_its_deadline(self):
        """S1-26: blocks are not held without limit for rows that nobody brings."""
        with running(SHORT) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [save(1)], rig.device.lease(None), ROWS[:1]
            )
            assert "deadline" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.RELEASED)

    def test_close_does_not_wait_for_rows_that_cannot_come(self):
        """S1-27: an engine that stops in the middle of a forward pass is not waited
        for."""
        with running({"timeout": {"shutdown": 5.0}}) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [save(1)], rig.device.lease(None), ROWS[:1]
            )
            while rig.store.stats().reserved_blocks == 0:
                rig.runtime.wait_for_notice(0.01)
            rig.runtime.close()
            reasons = {n: o.reason for n, o in rig.outcomes().items()}
            assert {1: Reason.UNFINISHED} == reasons


class TestRowLoads:
    def begun(self, calls, *groups, ahead=1):
        """Return the loads of a step."""
        loads = RowLoads(calls, LAYOUT, ahead)
        loads.begin(groups, DoneFence())
        return loads

    @pytest.mark.parametrize(
        ("ahead", "at_start", "at_first"),
        [(0, [0], []), (1, [0], [1]), (2, [0], [1, 2]), (9, [0], [1, 2])],
    )
    def test_rows_are_submitted_so_far_ahead_of_the_layer(
        self, ahead, at_start, at_first
    ):
        """S4-03, S4-06: the first row is submitted at once, further ones as far ahead of
        the layer that is reached as was asked for; behind the last there is none."""
        calls = Calls()
        loads = self.begun(calls, group_of(load(1)), ahead=ahead)
        assert [("submit", [1], at_start)] == calls.take()
        loads.wait_for(LAYERS[0])
        added = [("add", [1], at_first)] if at_first else []
        assert [*added, ("wait", [1], [0])] == calls.take()
        for layer in LAYERS[1:]:
            loads.wait_for(layer)
        rows = [said[2] for said in calls.take() if said[0] == "add"]
        assert list(ROWS) == sorted(
            at_start + at_first + [r for row in rows for r in row]
        )

    def test_layer_waits_for_its_row_once(self):
        """S4-04, S3-04: a layer waits for its own row, and not when that was waited for
        before; a layer without a row waits for none."""
        calls = Calls()
        loads = self.begun(calls, group_of(load(1)))
        for layer in (LAYERS[0], LAYERS[0], "of a draft model"):
            loads.wait_for(layer)
        assert [[0]] == [said[2] for said in calls.take() if said[0] == "wait"]

    def test_shared_row_serves_all_its_layers(self):
        """S4-02: layers that live in one row need one load."""
        (group,) = LAYOUT.groups
        row = RowLayout(row_id=RowId(0), page_bytes=8, layer_names=("full", "linear"))
        layout = attrs.evolve(LAYOUT, groups=(attrs.evolve(group, rows=(row,)),))
        calls = Calls()
        loads = RowLoads(calls, layout, 1)
        loads.begin(
            [SpanGroup(KEYSPACE_DIGEST, (load(1),), frozenset({RowId(0)}))], DoneFence()
        )
        loads.wait_for("full")
        loads.wait_for("linear")
        assert [("submit", [1], [0]), ("wait", [1], [0])] == calls.take()

    def test_step_without_loads_waits_for_nothing(self):
        """S4-16: without loads a layer returns at once and asks nobody."""
        calls = Calls()
        loads = RowLoads(calls, LAYOUT, 1)
        for layer in LAYERS:
            loads.wait_for(layer)
        loads.finish()
        assert [] == calls.take()

    def test_failed_request_gets_no_further_rows_and_others_go_on(self):
        """S4-12: behind a row that failed nothing of its request is submitted or waited
        for, except that it is over; other requests are served as before."""
        calls = Calls(bad={1})
        loads = self.begun(calls, group_of(load(1)), group_of(load(2, "other")))
        calls.take()
        for layer in LAYERS:
            loads.wait_for(layer)
        loads.finish()
        said = calls.take()
        assert ("abandon", [1], Reason.ROW_FAILED) in said
        behind = said[said.index(("abandon", [1], Reason.ROW_FAILED)) + 1 :]
        assert [("loaded", [1])] == [one for one in behind if one[1] == [1]]
        assert [[1], [2]] == [one[2] for one in said if one[:2] == ("wait", [2])][1:]

    def test_loads_of_the_former_step_are_ended_first(self):
        """S4-11: loads that a step left behind are given up and waited for, not
        forgotten, before those of the next begin."""
        calls = Calls()
        loads = self.begun(calls, group_of(load(1)))
        calls.take()
        loads.begin([group_of(load(2))], DoneFence())
        assert [
            ("abandon", [1], Reason.UNASKED),
            ("loaded", [1]),
            ("submit", [2], [0]),
        ] == calls.take()

    def test_load_that_a_layer_did_not_wait_for_fails(self):
        """Bytes that come after the layer that needed them are no success."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            rig.settle()
            loads = RowLoads(rig.runtime, LAYOUT, 1)
            loads.begin([group_of(load(2))], DoneFence())
            loads.wait_for(LAYERS[0])
            loads.finish()
            assert Reason.UNASKED == rig.outcomes()[2].reason
            assert 2 in rig.told(NoticeKind.RELEASED)

    def test_each_row_is_there_when_its_layer_goes_on(self):
        """S4-04: what a layer waited for is in the engine's blocks, before the load as
        a whole is over."""
        with running() as rig:
            content = rig.fill(range(1, 3), 1)
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            rig.settle()
            rig.memory[:] = 0
            loads = RowLoads(rig.runtime, LAYOUT, 1)
            loads.begin([group_of(load(2))], DoneFence())
            size = len(content) // NUM_ROWS
            for row, layer in enumerate(LAYERS):
                loads.wait_for(layer)
                there = rig.content(range(20, 22))
                part = slice(row * size, (row + 1) * size)
                assert content[part] == there[part]
            loads.finish()
            assert OutcomeKind.COMMITTED is rig.outcomes()[2].kind

    @pytest.mark.parametrize("verb", ["verify", "scatter", "recheck"])
    def test_failure_at_any_stage_is_told_before_the_step_ends(self, verb):
        """S4-13: whether a row fails at once, under the copy or behind the last row, the
        ticket has failed and nothing writes when the step ends."""
        (key,) = keys_of(0)
        error = BlockCorruptError(key, "checksum")
        plan = FaultPlan(Fault(verb, raising(error)))
        with running(plan=plan) as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            rig.settle()
            loads = RowLoads(rig.runtime, LAYOUT, 1)
            loads.begin([group_of(load(2))], DoneFence())
            for layer in LAYERS:
                loads.wait_for(layer)
            loads.finish()
            assert OutcomeKind.FAILED is rig.outcomes()[2].kind
            assert 2 in rig.told(NoticeKind.RELEASED)

    def test_copy_that_never_ends_stops_the_engine_by_name(self):
        """A copy that may still write blocks is never computed over: the one case in
        which the engine is told to stop, with the request's name."""
        gate = Gate()
        config = {"timeout": {"load": 2.0, "stuck": 0.02, "shutdown": 0.05}}
        with running(config, FaultPlan(Fault("scatter", gate))) as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            rig.settle()
            loads = RowLoads(rig.runtime, LAYOUT, 1)
            loads.begin([group_of(load(2))], DoneFence())
            loads.wait_for(LAYERS[0])
            with pytest.raises(DeviceTimeoutError, match=r"transfer 2 .* request r "):
                loads.finish()
            gate.open()
