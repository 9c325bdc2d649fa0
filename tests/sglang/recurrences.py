# SPDX-License-Identifier: Apache-2.0
"""
Gated delta nets and Mamba 2 on a plain CPU.

SGLang has them as kernels for accelerators, or for CPUs with matrix instructions. These do the
same with torch, token by token, so that a prompt that is computed in parts comes out as one that
is not. Which states are kept, where and when is SGLang's own: it asks for some within a prompt,
of which both give those at its chunks, and copies some as it decodes.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from tests.sglang import short_convs

__all__ = ["install"]

_CHUNK = 64
"""Tokens from one state within a prompt to the next, of gated delta nets."""


def _activated(convolved: torch.Tensor, activation: str | None) -> torch.Tensor:
    assert activation in (None, "silu")
    return silu(convolved) if activation else convolved


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_lens_cpu: object = None,
    **given: Any,
) -> torch.Tensor:
    """Convolve prompts, as of short convolutions."""
    made = short_convs.extend(x, weight, None, activation=None, **given)
    return _activated(made if bias is None else made + bias[:, None], activation)


def convolve_next(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve a token of each request likewise."""
    slots = {"conv_state_indices": conv_state_indices}
    made = short_convs.update(x, states, weight, None, activation=None, **slots)
    return _activated(made if bias is None else made + bias, activation)


def _spans(starts: torch.Tensor) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(starts.tolist())


def gates(
    decay: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much a state fades, as a logarithm, and how much of a token is taken."""
    fades = -decay.float().exp() * softplus(a.float() + bias.float())
    return fades[None], b.float().sigmoid()[None]


def _delta(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a token and the state behind it, ``[..., heads, values, keys]``."""
    repeat = v.shape[-2] // q.shape[-2]
    q, k = (
        (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
            repeat, -2
        )
        for each in (q.float(), k.float())
    )
    state = state * g.exp()[..., None, None]
    known = (state * k[..., None, :]).sum(-1)
    taken = (v.float() - known) * beta[..., None]
    state = state + taken[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1) * q.shape[-1] ** -0.5, state


def extend_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Take in prompts; return the outputs, and each one's states at the start of its chunks."""
    assert (head_first, use_qk_l2norm_in_kernel) == (False, True)
    outputs, within = torch.empty_like(v), []
    slots = initial_state_indices.tolist()
    for slot, (start, end) in zip(slots, _spans(cu_seqlens), strict=True):
        state = initial_state[slot].float()
        for at in range(start, end):
            if (at - start) % _CHUNK == 0:
                within.append(state)
            token = (each[0, at] for each in (q, k, v, g, beta))
            outputs[0, at], state = _delta(state, *token)
        initial_state[slot] = state
    return outputs, None, torch.stack(within)[None]


def next_delta(
    *,
    A_log: torch.Tensor,  # noqa: N803 - its name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **given: object,
) -> torch.Tensor:
    """Take in a token of each request."""
    (g,), (beta,) = gates(A_log, a, b, dt_bias)
    state = initial_state_source[initial_state_indices].float()
    output, state = _delta(state, q[0], k[0], v[0], g, beta)
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return output.to(v.dtype)[None]


def _scan(
    state: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a token and the state behind it, ``[..., heads, head_dim, states]``."""
    repeat = x.shape[-2] // b.shape[-2]
    b, c = (each.float().repeat_interleave(repeat, -2) for each in (b, c))
    x, step = x.float(), step[..., None]
    state = state * (step * decay[:, None]).exp()[..., None]
    state = state + (step * x)[..., None] * b[..., None, :]
    return (state * c[..., None, :]).sum(-1) + skip[:, None] * x, state


def extend_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    chunk_size: int,
    D: torch.Tensor,  # noqa: N803 - its name
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    track_seq_idx: torch.Tensor | None,
    track_end_locs: torch.Tensor | None,
    out: torch.Tensor,
    **given: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    Take in prompts; return states.

    Those before each chunk of all prompts together, those behind prompts, and those before the
    tokens that are asked for.
    """
    steps = softplus(dt[0].float() + dt_bias.float())
    empty = torch.zeros(*x.shape[2:], b.shape[-1])
    before, behind = [], []
    for at, (start, end) in enumerate(_spans(cu_seqlens)):
        state = empty if initial_states is None else initial_states[at].float()
        for token in range(start, end):
            before.append(state)
            told = (x[0, token], steps[token], decay, b[0, token], c[0, token], D)
            out[0, token], state = _scan(state, *told)
        behind.append(state)
    asked = None
    if track_seq_idx is not None and track_end_locs is not None:
        asked = torch.stack([empty, *before])[track_end_locs + 1][None]
    return torch.stack(before[::chunk_size])[None], torch.stack(behind), asked


def next_scan(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    *,
    z: None,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Take in a token of each request; what a head has alike is there for each of its parts."""
    assert dt_softplus
    step = softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    state = states[state_batch_indices].float()
    out[:], state = _scan(state, x, step, decay[:, 0, 0], b, c, skip[:, 0])
    states[state_batch_indices] = state.to(states.dtype)


def track(
    convs: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    are_tracked: torch.Tensor,
    targets: torch.Tensor,
    num_requests: int,
    *,
    check_freed_slots: bool,
) -> None:
    """Copy the states of some requests, of one layer."""
    assert not check_freed_slots
    chosen = are_tracked[:num_requests].nonzero(as_tuple=True)[0]
    for pool in (convs, states):
        pool[targets[chosen]] = pool[slots[chosen]]


def track_all(
    convs: torch.Tensor, states: torch.Tensor, *where: Any, check_freed_slots: bool
) -> None:
    """Copy the states of some requests, of all layers."""
    for layer in zip(convs, states, strict=True):
        track(*layer, *where, check_freed_slots=check_freed_slots)


def _gated_norm(
    norm: torch.nn.Module, x: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """Normalise, and let pass what a gate says."""
    assert norm.activation == "silu"
    scale = (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (x.float() * scale * norm.weight * silu(gate.float())).to(x.dtype)


def _add_shared(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, output: torch.Tensor
) -> None:
    """Add what an expert that all tokens have says, as far as its gate lets it pass."""
    output += (hidden @ gate).sigmoid()[:, None] * shared


def install() -> None:
    """Give them to SGLang."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as tracking
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = _add_shared
    gdn_backend.causal_conv1d_fn = convolve
    gdn_backend.causal_conv1d_update = convolve_next
    gdn_backend.fused_gdn_gating = gates
    gdn_triton.chunk_gated_delta_rule = extend_delta
    gdn_triton.fused_sigmoid_gating_delta_rule_update = next_delta
    mamba.causal_conv1d_fn, mamba.causal_conv1d_update = convolve, convolve_next
    mamba.mamba_chunk_scan_combined = extend_scan
    mamba.selective_state_update = next_scan
    fused_norm_gate.FusedRMSNormGated.forward = _gated_norm
    tracking.track_mamba_states_if_needed = track
    tracking.track_mamba_states_all_layers = track_all
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    # Which states are tracked is told by memory that is pinned; there is none here.
    torch.Tensor.pin_memory = lambda tensor: tensor
