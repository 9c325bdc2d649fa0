# SPDX-License-Identifier: Apache-2.0
"""
A connector that does nothing: what an engine pays for having one at all.

The engine asks it for each new request and each step, carries its metadata to the worker
and its answer back; it finds nothing and saves nothing. What another connector costs
beyond this one is its own.
"""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

__all__ = ["EmptyConnector"]

_NOTHING = KVConnectorMetadata()


# ruff: noqa: D102  the base class says what each is for
class EmptyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Every hook that a connector must have, and no more."""

    def start_load_kv(self, *_: object, **__: object) -> None: ...

    def wait_for_layer_load(self, *_: object) -> None: ...

    def save_kv_layer(self, *_: object, **__: object) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: object) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: object) -> None: ...

    def build_connector_meta(self, *_: object) -> KVConnectorMetadata:
        return _NOTHING

    def request_finished_all_groups(
        self, request: object, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
