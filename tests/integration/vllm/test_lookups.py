# SPDX-License-Identifier: Apache-2.0
"""What the door counts and tells of look-ups that fell short (R-71)."""

import contextlib
import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from tests.integration.vllm.test_halves import HASHES, Engine, make_setup, request
from tests.stores.slab_kit import index_path
from tests.traces import logs_closed
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.running import Known
from ucm.integration.vllm.setup import Setup
from ucm.reasons import Reason
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.messages import StepReport, encode
from ucm.scheduler.misses import SHORTFALLS
from ucm.scheduler.requests import NO_LIMIT, NO_WISHES, Wishes
from ucm.stores.slab import explain
from ucm.stores.slab._layout import Word
from ucm.story.misses import DETAILS
from ucm.tracing import PREFIX_MATCHED, PREFIX_MISSED, REQUEST_ENDED

BLOCKS = (1, 2, 3)


@contextlib.contextmanager
def running(setup: Setup):
    """Run both halves over a setup."""
    engine = Engine(setup)
    engine.register()
    try:
        yield engine
    finally:
        engine.worker.close()
        engine.scheduler.close()


def setup_of(tmp_path: Path, **config: object) -> Setup:
    """Return a setup that logs to files."""
    return make_setup(tmp_path, log={"directory": str(tmp_path / "log")}, **config)


def lines(tmp_path: Path, event: str = PREFIX_MISSED) -> list[dict]:
    """Return what schedulers have told of an event, once their logs are closed."""
    return [
        line
        for path in sorted((tmp_path / "log").glob("ucm-scheduler-*.jsonl"))
        for line in map(json.loads, path.read_text().splitlines())
        if line["event"] == event
    ]


def ask(engine: Engine, one: SimpleNamespace) -> int:
    """Look a request up and give it blocks, as the engine does; return what was found."""
    tokens, _ = engine.scheduler.match(one, 0)
    engine.scheduler.allocated(one, [list(BLOCKS)], tokens)
    return tokens


def counted(engine: Engine) -> dict[str, float]:
    """Return how many look-ups fell short, by reason."""
    totals = engine.scheduler._counters._totals
    name = "ucm_missed_lookups_total|"
    return {
        key.removeprefix(name): total
        for key, total in totals.items()
        if key.startswith(name)
    }


