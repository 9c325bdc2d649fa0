# SPDX-License-Identifier: Apache-2.0
"""Hits of the slab that are computed because loading them is slower."""

import json
from pathlib import Path

import pytest

from tests.integration.vllm.test_halves import Engine, request
from tests.integration.vllm.test_lookups import (
    BLOCKS,
    ask,
    counted,
    lines,
    running,
    setup_of,
)
from tests.traces import logs_closed
from ucm.integration.vllm.messages import plan_in
from ucm.reasons import Reason
from ucm.scheduler import paying
from ucm.scheduler.messages import Failure, StepReport, encode
from ucm.story.lines import parse
from ucm.story.misses import explain_missed


def learn_slow_loads(engine: Engine) -> None:
    """Have it see prompts that are computed at once, and loads that take ages."""
    learns, now = engine.scheduler._paying, engine.scheduler._clock()
    for _ in range(4):
        learns.planned(1024, now)
        learns.planned(0, now + 0.001)
        learns.planned(0, now + 0.001)
        learns.ordered("learnt", range(48), now)
        learns.planned(0, now := now + 5.0)
        learns.over(["learnt"], now)


class TestSlower:
    def test_hit_that_does_not_pay_is_computed_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-59: what the slab has is not loaded if computing is faster; look-up, metric and
        log tell why. It is decided once for a request, however often the engine asks, and
        one request in sixteen loads all the same."""
        monkeypatch.setattr(paying, "_FEW_TOKENS", 16)  # of which no hit pays
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            learn_slow_loads(engine)
            for number in range(15):
                one = request(f"s{number}")
                told = {engine.scheduler.match(one, 0) for _ in range(5)}
                assert {(0, False)} == told
                engine.scheduler.allocated(one, [list(BLOCKS)], 0)
                engine.work(engine.plan())
                engine.scheduler.finished(one.request_id)
            assert {"never_offered": 1, "slower": 15} == counted(engine)
            one = request("s")
            told = {engine.scheduler.match(one, 0) for _ in range(5)}
            assert {(48, True)} == told
            engine.scheduler.allocated(one, [list(BLOCKS)], 48)
            assert 1 == engine.scheduler.counts()["loads_on_their_way"]
            engine.work(engine.plan())
            engine.scheduler.finished("s")
            assert engine.idle()
        line = lines(tmp_path)[-1]
        assert ("slower", 0, 48) == (
            *(line["reason"], line["found_tokens"], line["wanted_tokens"]),
        )

    @pytest.mark.parametrize(
        ("blocks", "told"),
        [(5, ("slower", 0, 80, None)), (7, ("never_offered", 48, 112, 3))],
    )
    def test_hit_that_does_not_pay_is_the_reason_where_it_is_most(
        self, tmp_path: Path, blocks: int, told: tuple[object, ...]
    ) -> None:
        """R-71: a short beginning that all prompts share, and that a step computes anyway, was told
        as why the long rest of each was computed, which nobody had ever saved."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            learn_slow_loads(engine)
            assert 0 == ask(engine, request("s", blocks))
        line = lines(tmp_path)[-1]
        keys = ("reason", "found_tokens", "wanted_tokens", "block")
        assert told == tuple(line.get(key) for key in keys)

    def test_short_hit_that_does_not_pay_is_told_beside_the_reason(
        self, tmp_path: Path
    ) -> None:
        """R-71: tokens were said to be found, none were loaded, and no line said why; and each such
        look-up asked the slab for other key spaces, though some of it was found."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            learn_slow_loads(engine)
            asked: list[bytes] = []
            engine.scheduler._lookups._elsewhere = asked.append
            assert 0 == ask(engine, request("s", 7))
        line = lines(tmp_path)[-1]
        assert [] == asked
        assert {"slower_tokens": 48} == line["detail"]
        _, words = explain_missed(parse(json.dumps(line).encode()))
        assert "48 tokens before it were computed" in words

    def test_hit_that_has_grown_is_decided_anew(self, tmp_path: Path) -> None:
        """R-59: what more came meanwhile, from a tier or another engine, may pay."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            one = request("s", 5)
            assert (48, True) == engine.scheduler.match(one, 0)
            learn_slow_loads(engine)
            assert (48, True) == engine.scheduler.match(one, 0)
            assert (0, False) == engine.scheduler.match(one, 16)

    def test_next_life_is_decided_anew(self, tmp_path: Path) -> None:
        """R-59: a request that was preempted may load what it computed before."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            assert 48 == ask(engine, request("s"))
            engine.work(engine.plan())
            learn_slow_loads(engine)
            assert 0 == ask(engine, request("s"))

    def test_setting_has_it_loaded(self, tmp_path: Path) -> None:
        """R-59: predict_loads: false loads whatever is there."""
        setup = setup_of(tmp_path, predict_loads=False)
        with logs_closed(), running(setup) as engine:
            engine.save("r", BLOCKS)
            learn_slow_loads(engine)
            assert 48 == ask(engine, request("s"))

    def test_loads_of_the_engine_are_learnt_from(self, tmp_path: Path) -> None:
        """R-59: from the order to the step that hears of the end, unless it failed."""
        with logs_closed(), running(setup_of(tmp_path)) as engine:
            engine.save("r", BLOCKS)
            seen = engine.scheduler._paying._choice.speed
            for number in range(4):
                assert number == seen.num_seen
                engine.load(f"s{number}")
                engine.scheduler.finished(f"s{number}")
            assert seen.is_known
            assert 0.0 < seen.seconds_of(1) < 60.0
            assert 48 == ask(engine, request("t"))
            (load,) = plan_in(engine.plan()).loads
            failure = Failure(
                transfer_id=load.transfer_id,
                request_id="t",
                generation=load.generation,
                group_id=0,
                bad_hash=b"",
                reason=Reason.EVICTED,
            )
            engine.scheduler._apply_report(
                encode(StepReport(rank=0, failures=(failure,)))
            )
            assert 0 == engine.scheduler.counts()["loads_on_their_way"]
            assert 4 == seen.num_seen
