# SPDX-License-Identifier: Apache-2.0
"""
What HiCache needs where there is no accelerator: its copies between device and host pool.

SGLang has them as CUDA kernels. These do the same with torch, for the pools that the door
takes; the host pool's memory is not pinned.
"""

import torch


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy tokens, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    """Copy pages of one layer to the device."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = source[src_indices[::page_size] // page_size, layer_id]
        target[dst_indices] = pages.flatten(0, 1)


def all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copy pages of all layers to the host; layers of K before those of V, if both are."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for at, source in enumerate(src_ptrs):
        target = dst_ptrs[at // num_layers]
        tokens = source[src_indices].unflatten(0, (-1, page_size))
        target[pages, at % num_layers] = tokens


def _allocate(dims, dtype, device, pin_memory, allocator, **kwargs):
    return torch.zeros(dims, dtype=dtype)


def install() -> None:
    """Give them to SGLang."""
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    # It starts no engine where less than 10 GB are free besides; these need 30 MB.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    for pool in (mha, mla, mamba):
        pool.transfer_kv_direct = transfer_kv_direct
        pool.transfer_kv_per_layer_direct_pf_lf = per_layer_direct_pf_lf
        pool.transfer_kv_all_layer_direct_lf_pf = all_layer_direct_lf_pf
