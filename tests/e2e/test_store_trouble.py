# SPDX-License-Identifier: Apache-2.0
"""A store in trouble in the middle of a run: the engine goes on, its output is exact."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clocks import AdvancingThreads
from tests.e2e.connector import (
    FAILURES,
    LOADED,
    SAVED,
    corrupt,
    plant,
    prompt,
    quiesced,
    ucm_config,
)
from tests.e2e.engine import (
    await_counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.kit.lockstep import read_traces
from tests.traces import traces_of
from ucm.errors import StoreUnavailableError
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.threads import SYSTEM
from ucm.tracing import STAGE_FAILED, TICKET_REFUSED, TICKET_SETTLED

SETTLED = "vllm:ucm_settled_parts"
SAVE_VERBS = ("reserve", "seal", "commit")
LOAD_VERBS = ("read", "verify", "recheck")
TOKENS = 8
PROMPTS = [prompt(2000 + n, 300) for n in range(9)]
"""Two whole blocks of 128 tokens each."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[int, list[int]]:
    """Return what the engine without a connector says to each prompt."""
    with in_process_engine(llama) as llm:
        tokens = generate(llm, PROMPTS, TOKENS).token_ids
    return {one[0]: said for one, said in zip(PROMPTS, tokens, strict=True)}


@pytest.fixture
def ask(expected: dict[int, list[int]]) -> Callable[..., int]:
    """Return a function that asks prompts anew and tells how many tokens were loaded."""

    def ask(llm: Any, *prompts: list[int]) -> int:
        reset_prefix_cache(llm)
        said = generate(llm, prompts, TOKENS)
        assert [expected[one[0]] for one in prompts] == said.token_ids
        return said.external_tokens

    return ask


class Switch:
    """Faults at some verbs, of which one at a time is on."""

    def __init__(self, *verbs: str) -> None:
        self.on = ""
        self.plan = FaultPlan(*(Fault(verb, self._at(verb), nth=0) for verb in verbs))

    def _at(self, verb: str) -> Callable[[], None]:
        def act() -> None:
            if self.on == verb:
                raise StoreUnavailableError("gone")

        return act


def labelled(llm: Any, name: str, **labels: str) -> int:
    """Return a counter of the engine over all series that have these labels."""
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == name and labels.items() <= metric.labels.items()
    )


def lines(slab: Path, event: str, **keys: object) -> Iterator[dict[str, Any]]:
    """Yield what the engines of a test have logged of an event."""
    for line in read_traces(traces_of(slab)):
        if line["event"] == event and keys.items() <= line.items():
            yield dict(line)


class TestFailing:
    def test_store_that_fails_in_the_middle_costs_what_it_had_in_hand(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        ask: Callable[..., int],
    ) -> None:
        """S1-25, X-04: whichever verb fails for a while, saves are misses and loads
        are recomputed, each counted and logged with its stage; afterwards all is well."""
        slab, switch = tmp_path / "slab", Switch(*SAVE_VERBS, *LOAD_VERBS)
        plant(monkeypatch, switch.plan)
        config = ucm_config(slab)
        failed = {"outcome": "failed", "reason": "unavailable"}
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            for number, switch.on in enumerate(SAVE_VERBS, 1):
                assert 0 == ask(llm, PROMPTS[number])
                assert {} == quiesced(llm)
                told = labelled(llm, SETTLED, direction="save", **failed)
                assert 2 * number == told
                switch.on = ""
                assert 0 == ask(llm, PROMPTS[number])
                assert 2 * number == await_counter(llm, SAVED, 2 * number)
            for number, switch.on in enumerate(LOAD_VERBS, 1):
                assert 256 == ask(llm, PROMPTS[number])
                assert number == labelled(llm, FAILURES, reason="unavailable")
                switch.on = ""
                assert {} == quiesced(llm)
        stages = {line["stage"] for line in lines(slab, STAGE_FAILED)}
        loads = {"fetch", "publish"}
        # Without native code blocks are verified before they are copied.
        assert {"gather", "transfer", "commit"} | loads == stages - {"scatter"}


