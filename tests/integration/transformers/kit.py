# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, what they are asked, and stores for their prompts."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers

from tests.cache.test_tiers import until
from tests.e2e.models import LLAMA, Recipe, make_model
from ucm.prefixes import tenant_of
from ucm.stores.slab import SlabSurvey, facts_of
from ucm.stores.slab._tenants import places_of

BLOCK = 16
BF16 = attrs.evolve(LLAMA, name="llama-bf16", dtype="bfloat16")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where models compute."""
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"
"""What ``generate`` calls the cache that it is given."""
KEEPS_TYPES_APART = pytest.mark.skipif(
    RELEASE >= (5, 23),
    reason="this transformers keeps keys and values of two types under autocast",
)
OTHER = attrs.evolve(LLAMA, name="llama-other", seed=8)
"""The same shape with other weights."""


def model_of(recipe: Recipe) -> Any:
    """Return a model that is ready to generate; the same one each time."""
    return _load(make_model(recipe))


@functools.cache
def _load(path: Path) -> Any:
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path).to(HERE)


def config_of(
    directory: Path, capacity: str = "64MiB", tiers: Sequence[object] = ()
) -> dict[str, object]:
    """Return settings of a store of that test's own."""
    return {
        "store": {"path": str(directory / "slab"), "capacity": capacity},
        "tiers": list(tiers),
        "timeout": {"fetch": 60.0},  # of a busy machine
        "log": {"level": "off"},
    }


def tenants_of(directory: Path) -> dict[int, int]:
    """Return how many blocks of a store each tenant's place in its table has."""
    with SlabSurvey(directory / "slab") as survey:
        (found,) = facts_of(survey).classes
        return dict(found.tenants)


def place_of(salt: bytes) -> int:
    """Return the place of a salt's tenant."""
    (place,) = places_of(np.array([tenant_of(salt)], np.uint32)).tolist()
    return int(place)


def prompt(seed: int, num_tokens: int) -> torch.Tensor:
    """Return ``[1, n]`` tokens that no other seed begins with."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (1, num_tokens), generator=generator)


def changed(ids: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a prompt of which only so many blocks are the same."""
    other = ids.clone()
    other[:, blocks * BLOCK :] = (other[:, blocks * BLOCK :] + 7) % 509 + 3
    return other


def generate(
    model: Any,
    ids: torch.Tensor,
    past: Any = None,
    mask: torch.Tensor | None = None,
    num_tokens: int = 8,
    **options: Any,
) -> Any:
    """Decode exactly so many tokens, greedily unless *options* say otherwise."""
    return model.generate(
        input_ids=ids.to(HERE),
        attention_mask=(torch.ones_like(ids) if mask is None else mask).to(HERE),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        return_dict_in_generate=True,
        **{CACHE: past, "do_sample": False, **options},
    )


def loaded_blocks(prompts: Any) -> int:
    """Return how many blocks have come from the store, also if it is gone."""
    counters = prompts.cache.measure().counters
    return int(counters.get("ucm_settled_parts_total|load|committed|", 0))


def fetched_blocks(prompts: Any) -> int:
    """Return how many blocks tiers have brought."""
    return int(prompts.cache._core._counters.total("ucm_fetched_parts_total"))


def await_tiers(prompts: Any) -> None:
    """Wait until tiers are asked, where there are some."""
    fetches = prompts.cache._core.fetches
    until(lambda: fetches._client is None or fetches.is_served)


def padded(*prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of prompts as one batch, padded at the left."""
    length = max(each.shape[1] for each in prompts)
    ids = torch.zeros((len(prompts), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(prompts):
        ids[row, length - each.shape[1] :] = each[0]
        mask[row, length - each.shape[1] :] = 1
    return ids, mask
