# SPDX-License-Identifier: Apache-2.0
"""The settings of ``benchmarks.oracle``, drawn from a seed, and engines that have them."""

import random
from pathlib import Path
from typing import Any, Final

import attrs
from torch.cpu import _is_avx512_supported

from tests.e2e import models
from tests.e2e.connector import ucm_config
from tests.e2e.models import make_model

__all__ = [
    "RECIPES",
    "Setting",
    "choose",
    "config_of",
    "engine_arguments",
    "model_arguments",
]

RECIPES: Final = {
    each.name: each
    for each in (
        *(models.LLAMA, models.GEMMA3, models.LAGUNA, models.GPT_OSS),
        *(models.MISTRAL, models.DEEPSEEK, models.QWEN3_NEXT),
    )
}
_LIKELY: Final = (8, 3, 2, 2, 2, 1, 4)
_GROUPS: Final = {"gemma3": 3, "laguna": 2, "gpt-oss": 2, "qwen3next": 4}
_DRAFT: Final = attrs.evolve(models.LLAMA, name="llama-draft", seed=11)
"""Says something else than the model, so that most of what it drafts is refused."""
_DRAFT_TOKENS: Final = 3


@attrs.frozen(kw_only=True)
class Setting:
    """All that a seed decides of an engine, its connector and its requests."""

    model: str
    block_tokens: int
    max_len: int
    num_blocks: int
    capacity: int
    """Bytes of the slab."""
    draft: str
    """Empty: none; ``same``: the model itself; ``other``: one that is mostly wrong."""
    caches: bool
    """Whether the engine keeps prefixes itself."""
    policy: str
    has_tier: bool
    kills: bool
    """Whether the agent is killed."""
    flips: bool
    """Whether bytes of the slab, and of files of the disk, are flipped."""
    cache_dtype: str
    """Of the KV cache; ``auto``: as the model's."""
    fault_rate: float
    slow_rate: float
    pause_s: float
    timeouts: dict[str, float]
    tenant_share: float
    verify: str
    shortest: int
    roots: int
    """Beginnings that prompts have in common."""
    salted: float
    wishes: float
    aborted: float
    resets: float
    """How often in a step the engine's cache is reset."""
    sleeps: float
    """How often in a step the engine is paused, or put to sleep, and goes on."""
    stopped: float
    """Requests that a token of their answer may end."""
    logprobs: float
    """Requests that ask for log-probabilities of their prompt, and so skip caches."""
    adapters: int
    """LoRA adapters, of which the engine has room for two."""
    ranks: int
    """Of tensor parallelism; if several, only what the scheduler knows is looked at."""
    neighbour: str
    """Beside the second engine another uses the slab: it ``stays``, or ``dies``; empty: none."""
    role: str
    seqs: int
    budget: int
    """Tokens of a step."""
    is_async: bool
    layerwise: bool
    decoded: str
    span_bytes: int
    tickets: int
    window: int

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers."""
        return self.model == "qwen3next"

    @property
    def is_coarse(self) -> bool:
        """Whether numbers are so coarse that other batches round them otherwise."""
        return RECIPES[self.model].dtype != "float32" or self.cache_dtype != "auto"


_OF_AN_ENGINE: Final = (
    *("role", "seqs", "budget", "is_async", "layerwise", "decoded"),
    *("span_bytes", "tickets", "window"),
)
"""What another engine over the same slab may have otherwise."""


def choose(seed: int, phase: int = 0) -> Setting:
    """Return the setting of a seed; of its second phase with another engine's settings."""
    first = attrs.evolve(_draw(random.Random(f"{seed}")), role="kv_both")
    if not phase:
        return first
    other = _draw(random.Random(f"{seed} {phase}"))
    return attrs.evolve(first, **{name: getattr(other, name) for name in _OF_AN_ENGINE})


