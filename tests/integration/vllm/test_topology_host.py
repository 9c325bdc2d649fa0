# SPDX-License-Identifier: Apache-2.0
"""The real halves under the fake host, with ranks in every shape."""

from collections import Counter

import attrs
import pytest

from tests.integration.vllm.host_kit import World, world
from tests.integration.vllm.kit import cache_config, full
from tests.testing.host_kit import BUSY, HYBRID, ONE_FULL, make_layout, missing
from ucm.blocks import BlockKey
from ucm.integration.vllm.layout import layout_of
from ucm.integration.vllm.modes import Facts, Loads, Saves, Shape, choose_mode
from ucm.ranks import Topology
from ucm.testing.host import HostSettings

SETTINGS = HostSettings(odds=BUSY)
FIRST = HYBRID
SECOND = make_layout((8, None), (4, 10), (8, 5), rows=3)
"""A stage with more layers in the same groups."""
SPREAD = layout_of(
    cache_config((["a", "b"], full(4)), hash_block_size=8), decode_context=2
)
"""Blocks of four tokens on each of two ranks, eight in a table's entry."""


def parts(it: World) -> Counter[int]:
    """Return how many blocks are stored, by shard."""
    return Counter(BlockKey.unpack(key).shard_id for key in it.store._entries)


class TestRanks:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("topology", "layout", "layouts"),
        [
            pytest.param(
                Topology(tensor=2, replicas=2), ONE_FULL, [], id="two replicas"
            ),
            pytest.param(
                Topology(tensor=4, replicas=2), HYBRID, [], id="replicas of halves"
            ),
            pytest.param(Topology(stages=2), FIRST, [FIRST, SECOND], id="stages"),
            pytest.param(
                Topology(tensor=2, replicas=2, stages=2),
                FIRST,
                [FIRST, FIRST, SECOND, SECOND],
                id="stages of replicas",
            ),
            pytest.param(
                Topology(tensor=2, decode_context=2, interleave=2),
                SPREAD,
                [],
                id="tokens spread",
            ),
            pytest.param(
                Topology(prefill_context=2, decode_context=2), SPREAD, [], id="prefill"
            ),
        ],
    )
    def test_ranks_of_every_shape_break_no_rule(
        self, topology: Topology, layout, layouts
    ) -> None:
        """S4-17, S1-21, H-03, H-12: whichever way ranks share a block, both halves
        keep every rule, each part is stored under one key, and nothing is left."""
        with world(
            1, layout, topology=topology, layouts=layouts, settings=SETTINGS
        ) as it:
            it.run(800)
            assert {*topology.shards} == set(parts(it))
            told = it.scheduler.stats().data["counters"]
            saved, loaded = [
                [
                    worker._counters.total(
                        "ucm_settled_parts_total",
                        direction=direction,
                        outcome="committed",
                    )
                    for worker in it.workers
                ]
                for direction in ("save", "load")
            ]
        # a block counts once, however many ranks have saved and loaded its parts.
        assert min(saved) > 0
        assert sum(saved) == told["ucm_saved_blocks_total"] * len(topology.shards)
        assert 0 < told["ucm_loaded_blocks_total"] <= min(loaded)
        assert 0 < told["ucm_loaded_tokens_total"] <= told["ucm_matched_tokens_total"]
        kinds = {"load", "deferred", "preempted", "resumed"}
        assert set() == missing(it.host.seen, kinds)

    @pytest.mark.slow
    def test_stages_that_run_ahead_break_no_rule(self) -> None:
        """Two steps in flight, as pipeline stages have, on the class that the engine is
        given."""
        settings = HostSettings(in_flight=2, odds=BUSY)
        with world(
            3,
            FIRST,
            topology=Topology(stages=2),
            layouts=[FIRST, SECOND],
            settings=settings,
            is_whole=True,
        ) as it:
            it.run(600)
            assert set() == missing(it.host.seen, {"load", "deferred"})

    @pytest.mark.slow
    def test_rows_that_leave_one_by_one_break_no_rule(self) -> None:
        """S4-09, S4-17: layer-wise saves of stages and replicas keep every rule; each
        rank's rows make its own part, and only replicas whose turn it is send any."""
        mode = choose_mode(Facts(use_layerwise=True, shape=Shape.SEVERAL))
        assert (Saves.LAYERWISE, Loads.ASYNC) == (mode.saves, mode.loads)
        with world(
            7,
            FIRST,
            topology=Topology(tensor=2, replicas=2, stages=2),
            layouts=[FIRST, FIRST, SECOND, SECOND],
            settings=SETTINGS,
            is_whole=True,
            mode=mode,
        ) as it:
            assert all(worker._row_saves is not None for worker in it.workers)
            it.run(600)
            assert set() == missing(it.host.seen, {"load", "deferred"})
            assert {0, 1} == set(parts(it))


class TestPages:
    @pytest.mark.slow
    def test_pages_that_the_scheduler_does_not_know_break_no_rule(self) -> None:
        """Of a group with pages of two sizes the scheduler is told of the first layer
        only; the ranks' own layouts decide what is stored, whole."""
        (group,) = ONE_FULL.groups
        first, second = group.rows
        real = attrs.evolve(
            ONE_FULL,
            groups=[
                attrs.evolve(group, rows=(first, attrs.evolve(second, page_bytes=24)))
            ],
        )
        with world(
            5, ONE_FULL, topology=Topology(), layouts=[real], settings=SETTINGS
        ) as it:
            it.run(600)
            assert set() == missing(it.host.seen, {"load", "deferred"})
            assert {64 + 24} == {one.nbytes for one in it.store._entries.values()}


class TestTelling:
    @pytest.mark.slow
    def test_ranks_that_tell_late_lose_nothing_but_time(self) -> None:
        """Where another connector uses the handshakes up, the first reports tell the
        same; until then nothing is found and nothing saved."""
        topology = Topology(tensor=2, replicas=2, stages=2)
        layouts = [FIRST, FIRST, SECOND, SECOND]
        with world(
            4,
            FIRST,
            topology=topology,
            layouts=layouts,
            settings=SETTINGS,
            tells_early=False,
        ) as it:
            it.run(600)
            assert set() == missing(it.host.seen, {"load", "deferred"})
            assert {0, 1} == set(parts(it))
