# SPDX-License-Identifier: Apache-2.0
"""The engine that ``benchmarks.kills`` kills: asks prompts at random, and says what it got."""

import json
import random
import time
from pathlib import Path
from typing import Any

from tests.e2e.connector import connector_config, halves, prompt, quiesced
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache

__all__ = ["NUM_PROMPTS", "REUSED", "SIZE", "STOP", "answers", "serve"]

SIZE = 32
_LENGTH = 6 * SIZE
REUSED, _ONCE = 16, 200
NUM_PROMPTS = REUSED + _ONCE
"""Those that are asked again and again, more than the slab holds, and the others."""
_TOKENS = 4
_TIMEOUTS = {"fetch": 5.0, "tier": 2.0}
STOP = "stop"
"""File that tells an engine to end."""
_SETTLE_S = 120.0


def _prompt(number: int) -> list[int]:
    """Return a prompt by its number; one that is reused has its beginning in common."""
    common = prompt(8000 + number % 4, 2 * SIZE) if number < REUSED else []
    return common + prompt(8100 + number, _LENGTH - len(common))


def answers(model: str) -> list[list[int]]:
    """Return what the model alone says to each prompt."""
    with in_process_engine(Path(model), block_size=SIZE) as llm:
        asked = [_prompt(number) for number in range(NUM_PROMPTS)]
        return generate(llm, asked, _TOKENS).token_ids


def serve(model: str, place: str, url: str, seed: int) -> None:
    """Answer prompts until told to stop; print each answer, and last what is left."""
    at, chance = Path(place), random.Random(seed)
    config: dict[str, Any] = connector_config(
        type="slab", path=str(at / "slab"), capacity="1MiB"
    )
    config["kv_connector_extra_config"] |= {
        "tiers": [
            {"type": "disk", "path": str(at / "disk"), "capacity": "2MiB"},
            {"type": "redis", "url": url, "timeout": 1.0},
        ],
        "timeout": _TIMEOUTS,
        "predict_loads": False,
        "log": {"directory": str(at / "log")},
    }
    with in_process_engine(
        Path(model), kv_transfer_config=config, block_size=SIZE
    ) as llm:
        while not (at / STOP).exists():
            _tell(_ask(llm, chance))
        _tell({"left": _left(llm)})


def _ask(llm: Any, chance: random.Random) -> dict[str, object]:  # noqa: ANN401 - vLLM's LLM
    numbers = [
        chance.randrange(REUSED)
        if chance.random() < 0.7
        else chance.randrange(REUSED, NUM_PROMPTS)
        for _ in range(chance.randint(1, 4))
    ]
    reset_prefix_cache(llm)
    began = time.monotonic()
    said = generate(llm, [_prompt(number) for number in numbers], _TOKENS)
    hits = {
        metric.labels["tier"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:ucm_hit_tokens"
    }
    return {
        "began": began,
        "numbers": numbers,
        "said": said.token_ids,
        "seconds": said.elapsed_s,
        "hit": said.external_tokens,
        "hits": hits,
    }


def _left(llm: Any) -> dict[str, int]:  # noqa: ANN401 - as above
    """Return what either half and the agent's client keep, once nothing is under way."""
    client = halves(llm)[0]._scheduler._tiers._client  # noqa: SLF001 - shown to nobody
    until = time.monotonic() + _SETTLE_S
    left = {"": 1}
    while left and time.monotonic() < until:
        left = quiesced(llm)
        left |= {name: count for name, count in client.counts().items() if count}
    return left


def _tell(told: dict[str, object]) -> None:
    print(f"\n{json.dumps(told)}", flush=True)
