# SPDX-License-Identifier: Apache-2.0
"""
The engine of ``benchmarks.faults``: always busy, while what lies below its slab fails.

A dozen requests decode all the time, and every few steps a prompt is asked that the slab no
longer has. All is one process, so that each hook's CPU time is told by the engine's thread.
Arguments and results travel as JSON; times are seconds.
"""

import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.decode_side import Meter, own_cpu_seconds, watch
from benchmarks.sides import ours
from benchmarks.tiers_engine import agent_status
from tests.backends.faulty import FAULTS, Fault, Scene, scene
from tests.e2e.engine import generate, in_process_engine
from tests.e2e.models import LLAMA, make_model
from tests.kit.wall_clock import WallClock
from ucm.tracing import TIER_FAILED

__all__ = ["FETCH_S", "TIER_S", "answer_all", "suffer"]

FETCH_S, TIER_S = 2.0, 0.5
"""Deadlines: of a request's want, and of each call of a tier."""
_SIZE = 32
_DECODING, _EVERY = 12, 6
"""Requests that decode at any time, and steps from one prompt to the next."""
_APART = 8
"""Steps from the beginning of one that decodes to that of the next: none end together."""


def _tokens(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(5, 500) for _ in range(length)]


_SHORT = [(_tokens(n, 20), 96) for n in range(48)]
_LONG = [(_tokens(1000 + n, 6 * _SIZE + 1), 4) for n in range(32)]
_PROMPTS = [*_SHORT, *_LONG]
"""With the tokens that each is given."""
_POOL, _SLAB = 160 << 16, "6MiB"
"""For fewer blocks than all prompts have."""
_PATIENCE_S = 180.0
_TIER_HITS = "ucm_hit_tokens_total"


def _engine(**config: Any) -> Any:  # noqa: ANN401 - a context with vLLM's LLM
    return in_process_engine(
        make_model(LLAMA),
        kv_cache_memory_bytes=_POOL,
        block_size=_SIZE,
        max_model_len=512,
        max_num_seqs=2 * _DECODING,
        **config,
    )


class Traffic:
    """
    Keeps an engine busy, and holds its answers against the right ones.

    Args:
        llm: The engine.
        expected: By the number of the prompt.
    """

    def __init__(self, llm: Any, expected: Sequence[Sequence[int]]) -> None:  # noqa: ANN401
        self._engine = llm.llm_engine
        self._expected = expected
        self._short = itertools.cycle(range(len(_SHORT)))
        self._long = itertools.cycle(range(len(_SHORT), len(_PROMPTS)))
        self._names, self._steps = itertools.count(), itertools.count(1)
        self.num_wrong = self.num_answers = 0
        self._begun = 0

    def step(self, *, asks: bool = True) -> None:
        """Let the engine run a step, and ask what is due."""
        at = next(self._steps)
        if self._begun < _DECODING and at % _APART == 0:
            self._begun += 1
            self._ask(next(self._short))
        if asks and at % _EVERY == 0:
            self._ask(next(self._long))
        for output in self._engine.step():
            if output.finished:
                number = int(output.request_id.split("-")[0])
                said = list(output.outputs[0].token_ids)
                self.num_answers += 1
                self.num_wrong += said != list(self._expected[number])
                if number < len(_SHORT):
                    self._ask(next(self._short))

    def run(self, count: int) -> None:
        """Run so many steps."""
        for _ in range(count):
            self.step()

    def until(
        self, is_so: Callable[[], bool], what: str, *, asks: bool = True
    ) -> float:
        """
        Run steps until something is so; return how long that took.

        Raises:
            TimeoutError: It does not come about.
        """
        began = time.monotonic()
        while not is_so():
            if time.monotonic() > began + _PATIENCE_S:
                raise TimeoutError(what)
            self.step(asks=asks)
        return time.monotonic() - began

    def _ask(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tokens, most = _PROMPTS[number]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"{number}-{next(self._names)}"
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)