class TestHanging:
    def test_store_that_hangs_in_the_middle_is_not_waited_for(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        ask: Callable[..., int],
    ) -> None:
        """S1-26, X-05: a save and a load that hang end at their deadlines, named so in
        metric and log; the engine serves meanwhile, and all is well afterwards."""
        slab, save, load = tmp_path / "slab", Gate(), Gate()
        clock = AdvancingThreads()
        monkeypatch.setattr(SYSTEM, "monotonic", clock.monotonic)

        def hang() -> None:
            clock.advance(31.0)  # what is open now is late, and nothing that follows
            load()

        plant(monkeypatch, FaultPlan(Fault("commit", save, 2), Fault("read", hang, 1)))
        config = ucm_config(slab)
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            ask(llm, PROMPTS[0])
            await_counter(llm, SAVED, 2)
            assert 0 == ask(llm, PROMPTS[1])
            save.wait_reached()
            assert 256 == ask(llm, PROMPTS[0])
            load.wait_reached()
            assert 1 == labelled(llm, FAILURES, reason="deadline")
            assert 0 == ask(llm, PROMPTS[2])
            load.open()
            save.open()
            assert {} == quiesced(llm)
            assert 2 == labelled(
                llm, SETTLED, direction="save", outcome="cancelled", reason="deadline"
            )
            assert 0 == ask(llm, PROMPTS[2])  # its save was refused meanwhile
            assert {} == quiesced(llm)
            assert 256 == ask(llm, PROMPTS[2])
        assert list(lines(slab, TICKET_SETTLED, direction="load", reason="deadline"))


class TestCorrupted:
    def test_store_that_rots_in_the_middle_is_noticed(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        ask: Callable[..., int],
    ) -> None:
        """Blocks that are damaged between two requests, or as a load opens them,
        are recomputed, counted and logged as corrupt, and stored anew."""
        slab, rots = tmp_path / "slab", [False]

        def rot() -> None:
            if rots.pop():
                corrupt(slab)
            rots.append(False)

        plant(monkeypatch, FaultPlan(Fault("read", rot, nth=0)))
        with in_process_engine(llama, kv_transfer_config=ucm_config(slab)) as llm:
            ask(llm, PROMPTS[0])
            await_counter(llm, SAVED, 2)
            assert 256 == ask(llm, PROMPTS[0])
            corrupt(slab)
            assert 256 == ask(llm, PROMPTS[0])
            assert 1 == labelled(llm, FAILURES, reason="corrupt")
            await_counter(llm, SAVED, 4)
            rots[0] = True  # as the next load opens its blocks
            assert 256 == ask(llm, PROMPTS[0])
            assert 2 == labelled(llm, FAILURES, reason="corrupt")
            await_counter(llm, SAVED, 6)
            assert 256 == ask(llm, PROMPTS[0])
            assert {} == quiesced(llm)
            assert 2 == labelled(llm, FAILURES)
            assert 4 == labelled(llm, LOADED)
        settled = list(lines(slab, TICKET_SETTLED, direction="load", reason="corrupt"))
        assert 2 == len(settled)
        assert all("checksum" in line["error"] for line in settled)


class TestSaturated:
    def test_full_dump_queue_refuses_and_holds_nobody_up(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        expected: dict[int, list[int]],
    ) -> None:
        """S1-01: while no save gets anywhere, every request runs to its end; saves
        beyond the queue's bound are refused at once, counted and logged."""
        from vllm import SamplingParams

        slab, gate = tmp_path / "slab", Gate()
        plant(monkeypatch, FaultPlan(Fault("reserve", gate)))
        one_block = {"tickets": 1, "window": 1, "span_bytes": 70_000}
        config = ucm_config(slab, queue=one_block)
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        with in_process_engine(
            llama, kv_transfer_config=config, skip_tokenizer_init=True
        ) as llm:
            engine, said = llm.llm_engine, {}
            for one in PROMPTS:
                engine.add_request(str(one[0]), {"prompt_token_ids": one}, sampling)
            while len(said) < len(PROMPTS):  # with the gate closed all the time
                for output in engine.step():
                    if output.finished:
                        tokens = list(output.outputs[0].token_ids)
                        said[int(output.request_id)] = tokens
            gate.wait_reached()
            gate.open()
            drain(llm)
            assert {} == quiesced(llm)
            refused = {"outcome": "refused", "reason": "queue_tickets"}
            count = labelled(llm, SETTLED, direction="save", **refused)
        assert {one[0]: expected[one[0]] for one in PROMPTS} == said
        assert (
            0
            < count
            == sum(
                line["blocks"]
                for line in lines(slab, TICKET_REFUSED, reason="queue_tickets")
            )
        )
