# SPDX-License-Identifier: Apache-2.0
"""Why a look-up of the real engine fell short: from metric, log, slab and command (R-71)."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import (
    SAVED,
    corrupt,
    halves,
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
from tests.e2e.test_keys import LORA, write_adapter
from tests.kit.lockstep import read_traces
from tests.traces import traces_of
from ucm.blocks import PackedKey
from ucm.cli.main import main
from ucm.errors import StoreUnavailableError
from ucm.fates import Fate
from ucm.reasons import MissReason
from ucm.stores.slab import explain
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.tracing import PREFIX_MISSED, REQUEST_ENDED

MISSED = "vllm:ucm_missed_lookups"
LOOKUPS = "vllm:ucm_lookups"
PROMPTS = [prompt(4000 + number, 300) for number in range(12)]
"""Two whole blocks of 128 tokens each."""
OF_ONE_ENGINE = {
    *("never_offered", "too_short", "admission", "not_committed", "corrupt", "denied"),
    *("failed", "unkeyed", "late", "unavailable", "bypassed"),
}
OF_OTHER_SLABS = {"other_key_space", "evicted"}
OF_OTHER_SETTINGS = {"queue", "unknown"}
OF_TIERS = {"slower"}
"""See test_tiers.py."""


def missed(llm: Any) -> Counter[str]:
    """Return how many look-ups fell short, by reason, as the engine exports them."""
    return Counter(
        {
            str(metric.labels["reason"]): int(metric.value)
            for metric in llm.get_metrics()
            if metric.name == MISSED and metric.value
        }
    )


def ask(
    llm: Any,
    tokens: list[int],
    wishes: dict[str, object] | None = None,
    adapter: Path | None = None,
) -> None:
    """Ask a prompt anew, that the engine's own cache does not know."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    reset_prefix_cache(llm)
    extra = {"kv_transfer_params": {"ucm": wishes}} if wishes else None
    sampling = SamplingParams(
        temperature=0,
        max_tokens=2,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    llm.generate(
        [{"prompt_token_ids": tokens}],
        sampling,
        use_tqdm=False,
        lora_request=None
        if adapter is None
        else LoRARequest(adapter.name, len(adapter.name), str(adapter)),
    )
    drain(llm)


def lines(slab: Path, event: str) -> Iterator[dict[str, Any]]:
    """Yield what the engines of a test have logged of an event."""
    for line in read_traces(traces_of(slab)):
        if line["event"] == event:
            yield dict(line)


class Command:
    """``ucm trace why`` over what the engines of a test have logged."""

    def __init__(self, slab: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._slab = slab
        self._capsys = capsys

    def _why(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Return what the command says of misses, by their reasons."""
        self._capsys.readouterr()
        log = str(traces_of(self._slab))
        assert 0 == main(["trace", "why", *arguments, "--log", log, "--json"])
        rows = json.loads(self._capsys.readouterr().out)["reasons"]
        return {row["reason"]: row for row in rows if row["kind"] == "miss"}

    def agrees(self, expected: Counter[str]) -> None:
        """
        Hold lines and command against the metric.

        All lines tell the same number of each reason, so does the command of all
        requests, and of one request for each reason it says that one and a remedy.
        """
        seen = list(lines(self._slab, PREFIX_MISSED))
        assert expected == Counter(line["reason"] for line in seen)
        told = self._why()
        assert expected == {reason: row["count"] for reason, row in told.items()}
        for line in {line["reason"]: line for line in seen}.values():
            row = self._why(line["request_id"])[line["reason"]]
            assert told[line["reason"]]["meaning"] == row["meaning"]
            assert row["remedy"]


class Faults:
    """A store that does what a test wants, from one moment to another."""

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.at_read: Callable[[], object] | None = None
        self.is_down = False
        self.plan = FaultPlan(
            Fault("commit", self._commit, nth=0), Fault("read", self._read, nth=0)
        )

    def _commit(self) -> None:
        if self.gate is not None:
            self.gate()
        if self.is_down:
            raise StoreUnavailableError("planned")

    def _read(self) -> None:
        if self.at_read is not None:
            self.at_read()


class TestReasons:
    def test_each_reason_is_read_from_metric_log_command_and_slab(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """R-71: what is provoked is what is told, once for each look-up, by metric, log
        and ``ucm trace why``, and the slab says the same of the block to whoever asks
        without an engine."""
        slab, faults = tmp_path / "slab", Faults()
        plant(monkeypatch, faults.plan)
        changing, hanging = (write_adapter(tmp_path / name, 1) for name in ("a", "ab"))
        os.mkfifo(hanging / "notes.json")  # nobody writes: who reads it waits
        expected: Counter[str] = Counter()
        config = ucm_config(slab)
        with in_process_engine(llama, kv_transfer_config=config, **LORA) as llm:
            told = _Told(llm, expected)
            ask(llm, PROMPTS[0])
            told.now("never_offered")
            ask(llm, prompt(1, 20))
            told.now("too_short")
            ask(llm, PROMPTS[1], {"store": False})
            ask(llm, PROMPTS[1])
            told.now("never_offered", "admission")
            assert {} == quiesced(llm)
            told.now("too_short")  # a step of one token, in which the worker reports
            self._on_its_way(llm, faults, told)
            self._damaged(llm, slab, faults, told)
            self._gone(llm, faults, told)
            self._failed(llm, faults, told)
            self._adapters(llm, changing, hanging, told)
            self._down(llm, monkeypatch, told)
        assert set(expected) == OF_ONE_ENGINE
        Command(slab, capsys).agrees(expected)
        seen = list(lines(slab, PREFIX_MISSED))
        (line,) = [each for each in seen if each["reason"] == "admission"]
        assert (0, 0, 0, "wish") == (
            *(line["block"], line["found_tokens"], line["computed_tokens"]),
            line["detail"]["text"],
        )
        key = PackedKey(bytes.fromhex(line["key"]))
        assert Fate.CLEARED is explain(slab, key).told.fate  # as ``_gone`` left it
        ended = {
            (each["request_id"], each["miss"])
            for each in lines(slab, REQUEST_ENDED)
            if "miss" in each
        }
        assert {line["reason"] for line in seen} == {reason for _, reason in ended}

    def _on_its_way(self, llm: Any, faults: Faults, told: "_Told") -> None:
        gate = faults.gate = Gate()
        ask(llm, PROMPTS[2])
        gate.wait_reached()
        ask(llm, PROMPTS[2])
        told.now("never_offered", "not_committed")
        gate.open()
        faults.gate = None
        assert {} == quiesced(llm)
        told.now("too_short")

    def _damaged(self, llm: Any, slab: Path, faults: Faults, told: "_Told") -> None:
        corrupt(slab)
        ask(llm, PROMPTS[2])  # its second look-up, behind the load that failed
        told.now("corrupt")
        assert {} == quiesced(llm)
        told.now("too_short")

    def _gone(self, llm: Any, faults: Faults, told: "_Told") -> None:
        ask(llm, PROMPTS[3])
        assert {} == quiesced(llm)
        told.now("never_offered", "too_short")
        store = halves(llm)[1]._worker._store
        faults.at_read = lambda: store.clear(b"")  # between its look-up and its load
        ask(llm, PROMPTS[3])
        faults.at_read = None
        told.now("denied")
        assert {} == quiesced(llm)
        told.now("too_short")

    def _failed(self, llm: Any, faults: Faults, told: "_Told") -> None:
        faults.is_down = True
        ask(llm, PROMPTS[9])
        assert {} == quiesced(llm)
        faults.is_down = False
        ask(llm, PROMPTS[9])
        told.now("never_offered", "too_short", "failed")
        assert {} == quiesced(llm)
        told.now("too_short")

    def _adapters(self, llm: Any, changing: Path, hanging: Path, told: "_Told") -> None:
        ask(llm, PROMPTS[10], adapter=changing)
        told.now("never_offered")
        write_adapter(changing, 2)
        ask(llm, PROMPTS[10], adapter=changing)
        told.now("unkeyed")
        ask(llm, PROMPTS[10], adapter=hanging)
        told.now("late")
        with (hanging / "notes.json").open("w") as file:
            file.write("{}")  # who reads it goes on
        assert {} == quiesced(llm)
        told.now("too_short")

    def _down(self, llm: Any, monkeypatch: pytest.MonkeyPatch, told: "_Told") -> None:
        store = halves(llm)[0]._scheduler._store

        def fail(keys: list[PackedKey]) -> int:
            raise StoreUnavailableError("planned")

        with monkeypatch.context() as patch:
            patch.setattr(store.inner, "match", fail)
            for number in range(4, 8):
                ask(llm, PROMPTS[number])
        told.now(*["unavailable"] * 3, "bypassed")


class _Told:
    """Holds the metric of an engine against what it should have come to."""

    def __init__(self, llm: Any, expected: Counter[str]) -> None:
        self._llm = llm
        self._expected = expected

    def now(self, *reasons: str) -> None:
        """Expect these look-ups to have fallen short since the last time."""
        self._expected.update(reasons)
        assert self._expected == missed(self._llm)


class TestOthers:
    def test_every_reason_is_provoked(self) -> None:
        """R-71: the tests of this module leave none out."""
        provoked = OF_ONE_ENGINE | OF_OTHER_SLABS | OF_OTHER_SETTINGS | OF_TIERS
        assert set(MissReason) == provoked

    def test_what_went_and_what_lies_under_other_keys_is_told(
        self, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """R-71: a slab that is too small, and two engines whose settings differ."""
        probe = tmp_path / "probe"
        with in_process_engine(llama, kv_transfer_config=ucm_config(probe)) as llm:
            block_bytes = halves(llm)[1]._worker._setup.layout.max_block_bytes
            ask(llm, PROMPTS[0])
            await_counter(llm, SAVED, 2)
            first = missed(llm)
        other = ucm_config(probe)
        with in_process_engine(
            llama, kv_transfer_config=other, dtype="bfloat16"
        ) as llm:
            ask(llm, PROMPTS[0])
            assert Counter(other_key_space=1) == missed(llm)
        line = list(lines(probe, PREFIX_MISSED))[-1]
        assert {"kv_dtype"} <= line["detail"].keys()
        Command(probe, capsys).agrees(first + Counter(other_key_space=1))
        told = explain(probe, PackedKey(bytes.fromhex(line["key"])))
        assert Fate.STORED is not told.told.fate or told.keyspace is not None
        assert 1 == len(told.others)
        slab = tmp_path / "small" / "slab"
        slab.parent.mkdir()
        config = ucm_config(slab, capacity=4 * block_bytes)
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            for each in PROMPTS[:3]:
                ask(llm, each)
                assert {} == quiesced(llm)
            ask(llm, PROMPTS[0])
            found = missed(llm)
            assert (3, 1) == (found["never_offered"], found["evicted"])
            (total,) = [m.value for m in llm.get_metrics() if m.name == LOOKUPS]
            assert found.total() == total
            generate(llm, [[3]], 1)
            found = missed(llm)
        Command(slab, capsys).agrees(found)
        (line,) = [
            each for each in lines(slab, PREFIX_MISSED) if each["reason"] == "evicted"
        ]
        assert 0 <= line["detail"]["age_s"] < 600

    def test_full_queue_and_a_store_that_remembers_nothing_are_told(
        self,
        llama: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """R-71: what was refused for want of room is missed for that, and a store without
        a memory of what became of blocks says so."""
        slab, faults = tmp_path / "slab", Faults()
        with monkeypatch.context() as patch:
            plant(patch, faults.plan)
            gate = faults.gate = Gate()
            config = ucm_config(slab, queue={"tickets": 1})
            with in_process_engine(llama, kv_transfer_config=config) as llm:
                for each in PROMPTS[:6]:
                    ask(llm, each)
                gate.wait_reached()
                ask(llm, PROMPTS[5])
                found = missed(llm)
                gate.open()
                faults.gate = None
                assert {} == quiesced(llm)
                everything = missed(llm)
            assert (6, 1) == (found["never_offered"], found["queue"])
        Command(slab, capsys).agrees(everything)
        none = tmp_path / "other" / "none"
        none.parent.mkdir()
        nothing = ucm_config(none)
        nothing["kv_connector_extra_config"]["store"] = {"type": "null"}
        with in_process_engine(llama, kv_transfer_config=nothing) as llm:
            ask(llm, PROMPTS[0])
            assert Counter(unknown=1) == missed(llm)
        Command(none, capsys).agrees(Counter(unknown=1))