class Measure:
    """
    What steps cost: CPU time of the engine's thread, of its hooks, and of our threads.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: Any) -> None:  # noqa: ANN401
        self._meter = Meter("", time.thread_time)
        watch(llm.llm_engine.engine_core.engine_core, self._meter, _DECODING)

    def of(self, run: Callable[[], None]) -> dict[str, float]:
        """Return what a step cost on the mean while something ran."""
        self._meter.take()
        cpu, count = own_cpu_seconds(), self._meter.num_steps
        run()
        cpu, count = own_cpu_seconds() - cpu, self._meter.num_steps - count
        steps = self._meter.take()
        parts = {
            name: statistics.mean(steps.get(name, [0.0]))
            for name in ("step", "scheduler's hooks", "worker's hooks")
        }
        return parts | {
            "threads": cpu / count,
            "median": statistics.median(steps["step"]),
        }


class Waits:
    """
    How long requests wait for tiers at most.

    Args:
        tiers: What the engine asks.
    """

    def __init__(self, tiers: Any) -> None:  # noqa: ANN401
        self.longest = 0.0
        self._began: dict[str, float] = {}
        want, is_pending = tiers._client.want, tiers.is_pending  # noqa: SLF001

        def asked(request_id: str, *arguments: Any, **named: Any) -> bool:  # noqa: ANN401
            self._began[request_id] = time.monotonic()
            return bool(want(request_id, *arguments, **named))

        def waits(request_id: str, computed_tokens: int = 0) -> bool:
            if is_pending(request_id, computed_tokens):
                return True
            if (began := self._began.pop(request_id, None)) is not None:
                self.longest = max(self.longest, time.monotonic() - began)
            return False

        tiers._client.want, tiers.is_pending = asked, waits  # noqa: SLF001

    def take(self) -> float:
        """Return the longest since the last time."""
        longest, self.longest = self.longest, 0.0
        return longest


def answer_all(has_store: bool, steps: int, rounds: int) -> dict[str, Any]:  # noqa: FBT001 - travels as JSON
    """Return what the model says, and what steps cost without tiers, or without us."""
    with (
        tempfile.TemporaryDirectory(prefix="ucm-faults-", dir="/dev/shm") as directory,
        _engine(
            kv_transfer_config=ours(_SLAB)(Path(directory)) if has_store else None
        ) as llm,
    ):
        said = [generate(llm, [tokens], most).token_ids[0] for tokens, most in _PROMPTS]
        traffic, measure = Traffic(llm, said), Measure(llm)
        traffic.run(steps)  # warms up
        calm = [measure.of(lambda: traffic.run(steps)) for _ in range(rounds)]
        return {"said": said, "calm": calm, "wrong": traffic.num_wrong}


def _answers(llm: Any) -> list[list[int]]:  # noqa: ANN401
    """Return what an engine with nothing in store says to each prompt."""
    return [
        each
        for prompts in (_SHORT, _LONG)
        for each in generate(llm, [p for p, _ in prompts], prompts[0][1]).token_ids
    ]


def suffer(
    expected: Sequence[Sequence[int]] | None, steps: int, rounds: int, only: str
) -> dict[str, Any]:
    """
    Return what each fault did to an engine over a tier, and what its calm steps cost.

    Args:
        expected: What the model says; None: as this engine does with nothing in store.
        steps: That are measured of each fault, and between two.
        rounds: So often each fault comes.
        only: Faults whose name has this.
    """
    faults = [fault for fault in FAULTS if only in fault.name]
    with ExitStack() as up:
        place = Path(up.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        clock = WallClock(place)
        os.environ |= clock.env  # the agent's: this process has its own already
        node: list[Node] = []
        on = up.enter_context(scene(place, clock, lambda: node[0].agent_pid))
        config = ours(
            _SLAB,
            tiers=[{"type": "redis", "url": on.url}],
            timeout={"fetch": FETCH_S, "tier": TIER_S},
            predict_loads=False,
            log={"directory": str(place / "log")},
        )(place)
        llm = up.enter_context(_engine(kv_transfer_config=config))
        node.append(Node(llm, place, on, Traffic(llm, expected or _answers(llm))))
        node[0].settle()
        node[0].traffic.run(steps)  # warms up
        node[0].calm.append(node[0].measure.of(lambda: node[0].traffic.run(steps)))
        for at in range(rounds):
            for fault in faults[:: -1 if at % 2 else 1]:
                node[0].befall(fault, steps)
        return {"calm": node[0].calm, "faults": node[0].told}


class Node:
    """
    An engine over a slab and a tier that faults befall.

    Args:
        llm: The engine.
        place: Where all of it lies.
        on: Server and agent.
        traffic: Of the engine.
    """

    def __init__(self, llm: Any, place: Path, on: Scene, traffic: Traffic) -> None:  # noqa: ANN401
        from tests.e2e.connector import halves

        self._place, self._on, self.traffic = place, on, traffic
        self._half = halves(llm)[0]._scheduler  # noqa: SLF001 - shown to nobody
        self._client = self._half._tiers._client  # noqa: SLF001
        self._waits = Waits(self._half._tiers)  # noqa: SLF001
        self.measure = Measure(llm)
        self.calm: list[dict[str, float]] = []
        """Between faults: one more than there are faults."""
        self.told: list[dict[str, Any]] = []

    @property
    def agent_pid(self) -> int:
        """Who the agent is."""
        return int(self._client._launch._process.pid)  # noqa: SLF001

    def settle(self) -> float:
        """Wait until prompts hit in the tier; return how long that took."""
        hits = self._half.counters.total(_TIER_HITS, tier="redis")

        def is_hit() -> bool:
            return bool(self._half.counters.total(_TIER_HITS, tier="redis") > hits)

        return self.traffic.until(is_hit, "no hit in the tier")

    def befall(self, fault: Fault, steps: int) -> None:
        """Measure steps in a fault, see that it is named and over, and then calm ones."""
        before, lines = self._numbers(), self._lines(fault)
        wrong, answers = self.traffic.num_wrong, self.traffic.num_answers
        self._waits.take()
        fault.begin(self._on)
        cost = self.measure.of(lambda: self.traffic.run(steps))
        seen: set[str] = set()
        named_s = self.traffic.until(
            lambda: self._is_named(fault, before, lines, seen),
            f"{fault.name} is not named",
        )
        calls_s = 0.0
        if not fault.name.startswith("agent"):  # one that stands still says nothing
            calls_s = self.traffic.until(
                lambda: not self._num_calls(), "calls do not end", asks=False
            )
        fault.end(self._on)
        settled_s = self.settle()
        self.told.append(
            {
                "fault": fault.name,
                "cost": cost,
                "longest wait": self._waits.take(),
                "named": named_s,
                "calls": calls_s,
                "settled": settled_s,
                "wrong": self.traffic.num_wrong - wrong,
                "answers": self.traffic.num_answers - answers,
            }
        )
        self.traffic.run(steps)  # what came too late is made up for
        self.calm.append(self.measure.of(lambda: self.traffic.run(steps)))

    def _numbers(self) -> dict[str, float]:
        self._half.refresh()
        now = self._half.counters.snapshot()
        return now.counters | now.gauges

    def _lines(self, fault: Fault) -> int:
        """Return how often the log has named a fault."""
        found = 0
        for path in (self._place / "log").iterdir():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):  # it is being written
                    told = json.loads(line)
                    about = told["event"], told.get("reason", "")
                    found += about == (fault.event, fault.why)
        return found

    def _is_named(
        self, fault: Fault, before: Mapping[str, float], lines: int, seen: set[str]
    ) -> bool:
        """Return whether metric and log have named it; *seen* is what did by now."""
        if not fault.metric or fault.is_counted(before, self._numbers()):
            seen.add("metric")
        is_rare = fault.event == TIER_FAILED  # once a minute, maybe by a fault before
        if not fault.event or self._lines(fault) > (0 if is_rare else lines):
            seen.add("log")
        return len(seen) == 2

    def _num_calls(self) -> int:
        slots = agent_status(self._place / "slab")["slots"].values()
        return sum(
            told["fetched"]["open"] + sum(tier["moving"] for tier in told["spilled"])
            for told in slots
        )
