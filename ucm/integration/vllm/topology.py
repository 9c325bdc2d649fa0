# SPDX-License-Identifier: Apache-2.0
"""
The ranks of a vLLM engine, as its configuration tells them.

The engine numbers ranks as ``ucm.ranks`` does and says how many consecutive tensor ranks
are replicas. Sources: ``vllm.distributed.parallel_state.initialize_model_parallel`` and
``vllm.v1.core.kv_cache_utils.kv_cache_groups_tp_replicas``.
"""

from typing import Any

from vllm.distributed.utils import get_pp_indices

from ucm.errors import ConfigError
from ucm.integration.vllm.compat import token_ranks, tp_replicas
from ucm.ranks import Topology

__all__ = ["is_spread", "largest_stage", "topology_of"]


def topology_of(parallel: Any, kv_cache_config: Any) -> Topology:  # noqa: ANN401 - vLLM's
    """
    Take the ranks from vLLM's configuration.

    Raises:
        ConfigError: The scheduler would not hear of all ranks, or not see what they
            store; names the setting.
    """
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend",
            "external_launcher",
            "its schedulers hear of one rank only",
            "Use another back end, or serve without kv_connector=UCMConnector.",
        )
    is_spread_out = token_ranks(parallel) > 1
    return Topology(
        tensor=parallel.tensor_parallel_size,
        replicas=tp_replicas(kv_cache_config),
        stages=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size if is_spread_out else 1,
    )


def is_spread(parallel: Any) -> bool:  # noqa: ANN401 - vLLM's ParallelConfig
    """Return whether ranks are on several machines, or may be: Ray puts them anywhere."""
    is_anywhere = parallel.distributed_executor_backend == "ray"
    return bool(is_anywhere or parallel.nnodes_within_dp > 1)


def largest_stage(
    block_bytes: int,
    model: Any,  # noqa: ANN401 - vLLM's ModelConfig
    parallel: Any,  # noqa: ANN401 - vLLM's ParallelConfig
) -> int:
    """
    Return the bytes of a block's part on the pipeline stage with most layers.

    All stages store in slots of one size, and a rank knows its own layers only. Exact
    where layers are alike; else stages may differ, which the store refuses by name.
    """
    stages = parallel.pipeline_parallel_size
    if stages == 1:
        return block_bytes
    ends = [
        get_pp_indices(model.get_total_num_hidden_layers(), stage, stages)
        for stage in range(stages)
    ]
    layers = [stop - start for start, stop in ends]
    per_stage = parallel.world_size // stages
    return -(-block_bytes * max(layers) // layers[parallel.rank // per_stage])
