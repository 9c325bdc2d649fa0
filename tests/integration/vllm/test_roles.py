# SPDX-License-Identifier: Apache-2.0
"""Engines that only save or only load, and settings inside of another connector."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.integration.vllm.kit import engine_config, plain_cache
from tests.integration.vllm.test_halves import Engine, request
from tests.traces import logs_closed
from ucm.cli.trace_answers import reasons_of
from ucm.errors import ConfigError
from ucm.integration.vllm.modes import Loads, Saves
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.story.collected import collect
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lives import Life, lives_of
from ucm.story.misses import DETAILS

MODULE = "ucm.integration.vllm.ucm_connector"


def make_setup(path: Path, role: str, **settings: object) -> Setup:
    """Return a setup of an engine in this role, over a slab that all share."""
    store = {"path": str(path / "slab"), "capacity": "1MiB"}
    config = engine_config(str(path), weights_revision="r", store=store, **settings)
    config.kv_transfer_config.kv_role = role
    return Setup.of(config, plain_cache())


@contextlib.contextmanager
def serving(path: Path, role: str, **settings: object) -> Iterator[Engine]:
    """Run both halves in this role."""
    engine = Engine(make_setup(path, role, **settings))
    with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
        engine.register()
        yield engine


def life_in(logs: Path) -> Life:
    """Return what a log tells of its one request."""
    lines = list(read_logs(find_logs(logs), Reading()))
    (life,) = (each for each in lives_of(collect(lines)) if each.ended is not None)
    return life


def life_without_saves(path: Path, role: str, *, cached: int) -> Life:
    """Return the life of a request, of which the engine had some tokens itself."""
    log = {"directory": str(path / "logs")}
    with logs_closed(), serving(path, role, log=log) as engine:
        one = request("r")
        engine.scheduler.match(one, cached)
        engine.scheduler.allocated(one, [[1, 2, 3]], 0)
        engine.scheduler.finished("r")
    return life_in(path / "logs")


class TestRoles:
    def test_producer_saves_and_never_loads(self, tmp_path: Path) -> None:
        """A producer stores what it computes, and finds nothing, not even its own."""
        with serving(tmp_path, "kv_producer") as engine:
            assert not engine.save()
            assert 3 == engine.scheduler.stats().reduce()["ucm_saved_blocks_total"]
            assert (0, False) == engine.scheduler.match(request("s"), 0)
            engine.scheduler.finished("s")
            assert engine.idle()

    def test_who_was_never_looked_up_is_told_so(self, tmp_path: Path) -> None:
        """A request of a producer was computed because nothing is looked up there: its log
        says so in the words that ``ucm trace why`` knows, and no look-up counts."""
        logs = tmp_path / "logs"
        log = {"directory": str(logs)}
        with logs_closed(), serving(tmp_path, "kv_producer", log=log) as engine:
            engine.save()
            told = engine.scheduler.stats().reduce()
            assert not [name for name in told if "lookups" in name]
        (reason,) = reasons_of(life_in(logs))
        expected = DETAILS["it was not looked up"]
        assert ("admission", *expected) == (
            *(reason["reason"], reason["detail"], reason["remedy"]),
        )

    def test_what_a_consumer_computed_is_told_to_be_saved_by_others(
        self, tmp_path: Path
    ) -> None:
        """It misses each time it is asked: that the first request would save it was told."""
        (reason,) = reasons_of(life_without_saves(tmp_path, "kv_consumer", cached=0))
        assert "never_offered" == reason["reason"]
        assert "unless its engine is a kv_consumer" in reason["remedy"]

    def test_producer_tells_what_the_engine_had_itself(self, tmp_path: Path) -> None:
        """The line of a request that nobody looked up says which tokens were in the engine's own
        cache, as that of any other."""
        life = life_without_saves(tmp_path, "kv_producer", cached=16)
        assert life.ended is not None
        assert 16 == life.ended.computed_tokens

    def test_consumer_loads_and_never_saves(self, tmp_path: Path) -> None:
        """A consumer finds and loads what a producer beside it stores, and stores
        nothing of its own."""
        with (
            serving(tmp_path, "kv_producer") as producer,
            serving(tmp_path, "kv_consumer") as consumer,
        ):
            assert not consumer.save()
            assert 0 == consumer.worker._counters.total("ucm_offered_parts_total")
            assert (0, False) == consumer.scheduler.match(request("s"), 0)
            producer.memory[:, 1:4] = 7
            producer.save()
            assert (set(), {"s"}, set()) == consumer.load()
            assert (consumer.memory[:, 5:8] == 7).all()
            assert "ucm_saved_blocks_total" not in consumer.scheduler.stats().reduce()

    @pytest.mark.parametrize(("may", "decoded"), [(False, 0), (True, 2)])
    def test_consumer_saves_what_it_decodes_if_it_may(
        self, tmp_path: Path, may: bool, decoded: int
    ) -> None:
        """Of a prompt that a consumer computes itself it saves nothing; of a request whose
        prompt ends within its second block, that one and the third, if it is set so."""
        settings = {"consumer_saves_decoded": may, "save_decoded": "each_block"}
        with serving(tmp_path, "kv_consumer", **settings) as engine:
            for name, prompt, saved in (("r", 48, 0), ("t", 20, decoded)):
                one = request(name)
                one.num_prompt_tokens = prompt
                engine.scheduler.match(one, 0)
                engine.scheduler.allocated(one, [[1, 2, 3]], 0)
                engine.work(engine.plan([one], (1, 2, 3)))
                engine.scheduler.finished(name)
                stats = engine.scheduler.stats().reduce()
                assert saved == stats.get("ucm_saved_blocks_total", 0)
            assert 0 == stats.get("ucm_dropped_blocks_total", 0)

    def test_write_back_of_what_is_never_saved_is_refused(self, tmp_path: Path) -> None:
        """An operator who forbids what another setting asks for hears of it at the start."""
        settings = {"consumer_saves_decoded": True, "save_decoded": "never"}
        with pytest.raises(ConfigError, match="save_decoded") as raised:
            make_setup(tmp_path, "kv_consumer", **settings)
        assert "consumer_saves_decoded" == raised.value.key

    @pytest.mark.parametrize(("shortest", "saved"), [(49, None), (48, 3)])
    def test_request_below_the_shortest_is_not_saved(
        self, tmp_path: Path, shortest: int, saved: int | None
    ) -> None:
        """R-56: of 48 tokens nothing is saved if 49 are the least, and all if 48 are."""
        settings = {"shortest_saved_tokens": shortest}
        with serving(tmp_path, "kv_both", **settings) as engine:
            assert not engine.save()
            stats = engine.scheduler.stats().reduce()
            assert saved == stats.get("ucm_saved_blocks_total")

    def test_both_does_both(self, tmp_path: Path) -> None:
        """The usual role saves, and loads what it has saved."""
        with serving(tmp_path, "kv_both") as engine:
            engine.save()
            assert (set(), {"s"}, set()) == engine.load()


class TestInsideOfAnother:
    def test_settings_of_the_child_count(self, tmp_path: Path) -> None:
        """H-13: inside of MultiConnector, store, role and failure policy are those of
        our own entry, whatever the outer one says."""
        slab = str(tmp_path / "slab")
        child = {
            "kv_connector": "UCMConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "weights_revision": "r",
                "store": {"path": slab},
            },
        }
        outer = engine_config(str(tmp_path))
        outer.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"connectors": [child]},
        )
        ((kind, config),) = MultiConnector._get_connector_classes_and_configs(outer)
        made = Setup.of(config, plain_cache())
        assert UCMConnector is kind
        assert slab == made.config.store.path
        assert (Saves.NOTHING, Loads.ASYNC) == (made.mode.saves, made.mode.loads)
        assert made.recomputes

    @pytest.mark.parametrize("is_staged", [False, True])
    def test_handshakes_of_another_child_are_passed_over(
        self, tmp_path: Path, is_staged: bool
    ) -> None:
        """Another child's handshake is no handshake of ours: the first report of each
        rank tells the same, and only then is anything found or saved."""
        engine = Engine(make_setup(tmp_path, "kv_both"))
        connector = UCMConnector.__new__(UCMConnector)
        connector._scheduler, connector._worker = engine.scheduler, None
        foreign = KVConnectorHandshakeMetadata()
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            memory = dict(zip("ab", engine.memory, strict=True))
            engine.worker.register(memory)
            if is_staged:
                connector.set_xfer_handshake_metadata_pp_aware({(1, 0): foreign})
            else:
                connector.set_xfer_handshake_metadata({0: foreign})
            engine.save("too early")
            assert 0 == engine.worker._counters.total("ucm_offered_parts_total")
            engine.save("in time")
            assert (set(), {"s"}, set()) == engine.load()

    def test_ranks_that_disagree_while_serving_end_our_work_only(
        self, tmp_path: Path
    ) -> None:
        """X-08: a rank that tells late that it stores something else ends saving and
        loading; the engine goes on."""
        setup = make_setup(tmp_path, "kv_both")
        engine = Engine(setup)
        other = engine_config(str(tmp_path), weights_revision="another")
        theirs = Setup.of(other, plain_cache())
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            envelope = engine.worker.report()
            wrong = type(envelope)(
                (), (type(envelope.handshakes[0]).of(theirs.facts(0)),)
            )
            engine.scheduler.apply(
                SimpleNamespace(
                    kv_connector_worker_meta=wrong,
                    finished_recving=None,
                    finished_sending=None,
                )
            )
            assert (0, False) == engine.scheduler.match(request("s"), 0)
            assert engine.scheduler._adapter.bypass
