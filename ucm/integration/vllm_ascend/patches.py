# SPDX-License-Identifier: Apache-2.0
"""
Two explicit, reversible additions to vllm-ascend.

- ``gdn``: linear-attention layers (gated delta nets: Qwen3-Next, Qwen3.5) wait for
  their layer's load before their core and hand their states to the connector after it.
  vllm-ascend calls ``save_kv_layer`` with an empty name there, and never waits.
- ``written``: its wrapper ``UCMConnectorV1`` passes ``on_kv_cache_written`` on, by
  which attention back ends say that a layer's KV is written.

Nothing happens on import. ``apply`` first imports all it needs and compares the
signatures with those it was written for; an addition that does not fit is refused with
both, and the others hold. ``revert`` puts everything back.

Call ``apply`` in a worker, once vllm-ascend has put its own methods in place: it does
when the worker is built, before the connector is. Versions are looked at there and
nowhere else. States are taken as the layer holds them: vLLM 0.18 alone kept one set per
virtual engine, and ``compat.SUPPORTED`` begins behind it.

Threading: the worker's main thread.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ucm.errors import ConfigError, LayoutError
from ucm.integration.vllm.release import check_version

__all__ = ["PATCHES", "SETTING", "Outcome", "Patch", "applied", "apply", "revert"]

SETTING = "patch_vllm_ascend"
"""The setting that asks for ``apply``."""

_STATES = ("convolution", "recurrent")
"""What ``kv_cache`` of such a layer holds, in order."""
_UTILS = "vllm_ascend.attention.utils"
_MISSING = object()
_Function = Callable[..., Any]


@attrs.frozen(kw_only=True)
class Patch:
    """
    One method to put in place.

    Args:
        name: For messages.
        owner: ``module:class`` that has the method.
        method: Its name.
        takes: The signature that it must have; None: there must be none yet.
        uses: Functions that the new one calls, ``module:name`` with their signatures.
        make: Makes the new one of the old one and of those functions.
    """

    name: str
    owner: str
    method: str
    takes: str | None
    uses: Mapping[str, str]
    make: Callable[..., _Function]


@attrs.frozen
class Outcome:
    """What became of a patch; *reason* says why it was refused, and is empty else."""

    name: str
    reason: str = ""


@attrs.define
class _Applied:
    owner: type
    method: str
    old: object
    new: _Function


_in_place: dict[str, _Applied] = {}


def _has_metadata(metadata: Any, layer_name: str) -> bool:  # noqa: ANN401 - the back end's
    """Return whether a forward pass computes a layer; micro-batches come as a list."""
    if isinstance(metadata, list):
        return any(_has_metadata(one, layer_name) for one in metadata)
    return isinstance(metadata, dict) and metadata.get(layer_name) is not None


def _states(layer: Any) -> Sequence[Any]:  # noqa: ANN401 - a layer of vLLM
    """
    Return the states of a layer.

    Raises:
        LayoutError: One is missing; names layer and index.
    """
    states: Sequence[Any] | None = getattr(layer, "kv_cache", None)
    number = 0 if states is None else len(states)
    if states is None or number < len(_STATES):
        raise LayoutError(
            f"layer {layer.prefix!r} has no kv_cache[{number}] (its {_STATES[number]} "
            f"state): kv_cache is {'missing' if states is None else 'too short'}"
        )
    return states


def _with_transfers(
    core: _Function, get_context: _Function, wait: _Function, save: _Function
) -> _Function:
    """Return a layer's core with its load before and its save behind it."""

    @functools.wraps(core)
    def forward_core(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not _has_metadata(get_context().attn_metadata, self.prefix):
            return core(self, *args, **kwargs)
        states = _states(self)
        wait(self.prefix)
        result = core(self, *args, **kwargs)
        save(self.prefix, list(states))
        return result

    return forward_core


def _pass_written_on(_: object) -> _Function:
    """Return the hook that the wrapper lacks."""

    def on_kv_cache_written(self: Any, layer_name: str = "") -> None:  # noqa: ANN401
        self._ucm_engine.on_kv_cache_written(layer_name)

    return on_kv_cache_written


PATCHES = (
    Patch(
        name="gdn",
        owner="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
        "QwenGatedDeltaNetAttention",
        method="_forward_core",
        takes="(self, mixed_qkv, b, a, core_attn_out)",
        uses={
            "vllm.forward_context:get_forward_context": "()",
            f"{_UTILS}:wait_for_kv_layer_from_connector": "(layer_name)",
            f"{_UTILS}:maybe_save_kv_layer_to_connector": (
                "(layer_name, kv_cache_layer)"
            ),
        },
        make=_with_transfers,
    ),
    Patch(
        name="written",
        owner="vllm_ascend.distributed.kv_transfer.kv_pool.ucm_connector:"
        "UCMConnectorV1",
        method="on_kv_cache_written",
        takes=None,
        uses={},
        make=_pass_written_on,
    ),
)
"""All that can be put in place, with what vllm-ascend 0.23 to 0.27 has."""


def apply(patches: Sequence[Patch] = PATCHES) -> list[Outcome]:
    """
    Put *patches* in place; those that are already stay as they are.

    Raises:
        ConfigError: The engine is not supported, or a module cannot be imported; names
            it. Nothing was changed then.
    """
    check_version()
    needed = {at for patch in patches for at in (patch.owner, *patch.uses)}
    found = {at: _find(at) for at in sorted(needed)}
    return [_apply_one(patch, found) for patch in patches]


def _apply_one(patch: Patch, found: Mapping[str, Any]) -> Outcome:
    if patch.name in _in_place:
        return Outcome(patch.name)
    owner = found[patch.owner]
    if not isinstance(owner, type):
        return Outcome(patch.name, f"{patch.owner.replace(':', '.')} does not exist")
    old = inspect.getattr_static(owner, patch.method, _MISSING)
    takes = None if old is _MISSING else _signature(old)
    expected = {at: found[at] for at in patch.uses}
    wrong = [
        f"{at.replace(':', '.')}: expected {text}, found {_signature(expected[at])}"
        for at, text in patch.uses.items()
        if text != _signature(expected[at])
    ]
    if takes != patch.takes:
        name = f"{patch.owner.replace(':', '.')}.{patch.method}"
        wrong.append(f"{name}: expected {patch.takes}, found {takes}")
    if wrong:
        return Outcome(patch.name, "; ".join(wrong))
    new = patch.make(old, *expected.values())
    _in_place[patch.name] = _Applied(
        owner, patch.method, vars(owner).get(patch.method, _MISSING), new
    )
    setattr(owner, patch.method, new)
    return Outcome(patch.name)


def _find(at: str) -> Any:  # noqa: ANN401 - a class or function
    """Return what ``module:name`` names; None if the module has no such name."""
    module, _, name = at.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError as exc:
        raise ConfigError(
            SETTING,
            True,
            f"module {module} cannot be imported: {exc}",
            "Install vllm-ascend 0.23 or newer, or leave the setting out.",
        ) from exc


def _signature(function: object) -> str | None:
    """Return parameters without their types; None if it is no function."""
    if not inspect.isfunction(function):
        return None
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


def revert() -> list[Outcome]:
    """Put everything back, last first; what others have changed since is left."""
    outcomes = []
    for name, applied_one in reversed(list(_in_place.items())):
        owner, method = applied_one.owner, applied_one.method
        if vars(owner).get(method) is not applied_one.new:
            outcomes.append(Outcome(name, f"{owner.__name__}.{method} was replaced"))
            continue
        if applied_one.old is _MISSING:
            delattr(owner, method)
        else:
            setattr(owner, method, applied_one.old)
        del _in_place[name]
        outcomes.append(Outcome(name))
    return outcomes


@contextlib.contextmanager
def applied(patches: Sequence[Patch] = PATCHES) -> Iterator[list[Outcome]]:
    """Apply for the length of the block."""
    outcomes = apply(patches)
    try:
        yield outcomes
    finally:
        revert()
