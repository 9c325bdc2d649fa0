# SPDX-License-Identifier: Apache-2.0
"""
Where layers with windows read on a plain CPU.

SGLang's attention by torch writes their keys and values where their own pool has them, and
reads them where the pool of all tokens has the same tokens. The two agree until pages are used
again: prefixes of its own cache came out wrong without any of ours. Its backends for GPUs read
where was written, and so does this.
"""

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["install"]


def install() -> None:
    """Let these layers read where they have written."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        run = getattr(TorchNativeAttnBackend, name)
        setattr(TorchNativeAttnBackend, name, _translated(run))


def _translated(run: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(run)

    def run_translated(backend: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(backend, *args, **kwargs)
        has_window = given.arguments.get("sliding_window_size") is not None
        if has_window and backend.use_sliding_window_kv_pool:
            pool = backend.token_to_kv_pool
            given.arguments["req_to_token"] = pool.translate_loc_from_full_to_swa(
                given.arguments["req_to_token"]
            )
        return run(*given.args, **given.kwargs)

    return run_translated
