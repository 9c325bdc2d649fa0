# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks.oracle`` asks of an engine: requests at random, ended in each state."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.oracle_settings import Setting
from ucm.errors import DeviceError, StoreFullError, StoreUnavailableError
from ucm.integration.vllm.adapters import SaltedHashes, _Files, adapter_settings
from ucm.testing.faults import FaultPlan

__all__ = ["Adapter", "Asked", "Fickle", "Load", "inputs"]

_DRAIN_S: Final = 120.0
_PAUSES: Final = ("keep", "keep", "abort")
_RECENT: Final = 60
"""So many requests are asked again, or gone on with."""


@attrs.frozen
class Adapter:
    """A LoRA adapter as it is while an engine runs."""

    number: int
    path: Path
    content: int
    """Says all of what it holds."""

    def request(self) -> Any:  # noqa: ANN401 - vLLM's LoRARequest
        """Return it as the engine takes it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.path.name, self.number, str(self.path))


@attrs.define(eq=False)
class Asked:
    """A request, and what came of it."""

    name: str
    request: Any
    """The engine's own."""
    prompt: list[int]
    salt: str
    most: int
    stops: list[int]
    """Tokens that end the answer."""
    content: int = 0
    """Of its adapter; 0: none."""
    key: bytes = b""
    """By which the hashes of its blocks are those of its adapter's content."""
    said: list[int] = attrs.Factory(list)
    has_ended: bool = False
    steps_left: int | None = None
    """Steps after which it is aborted."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """What its blocks are called."""
        if self.key:
            return SaltedHashes(self.request, self.key)
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes

    @property
    def is_running(self) -> bool:
        """Whether the engine computes it."""
        return bool(self.request.status.name == "RUNNING")


def inputs(tokens: list[int], salt: str) -> dict[str, Any]:
    """Return tokens as the engine takes them."""
    return {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})


class Load:
    """
    Requests at random for one engine.

    Args:
        llm: The engine, in this process.
        past: All that was asked, by engines before as well; it grows.
        roots: Beginnings that prompts have in common.
        adapters: Which there are.
    """

    def __init__(
        self,
        llm: Any,  # noqa: ANN401 - vLLM's LLM
        setting: Setting,
        chance: random.Random,
        past: list[Asked],
        roots: Sequence[list[int]],
        adapters: Sequence[Adapter],
    ) -> None:
        self._llm, self._setting, self._chance, self._past = llm, setting, chance, past
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.live: dict[str, Asked] = {}
        self._last: Any = None
        self.told: Counter[str] = Counter()
        self.problems: list[str] = []
        self._roots = roots
        config = llm.llm_engine.vllm_config.lora_config
        files = _Files(adapter_settings(config) or "", None)
        self._adapters = [(each, files.salt_of(each.request())) for each in adapters]
        self._watch("add_request", self._added)
        self._watch("_preempt_request", lambda *_: self.told.update(["preempted"]))

    def _watch(self, method: str, seen: Callable[..., None]) -> None:
        inner = getattr(self.scheduler, method)

        def call(*args: object, **kwargs: object) -> object:
            seen(*args)
            return inner(*args, **kwargs)

        setattr(self.scheduler, method, call)

    def _added(self, request: object) -> None:
        self._last = request

    def run(self, seconds: float, between: Callable[[int], None]) -> None:
        """Ask for so long, then let all end; call *between* after each step."""
        until, chance, target, step = time.monotonic() + seconds, self._chance, 16, 0
        while time.monotonic() < until:
            if chance.random() < 0.01:
                target = chance.choice([0, 1, 8, 32, 96])
            while len(self.live) < target and chance.random() < 0.6:
                self._ask()
            if chance.random() < self._setting.resets:
                self._reset()
            if chance.random() < self._setting.sleeps:
                self._sleep()
            self._step()
            step += 1
            between(step)
        until = time.monotonic() + _DRAIN_S
        while self.live or self.scheduler.has_requests():
            self._step()
            if time.monotonic() > until:
                left = [
                    f"{each.request_id} {each.status.name}"
                    for each in self.scheduler.requests.values()
                ]
                self.problems.append(f"{len(left)} do not end: {left[:5]}")
                break
        self.told["steps"] += step

    def _tokens(self, least: int, most: int) -> list[int]:
        chance = self._chance
        return [chance.randrange(5, 500) for _ in range(chance.randrange(least, most))]

    def _prompt(self) -> tuple[list[int], str]:
        """Return a prompt, most often one that has its beginning in common with others."""
        chance, most = self._chance, self._setting.max_len - 8
        recent = self._past[-_RECENT:]
        over = [each for each in recent if each.has_ended]
        kind, salt = chance.random(), ""
        if kind < 0.4 and over:
            before = chance.choice(over)
            prompt, salt = list(before.request.all_token_ids), before.salt
            if chance.random() < 0.3:
                prompt = prompt[: chance.randint(1, len(prompt))]
            prompt += self._tokens(1, 60)
        elif kind < 0.55 and recent:
            before = chance.choice(recent)
            prompt, salt = list(before.prompt), before.salt
        elif kind < 0.85:
            prompt = chance.choice(self._roots) + self._tokens(1, 100)
        else:
            prompt = self._tokens(1, most)
        if not salt and chance.random() < self._setting.salted:
            salt = chance.choice("ab")
        if chance.random() < 0.15:  # whole blocks
            size = self._setting.block_tokens
            prompt = prompt[: max(size, len(prompt) // size * size)]
        return prompt[:most], salt

    def _wish(self) -> dict[str, Any] | None:
        chance = self._chance
        if chance.random() >= self._setting.wishes:
            return None
        wishes: list[dict[str, Any]] = [
            {"ucm": {"store": False}},
            {"ucm": {"forget": True}},
            {"ucm": {"retain_seconds": chance.choice([-600, 600])}},
            {"max_load_tokens": chance.randrange(200)},
            {"max_offload_tokens": chance.randrange(200)},
        ]
        return {"kv_transfer_params": chance.choice(wishes)}

    def _ask(self) -> None:
        from vllm import SamplingParams

        chance, (prompt, salt) = self._chance, self._prompt()
        room = self._setting.max_len - len(prompt)
        most = min(room, chance.choice([1, 2, 10, 40, 100]))
        is_stopped = chance.random() < self._setting.stopped
        stops = self._tokens(100, 101) if is_stopped else []
        sampling = SamplingParams(
            temperature=0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            stop_token_ids=stops,
            prompt_logprobs=1 if chance.random() < self._setting.logprobs else None,
            extra_args=self._wish(),
        )
        name = f"r{len(self._past)}"
        priority = chance.randrange(3) if self._setting.policy == "priority" else 0
        # All or none: on a CPU the engine itself gives prompts without an adapter, beside
        # two with one, what the second adapter says.
        adapter, key = chance.choice(self._adapters or [(None, b"")])
        self._llm.llm_engine.add_request(
            name,
            inputs(prompt, salt),
            sampling,
            priority=priority,
            lora_request=adapter and adapter.request(),
        )
        content = adapter.content if adapter else 0
        asked = Asked(name, self._last, prompt, salt, most, stops, content, key)
        if chance.random() < self._setting.aborted:
            asked.steps_left = chance.choice([0, 1, 1, 2, 3, 5, 10, 30])
        self._past.append(asked)
        self.live[name] = asked
        self.told["requests"] += 1

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            asked = self.live.get(output.request_id)
            if asked is None:
                continue
            asked.said = list(output.outputs[0].token_ids)
            if output.finished:
                del self.live[asked.name]
                asked.has_ended = True
                is_stopped = asked.said and asked.said[-1] in asked.stops
                if len(asked.said) != asked.most and not is_stopped:
                    said = f"{len(asked.said)} of {asked.most} tokens"
                    self.problems.append(f"{asked.name} ended with {said}")
        for asked in [*self.live.values()]:
            if asked.steps_left is None:
                continue
            asked.steps_left -= 1
            if asked.steps_left < 0:
                self._abort(asked)

    def _abort(self, asked: Asked) -> None:
        del self.live[asked.name]
        self.told[f"aborted {asked.request.status.name}"] += 1
        self._llm.llm_engine.abort_request([asked.name], internal=False)

    def _sleep(self) -> None:
        """Pause the engine, with its requests or without, and let it go on."""
        chance = self._chance
        try:
            self._llm.sleep(level=chance.choice([0, 0, 1]), mode=chance.choice(_PAUSES))
            self.told["sleeps"] += 1
        except RuntimeError:  # as of resets
            self.told["sleeps refused"] += 1
        for asked in [*self.live.values()]:
            if asked.request.is_finished():
                self._abort(asked)
        for _ in range(chance.randrange(3)):
            self._step()
        self._llm.wake_up()

    def _reset(self) -> None:
        chance = self._chance
        try:
            self._llm.reset_prefix_cache(
                reset_running_requests=chance.random() < 0.6,
                reset_connector=chance.random() < 0.3,
            )
            self.told["resets"] += 1
        except RuntimeError:  # the engine refuses while blocks are held
            self.told["resets refused"] += 1


class Fickle(FaultPlan):
    """Store and device that fail and dawdle at random, until told to stop."""

    _FAIL: Final = {
        "reserve": StoreFullError,
        "gather": DeviceError,
        "scatter": DeviceError,
    } | dict.fromkeys(
        ("seal", "commit", "read", "verify", "recheck"), StoreUnavailableError
    )

    def __init__(self, chance: random.Random, setting: Setting) -> None:
        super().__init__()
        self._chance, self._setting = chance, setting
        self._calm = threading.Event()
        self.fired: Counter[str] = Counter()

    def stop(self) -> None:
        """Let all go well from now on."""
        self._calm.set()

    def go_on(self) -> None:
        """Let it fail again."""
        self._calm.clear()

    def at(self, verb: str) -> None:
        """Wait, or fail."""
        if verb not in self._FAIL or self._calm.is_set():
            return
        with self._lock:
            fails, waits, share = (self._chance.random() for _ in range(3))
        if waits < self._setting.slow_rate:
            self._calm.wait(share * self._setting.pause_s)
        if fails < self._setting.fault_rate:
            self.fired[verb] += 1
            raise self._FAIL[verb](f"planned: {verb}")