class TestLookUps:
    def test_each_life_is_counted_and_told_once_however_often_it_was_asked(
        self, tmp_path: Path
    ) -> None:
        """R-71: the look-up that decided counts; the same request in a later life is
        another one, and a load that is over no look-up."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            one = request("r")
            for _ in range(5):
                engine.scheduler.match(one, 0)
            assert {} == counted(engine)
            engine.scheduler.allocated(one, [list(BLOCKS)], 0)
            engine.scheduler.allocated(one, [list(BLOCKS)], 0)
            assert {"never_offered": 1} == counted(engine)
            ask(engine, one)
            assert {"never_offered": 2} == counted(engine)
            total = engine.scheduler._counters.total
            assert (2, 96) == (
                total("ucm_lookups_total"),
                total("ucm_wanted_tokens_total"),
            )
            engine.scheduler.finished("r")
            assert engine.idle()
        told = lines(tmp_path)
        assert [1, 2] == [line["life"] for line in told]
        assert {
            *("event", "level", "role", "timestamp_s", "request_id", "life"),
            *("computed_tokens", "found_tokens", "wanted_tokens", "block", "group"),
            *("key", "reason", "detail"),
        } <= told[0].keys()

    def test_hit_is_counted_and_nothing_told(self, tmp_path: Path) -> None:
        """R-71: look-ups are the denominator of those that fell short."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            engine.load("s")
            assert {"never_offered": 1} == counted(engine)
            total = engine.scheduler._counters.total
            assert (2, 96) == (
                total("ucm_lookups_total"),
                total("ucm_wanted_tokens_total"),
            )
        assert ["r"] == [line["request_id"] for line in lines(tmp_path)]
        assert ["s"] == [line["request_id"] for line in lines(tmp_path, PREFIX_MATCHED)]

    def test_hit_that_falls_short_names_its_first_missing_block(
        self, tmp_path: Path
    ) -> None:
        """R-71: position, group and key, by which a command says the same."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            assert 48 == ask(engine, request("s", 5))
            line_of = {"found_tokens": 48, "wanted_tokens": 80, "block": 3, "group": 0}
            engine.scheduler.finished("s")
        (_, line) = lines(tmp_path)
        assert line_of.items() <= line.items()
        assert line["key"].endswith(HASHES[3].hex())
        told = explain(tmp_path / "slab", bytes.fromhex(line["key"])).told
        assert "never" == told.fate.value
        ended = lines(tmp_path, REQUEST_ENDED)
        assert [("never_offered", 0), ("never_offered", 3)] == [
            (each["miss"], each["first_missing"]) for each in ended
        ]

    def test_quiet_log_has_no_line_for_each_request(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """R-72: standard error of a server has nothing of a miss; the metric has."""
        with logs_closed(), running(make_setup(tmp_path)) as engine:
            ask(engine, request("r"))
            assert {"never_offered": 1} == counted(engine)
        assert PREFIX_MISSED not in capfd.readouterr().err


class TestReasons:
    def test_block_that_went_for_others_was_evicted(self, tmp_path: Path) -> None:
        """R-71: read from metric, log and command alike, with how long ago."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            store = engine.worker._store
            slab = store._slab
            keys = engine.scheduler._adapter._matcher.keys_of(
                engine.scheduler._setup.layout.groups[0], HASHES[:1]
            )
            slab.index.withdraw(slab.index.look_up(slab.index.batch(keys)).slots)
            ask(engine, request("s"))
            assert {"never_offered": 1, "evicted": 1} == counted(engine)
            engine.scheduler.finished("s")
        line = lines(tmp_path)[-1]
        assert ("evicted", "evicted") == (line["reason"], line["detail"]["text"])
        assert 0 <= line["detail"]["age_s"] < 600
        told = explain(tmp_path / "slab", bytes.fromhex(line["key"])).told
        assert "evicted" == told.fate.value

    def test_engine_of_other_settings_is_told_by_its_fields(
        self, tmp_path: Path
    ) -> None:
        """R-71: two engines on one slab that share nothing are told why, also where tiers
        were away meanwhile."""
        first = setup_of(tmp_path)
        with logs_closed(), running(first) as engine:
            engine.save("r", BLOCKS)
        keyspace = attrs.evolve(first.keyspace, kv_dtype="another")
        with logs_closed(), running(attrs.evolve(first, keyspace=keyspace)) as engine:
            ask(engine, request("s"))
            assert {"other_key_space": 1} == counted(engine)
            away = SHORTFALLS[Reason.UNAVAILABLE]
            engine.scheduler._tiers.shortfall = {"t": away}.get
            engine.scheduler._tiers.are_there = True
            ask(engine, request("t"))
        line, beside = lines(tmp_path)[-2:]
        given = {"text": away[1], "slab": "other_key_space"}
        assert line["detail"] | given == beside["detail"]
        assert {"kv_dtype": ["another", first.keyspace.kv_dtype]} == line["detail"]
        told = explain(tmp_path / "slab", bytes.fromhex(line["key"]))
        (differs,) = told.others.values()
        assert {"kv_dtype"} == differs.keys()

    def test_save_that_is_on_its_way_is_not_committed(self, tmp_path: Path) -> None:
        """R-71: by this engine, or by another one that has the slots."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            one = request("r")
            ask(engine, one)
            plan = engine.plan([one], BLOCKS)
            ask(engine, request("s"))
            assert {"never_offered": 1, "not_committed": 1} == counted(engine)
            engine.work(plan)
            more = engine.scheduler._adapter._matcher.keys_of(
                engine.scheduler._setup.layout.groups[0], HASHES[3:4]
            )
            with engine.worker._store.reserve(more, 2048):
                ask(engine, request("t", 4))
            assert 2 == counted(engine)["not_committed"]

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [(Reason.QUEUE_BYTES, "queue"), (Reason.DEADLINE, "failed")],
    )
    def test_save_that_a_worker_refused_or_lost_says_so(
        self, tmp_path: Path, reason: Reason, expected: str
    ) -> None:
        """R-71: what a rank reports reaches the next look-up."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            one = request("r")
            ask(engine, one)
            (save,) = plan_in(engine.plan([one], BLOCKS)).saves
            number = save.transfer_id
            report = StepReport(
                rank=0,
                released=(number,),
                unstored_saves=(number,),
                why_unstored={number: reason},
            )
            engine.scheduler._apply_report(encode(report))
            ask(engine, request("s"))
            assert {"never_offered": 1, expected: 1} == counted(engine)
        assert reason == lines(tmp_path)[-1]["detail"]["text"]

    def test_worker_says_why_a_save_was_not_stored(self, tmp_path: Path) -> None:
        """R-71: a queue that has room for one ticket refuses the others, and the
        scheduler knows."""
        config = {"queue": {"nbytes": 2048, "span_bytes": 2048}}
        with logs_closed(), running(setup_of(tmp_path, **config)) as engine:
            engine.save("r", BLOCKS)
            ask(engine, request("s"))
            assert {"never_offered": 1, "queue": 1} == counted(engine)
        line = lines(tmp_path)[-1]
        assert (1, "queue_bytes") == (line["block"], line["detail"]["text"])

    def test_wish_to_save_nothing_is_an_admission(self, tmp_path: Path) -> None:
        """R-71: who asked for nothing to be stored is told that next time."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            one = request("r")
            one.kv_transfer_params = {"ucm": {"store": False}}
            ask(engine, one)
            engine.work(engine.plan([one], BLOCKS))
            engine.scheduler.finished("r", [list(BLOCKS)])
            ask(engine, request("s"))
            assert {"never_offered": 1, "admission": 1} == counted(engine)

    def test_store_that_hangs_is_unavailable_and_then_bypassed(
        self, tmp_path: Path
    ) -> None:
        """R-71: who did not answer and who was not asked can be told apart."""
        with (
            logs_closed(),
            running(setup_of(tmp_path)) as engine,
            index_path(tmp_path / "slab").open("rb") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)
            engine.worker._store._slab.index.header[Word.VERSION] |= 1
            for number in range(5):
                ask(engine, request(f"r{number}"))
            assert {"unavailable": 3, "bypassed": 2} == counted(engine)
            fcntl.flock(file, fcntl.LOCK_UN)
        assert {None} == {line.get("block") for line in lines(tmp_path)}

    def test_failed_runtime_is_a_bypass(self, tmp_path: Path) -> None:
        """R-71: once a rank serves nothing, nothing is looked for."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            failed = StepReport(rank=0, healthy=False)
            engine.scheduler._apply_report(encode(failed))
            ask(engine, request("r"))
            assert {"bypassed": 1} == counted(engine)

    def test_prompt_without_a_whole_block_is_too_short(self, tmp_path: Path) -> None:
        """R-71: nothing was wanted, and that is why nothing is found."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            ask(engine, request("r", 0))
            assert {"too_short": 1} == counted(engine)
            assert 0 == engine.scheduler._counters.total("ucm_wanted_tokens_total")

    def test_before_ranks_have_told_what_they_store_it_is_unkeyed(
        self, tmp_path: Path
    ) -> None:
        """R-71: a look-up that nobody could make is told as such."""
        setup = setup_of(tmp_path)
        with logs_closed():
            engine = Engine(setup)
            ask(engine, request("r"))
            assert {"unkeyed": 1} == counted(engine)
            engine.worker.close()
            engine.scheduler.close()

    def test_hit_that_the_engine_never_takes_up_is_offered_shorter(
        self, tmp_path: Path
    ) -> None:
        """R-71: a request for which the engine keeps no room would be asked for for ever, and
        hold up all behind it; while something runs, or a moment only, it just waits."""
        hit = PrefixMatch(64, MatchReason.HIT)
        known = Known(request("r"), NO_WISHES)
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            lookups = engine.scheduler._lookups

            def wait(seconds: float, *, is_idle: bool) -> int:
                for step in range(100):
                    now = 50.0 + seconds * step / 100
                    lookups.looked(known, hit, now)
                    lookups.stepped(now, is_idle=is_idle)
                return lookups.within(known).most_loaded

            assert NO_LIMIT == wait(10.0, is_idle=False)
            assert NO_LIMIT == wait(0.9, is_idle=True)
            for step in range(100):
                lookups.stepped(60.0 + step, is_idle=True)  # nobody asks: it is paused
            assert NO_LIMIT == lookups.within(known).most_loaded
            assert 56 == wait(1.1, is_idle=True)
            known.wishes = Wishes(most_loaded=9)
            assert 9 == lookups.within(known).most_loaded
            shorter = PrefixMatch(48, MatchReason.LIMITED, 64)
            lookups.looked(known, shorter, 80.0)
            lookups.decided(known)
            miss = known.miss
            assert miss is not None
            assert "queue" == miss.reason
            assert "gpu-memory" in DETAILS[str(miss.detail["text"])].remedy
            assert NO_LIMIT == known.most

    @pytest.mark.parametrize(
        ("hashes", "reason", "at"),
        [((), "unknown", None), (HASHES, "never_offered", 2)],
    )
    def test_hit_that_ranks_elsewhere_cut_short_names_its_block_if_that_is_known(
        self, tmp_path: Path, hashes: list[bytes], reason: str, at: int | None
    ) -> None:
        """R-71: a model without full attention has none there; else this machine says what it knows."""
        known = Known(request("r"), NO_WISHES)
        cut = PrefixMatch(32, MatchReason.LIMITED, 64)
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            lookups = engine.scheduler._lookups
            lookups.looked(known, cut, 80.0)
            lookups.decided(known, None, hashes)
        assert known.miss is not None
        block = known.miss.block
        assert (reason, at) == (known.miss.reason, block and block.at)

    def test_hit_that_somebody_else_holds_up_is_offered_whole(
        self, tmp_path: Path
    ) -> None:
        """R-71: where the engine has blocks by far, it is not for want of them that a hit is
        not taken up: another connector that was still asked lost ours an eighth a second."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            known = Known(request("r"), NO_WISHES, computed_tokens=16)
            pool = SimpleNamespace(get_num_free_blocks=lambda: pool.free)
            engine.scheduler.watch_cache(pool)
            lookups = engine.scheduler._lookups

            def wait(free: int, match: PrefixMatch) -> int:
                pool.free = free
                for step in range(100):
                    lookups.looked(known, match, 0.1 * step)
                    lookups.stepped(0.1 * step, is_idle=True)
                return lookups.within(known).most_loaded

            hit = PrefixMatch(64, MatchReason.MISS, 100 * 16)
            assert NO_LIMIT == wait(2 * 101 + 64, hit)
            assert 56 == wait(2 * 101 + 63, hit)

    def test_tiers_that_were_late_are_the_reason(self, tmp_path: Path) -> None:
        """R-71: what the slab lacks a tier may have; one that did not say so in time is why
        it was not found, and what the slab knows is told beside it."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            late = {"r": SHORTFALLS[Reason.DEADLINE]}
            engine.scheduler._tiers.shortfall = late.get
            engine.scheduler._tiers.are_there = True
            for name in ("r", "s"):
                assert 0 == ask(engine, request(name))
            assert {"late": 1, "never_offered": 1} == counted(engine)
        late, never = lines(tmp_path)
        assert ("late", "never_offered") == (late["reason"], never["reason"])
        assert "never_offered" == late["detail"]["slab"]
        assert late["key"] == never["key"]
