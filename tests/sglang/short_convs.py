# SPDX-License-Identifier: Apache-2.0
"""
Short convolutions on a plain CPU.

SGLang has them as kernels for accelerators. These do the same with torch, for LFM2; sums go
in one order, so that a prompt that is computed in parts comes out as one that is not.
"""

import torch

__all__ = ["install"]


def _convolved(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a channel-wise convolution of ``[..., channels, tokens]``, without padding."""
    width = weight.shape[-1]
    length = seen.shape[-1] - width + 1
    return sum(seen[..., at : at + length] * weight[:, at, None] for at in range(width))


def extend(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    activation: None,
) -> torch.Tensor:
    """Convolve prompts of any length, one behind the other in ``[channels, tokens]``."""
    assert bias is None
    outputs = []
    starts = query_start_loc.tolist()
    for at, slot in enumerate(cache_indices.tolist()):
        state = conv_states[slot]
        before = state if has_initial_state[at] else torch.zeros_like(state)
        seen = torch.cat((before, x[:, starts[at] : starts[at + 1]]), -1)
        outputs.append(_convolved(seen, weight))
        state.copy_(seen[:, -state.shape[-1] :])
    return torch.cat(outputs, -1)


def update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve a token of each request, ``[requests, channels]``."""
    assert bias is None
    seen = torch.cat((conv_state[conv_state_indices], x[..., None]), -1)
    conv_state[conv_state_indices] = seen[..., 1:]
    return _convolved(seen, weight)[..., 0]


def install() -> None:
    """Give them to SGLang."""
    from sglang.srt.models import lfm2

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = extend, update
