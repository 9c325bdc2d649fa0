# SPDX-License-Identifier: Apache-2.0
"""The hooks of a connector that an engine calls, by their names in vLLM 0.32."""

from typing import Any, Protocol

__all__ = ["SchedulerHooks", "WorkerHooks"]


class SchedulerHooks(Protocol):
    """The scheduler's side of a connector."""

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - the engine's own
        """Hear of a request."""

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
    ) -> Any:  # noqa: ANN401 - what it is, is checked
        """Return tokens to load beyond those computed, and whether the request waits."""

    def update_state_after_alloc(
        self,
        request: Any,  # noqa: ANN401
        blocks: Any,  # noqa: ANN401
        num_external_tokens: int,
    ) -> None:
        """Hear of a request's blocks, and how many tokens are to be loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401
        """Return what the workers are to do in this step."""

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Hear what the workers told."""

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],
    ) -> Any:  # noqa: ANN401
        """Return whether the blocks are to be kept."""

    def reset_cache(self) -> bool | None:
        """Forget all that was stored."""


class WorkerHooks(Protocol):
    """One worker's side of a connector."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401
        """See that nobody reads what the forward pass will overwrite."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:  # noqa: ANN401
        """Take what is to be done."""

    def start_load_kv(self, forward_context: Any) -> None:  # noqa: ANN401
        """Start to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ANN401
        attn_metadata: Any,  # noqa: ANN401
    ) -> None:
        """Hear that a layer was computed."""

    def wait_for_save(self) -> None:
        """Start to save."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401
        """Return requests whose transfers are over."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that could not be loaded."""

    def build_connector_worker_meta(self) -> Any:  # noqa: ANN401
        """Return what the scheduler's side is to hear."""

    def clear_connector_metadata(self) -> None:
        """Forget what was to be done."""
