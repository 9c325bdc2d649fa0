# SPDX-License-Identifier: Apache-2.0
"""A connector of somebody else that loads within the step, and whose blocks never come."""

from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

__all__ = ["AbsentConnector", "Promised"]


@attrs.frozen
class Promised(KVConnectorMetadata):
    """The blocks that a step was promised."""

    block_ids: frozenset[int]


class AbsentConnector(KVConnectorBase_V1, SupportsHMA):
    """Says of each request that it has all whole blocks but the last one, loads none of them and tells so."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._served: dict[str, int] = {}
        self._promised: set[int] = set()
        self._lost: set[int] = set()

    def get_num_new_matched_tokens(
        self,
        request: Any,  # vLLM's Request
        num_computed_tokens: int,
    ) -> tuple[int, bool]:
        """Return what there would be; each request is served once."""
        if request.request_id in self._served:
            return 0, False
        whole = (request.num_tokens - 1) // self._size * self._size
        tokens: int = max(0, whole - num_computed_tokens)
        self._served[request.request_id] = num_computed_tokens
        return tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Take note of the blocks that are promised."""
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            start = self._served[request.request_id] // self._size
            stop = start + num_external_tokens // self._size
            self._promised.update(table[start:stop])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the promises of this step."""
        promised, self._promised = frozenset(self._promised), set()
        return Promised(promised)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Keep nothing."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing of what was promised."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Promised)
        self._lost |= metadata.block_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return what did not come, once."""
        lost, self._lost = self._lost, set()
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""
