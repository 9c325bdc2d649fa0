# SPDX-License-Identifier: Apache-2.0
"""Pools as SGLang 0.5.23 has them, of a small model; see ``fake``."""

import torch

TOKENS, HEADS, DIM, LAYERS = 4, 2, 8, 3
PAGE_BYTES = 2 * LAYERS * TOKENS * HEADS * DIM * 4


class MHATokenToKVPool:
    """SGLang's device pool: the first page is for padding."""

    kv_cache_layout = "nhd"
    start_layer = 0

    def __init__(self, pages: int = 16) -> None:
        shape = ((pages + 1) * TOKENS, HEADS, DIM)
        self.k_buffer = [torch.zeros(shape) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(shape) for _ in range(LAYERS)]


class MLATokenToKVPool:
    """That of latent attention: one buffer a layer, of one wide head."""

    start_layer = 0
    kv_scale_buffer = None

    def __init__(self, pages: int = 16) -> None:
        shape = ((pages + 1) * TOKENS, 1, HEADS * DIM)
        self.kv_buffer = [torch.zeros(shape) for _ in range(LAYERS)]


class MHATokenToKVPoolHost:
    """SGLang's host pool."""

    start_layer = 0
    layer_num = LAYERS
    page_size = TOKENS

    def __init__(self, layout: str = "layer_first", pages: int = 16) -> None:
        self.layout = layout
        shape = (2, LAYERS, pages * TOKENS, HEADS, DIM)
        if layout == "page_first_direct":
            shape = (2, pages, LAYERS, TOKENS, HEADS, DIM)
        self.kv_buffer = torch.zeros(shape)
        self.k_buffer, self.v_buffer = self.kv_buffer

    def page(self, page: int) -> torch.Tensor:
        """Return a page, ``[2, layers, tokens, heads, dim]``."""
        if self.layout == "page_first_direct":
            return self.kv_buffer[:, page]
        return self.kv_buffer[:, :, page * TOKENS : (page + 1) * TOKENS]


class MLATokenToKVPoolHost:
    """That of latent attention."""

    start_layer = 0
    layer_num = LAYERS
    page_size = TOKENS

    def __init__(self, layout: str = "layer_first", pages: int = 16) -> None:
        self.layout = layout
        shape = (LAYERS, pages * TOKENS, 1, HEADS * DIM)
        if layout == "page_first_direct":
            shape = (pages, LAYERS, TOKENS, 1, HEADS * DIM)
        self.kv_buffer = torch.zeros(shape)

    def page(self, page: int) -> torch.Tensor:
        """Return a page, ``[1, layers, tokens, 1, dim]``."""
        if self.layout == "page_first_direct":
            return self.kv_buffer[page].unsqueeze(0)
        return self.kv_buffer[:, page * TOKENS : (page + 1) * TOKENS].unsqueeze(0)


class MambaPoolHost:
    """That of recurrent states: all layers of one lie together, and each is a page."""

    page_size = 1
    num_mamba_layers = LAYERS

    def __init__(self, layout: str = "page_first_direct", dim: int = DIM) -> None:
        self.layout = layout
        self.temporal_buffer = torch.zeros(8, LAYERS, 1, HEADS, dim)
        half = {"dtype": torch.bfloat16}
        self.conv_buffer = [torch.zeros(8, LAYERS, 1, DIM, 3, **half)]
        self.slot_state_buffers: list[torch.Tensor] = []

    def state(self, at: int) -> list[torch.Tensor]:
        """Return all of a state."""
        return [part[at] for part in (self.temporal_buffer, *self.conv_buffer)]
