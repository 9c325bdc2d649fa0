# SPDX-License-Identifier: Apache-2.0
"""The tables of ``docs/modes.md``, from ``ucm.integration.vllm.modes``; ``pages`` writes them."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from ucm.config import Switch
from ucm.integration.vllm.modes import (
    ROLES,
    RULES,
    Facts,
    Mode,
    Shape,
    choose_mode,
    contradicts,
)

__all__ = ["TABLES", "all_facts"]

_SHOWN = {
    "is_mock": "`hit_ratio` is set",
    "context_parallel": "context parallel",
    "use_layerwise": "`use_layerwise`",
    "overlapping_batches": "batches overlap",
    "local_cache": "prefix caching",
    "micro_batches": "micro-batches",
    "speculation": "speculation",
}


def all_facts() -> Iterator[Facts]:
    """Return every combination that ``choose_mode`` can be asked about."""
    choices: dict[str, tuple[object, ...]] = {
        "is_mock": (False, True),
        "context_parallel": (False, True),
        "use_layerwise": (False, True),
        "shape": tuple(Shape),
        "overlapping_batches": (False, True),
        "local_cache": (False, True),
        "micro_batches": (False, True),
        "speculation": (False, True),
        "kv_role": tuple(ROLES),
        "writes_back": (False, True),
    }
    for values in itertools.product(*choices.values()):
        yield Facts(**dict(zip(choices, values, strict=True)))  # type: ignore[arg-type]


def _rules() -> Iterable[str]:
    yield "| | mode | when | saves | loads | why |"
    yield "|---|---|---|---|---|---|"
    for at, rule in enumerate(RULES, 1):
        when = ", ".join(
            value.value if isinstance(value, Shape) else _SHOWN[name]
            for name, value in rule.when.items()
        )
        yield f"| {at} | {_described(rule.mode, when or 'otherwise')} | {rule.mode.reason} |"


def _described(mode: Mode, middle: str) -> str:
    return f"`{mode.name}` | {middle} | {mode.saves.value} | {mode.loads.value}"


def _combinations() -> Iterable[str]:
    yield (
        "| `hit_ratio` | context parallel | `use_layerwise` | the model's KV cache "
        "| batches overlap | prefix caching | micro-batches | speculation "
        "| mode | saves | loads |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    mock = choose_mode(Facts(is_mock=True))
    yield f"| set{' | any' * 7} | {_outcome(mock)} |"
    for facts in all_facts():
        if facts.is_mock or facts.kv_role != "kv_both" or facts.writes_back:
            continue
        yield (
            f"| unset | {_yes(facts.context_parallel)} | {_yes(facts.use_layerwise)} "
            f"| {facts.shape.value} | {_yes(facts.overlapping_batches)} "
            f"| {_yes(facts.local_cache)} | {_yes(facts.micro_batches)} "
            f"| {_yes(facts.speculation)} | {_outcome(choose_mode(facts))} |"
        )


def _outcome(mode: Mode) -> str:
    return f"`{mode.name}` | {mode.saves.value} | {mode.loads.value}"


def _roles() -> Iterable[str]:
    yield "| `kv_role` | saves | loads |"
    yield "|---|---|---|"
    for role, (saves, loads) in ROLES.items():
        yield f"| `{role}` | {_kept(saves)} | {_kept(loads)} |"
        if not saves:
            told = f"`{role}` with `consumer_saves_decoded`"
            yield f"| {told} | as above, but no prompts | {_kept(loads)} |"


def _kept(is_kept: bool) -> str:  # noqa: FBT001
    return "as above" if is_kept else "nothing"


def _claims() -> Iterable[str]:
    yield "| `use_hybrid_linear_attention` | recurrent groups | only attention |"
    yield "|---|---|---|"
    for claim in Switch:
        yield (
            f"| `{claim.value}` | {_told(contradicts(claim, Shape.RECURRENT))} "
            f"| {_told(contradicts(claim, Shape.SINGLE))} |"
        )


def _told(is_wrong: bool) -> str:  # noqa: FBT001
    return "warning" if is_wrong else "taken"


def _yes(flag: bool) -> str:  # noqa: FBT001
    return "yes" if flag else "no"


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "rules": _rules,
    "combinations": _combinations,
    "roles": _roles,
    "claims": _claims,
}
"""By marker."""