def _draw(chance: random.Random) -> Setting:
    pick = chance.choice

    def happens(share: float) -> bool:
        return chance.random() < share

    model = chance.choices(list(RECIPES), _LIKELY)[0]
    size = {"deepseek": 16, "qwen3next": 64}.get(model) or pick([32, 32, 64])
    max_len, groups = pick([256, 384, 512]), _GROUPS.get(model, 1)
    has_tier, seqs = happens(0.3), pick([4, 8, 16, 32, 48])
    timeouts = {
        "fence": [0, 0.002, 0.02],
        "save": [0.02, 0.1, 1],
        "load": [0.02, 0.1, 1],
        "company": [0, 0.02, 1],
    }
    draft = pick(["", "", "", "same", "other"]) if model == "llama" else ""
    is_fp8 = model == "llama" and not draft and happens(0.2)
    has_adapters = model == "llama" and not draft and not is_fp8 and happens(0.4)
    ranks = 2 if model in {"llama", "gemma3"} and not draft and happens(0.15) else 1
    return Setting(
        model=model,
        block_tokens=size,
        max_len=max_len,
        num_blocks=int(max_len // size * groups * pick([1.3, 2, 3, 5])) + 4 * groups,
        capacity=int(pick([0.5, 1.5, 3, 6, 12]) * (1 << 20) * (2 if size > 32 else 1)),
        draft=draft,
        # Recurrent layers keep states at the ends of blocks only beside it.
        caches=model == "qwen3next" or happens(0.6),
        policy=pick(["fcfs", "priority"]),
        has_tier=has_tier,
        kills=has_tier and happens(0.5),
        flips=happens(0.15),
        cache_dtype="fp8" if is_fp8 else "auto",
        fault_rate=pick([0, 0, 0.01, 0.05]),
        slow_rate=pick([0, 0.05, 0.3]),
        pause_s=pick([0.005, 0.05, 0.3]),
        timeouts={name: pick(of) for name, of in timeouts.items() if happens(0.3)},
        tenant_share=pick([1.0, 0.3]),
        verify=pick(["always", "once"]),
        shortest=pick([0, 0, 100]),
        roots=pick([1, 4, 20]),
        salted=pick([0, 0.3]),
        wishes=pick([0, 0.2]),
        aborted=pick([0.05, 0.3]),
        resets=pick([0, 0.01, 0.03]),
        sleeps=pick([0, 0, 0.01]),
        stopped=pick([0, 0.3]),
        # The engine dies of both on a CPU.
        logprobs=pick([0, 0.05]) * (not has_adapters),
        adapters=3 if has_adapters else 0,
        ranks=ranks,
        neighbour=pick(["", "", "", "stays", "dies"]) if ranks == 1 else "",
        role=pick(["kv_both", "kv_both", "kv_producer", "kv_consumer"]),
        seqs=seqs,
        budget=max(4 * seqs, pick([64, 128, 256, 1024])),
        is_async=happens(0.4),
        layerwise=happens(0.4),
        decoded=pick(["at_end", "each_block", "never"]),
        span_bytes=pick([1 << 17, 1 << 20, 16 << 20]),
        tickets=pick([2, 8, 1024]),
        window=pick([1, 4]),
    )


def config_of(setting: Setting, place: Path) -> dict[str, Any]:
    """Return the connector's configuration over the slab in *place*."""
    extra: dict[str, Any] = {
        "use_layerwise": setting.layerwise,
        "save_decoded": setting.decoded,
        "queue": {
            "span_bytes": setting.span_bytes,
            "tickets": setting.tickets,
            "window": setting.window,
        },
        "shortest_saved_tokens": setting.shortest,
        "timeout": dict(setting.timeouts),
    }
    if setting.role == "kv_consumer" and setting.decoded != "never":
        extra["consumer_saves_decoded"] = True
    if setting.has_tier:
        disk = {"type": "disk", "path": str(place / "disk"), "capacity": "256MiB"}
        extra["tiers"] = [disk]
        extra["timeout"] = {"fetch": 1.0, "tier": 2.0} | setting.timeouts
    config = ucm_config(place / "slab", capacity=str(setting.capacity), **extra)
    store = config["kv_connector_extra_config"]["store"]
    store |= {"tenant_share": setting.tenant_share, "verify": setting.verify}
    return config | {"kv_role": setting.role}


def engine_arguments(setting: Setting) -> dict[str, Any]:
    """Return what makes an engine as small, and as busy, as the setting says."""
    spare = 2 * setting.seqs if setting.draft else 0
    arguments = {
        "num_blocks": setting.num_blocks + spare,
        "max_model_len": setting.max_len,
        "max_num_seqs": setting.seqs,
        "scheduling_policy": setting.policy,
        "tensor_parallel_size": setting.ranks,
        "async_scheduling": setting.is_async,
    }
    if setting.model != "deepseek":
        arguments |= {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": setting.budget,
            "enable_prefix_caching": setting.caches,
        }
    return arguments | model_arguments(setting)


def model_arguments(setting: Setting) -> dict[str, Any]:
    """Return what an engine without connector needs as well, to compute the same."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": RECIPES[setting.model].dtype,
        # Some CPUs cannot have it in fp8.
        "kv_cache_dtype": setting.cache_dtype if _is_avx512_supported() else "auto",
    }
    if setting.model != "deepseek":
        arguments["block_size"] = setting.block_tokens
    if setting.adapters:
        arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if setting.draft:
        draft = _DRAFT if setting.draft == "other" else RECIPES[setting.model]
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": str(make_model(draft)),
            "num_speculative_tokens": _DRAFT_TOKENS,
        }
    return arguments
