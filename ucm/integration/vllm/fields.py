# SPDX-License-Identifier: Apache-2.0
"""
Every field of the engine's configuration, and whether it decides the bytes of a block.

``COUNTED`` is part of every key, ``ELSEWHERE`` is there already under another name, and
``UNCOUNTED`` is left out, each with the reason. A field of a new release that is in none
of the three fails a test. What is in doubt counts: a share that is missed costs time, and
one that is wrong costs the answer. Never counted is what differs between processes,
starts or roles of one engine, or what workers change while they load the model, as they
do with the configuration of the model itself.

Engines whose kernels round in another way are taken for interchangeable: the same engine
does so for batches of another size. Kernels that somebody has chosen for matrix products count:
some quantise what others do not.
"""

from collections.abc import Collection, Mapping

__all__ = ["COUNTED", "ELSEWHERE", "UNCOUNTED"]

COUNTED: Mapping[str, Collection[str]] = {
    "": ("additional_config", "engram_config"),
    "model_config": (
        "code_revision",
        "config_format",
        "convert",
        "disable_sliding_window",
        "model_class_overrides",
        "model_impl",
        "quantization_config",
    ),
    "model_config.multimodal_config": (
        "language_model_only",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_only",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    ),
    "cache_config": (
        "kv_cache_dtype_skip_layers",
        "kv_sharing_fast_prefill",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "swa_bounded_replay",
        "use_kda_recoverssm",
        "use_replayssm",
    ),
    "load_config": ("ignore_patterns",),
    "attention_config": (
        "backend",
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "hisparse_config",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "use_non_causal",
        "use_prefill_query_quantization",
    ),
    "mamba_config": ("enable_stochastic_rounding",),
}
"""Fields that are in the key as they are, by part of the configuration."""

ELSEWHERE: Mapping[str, Collection[str]] = {
    "": (
        "attention_config",
        "cache_config",
        "device_config",
        "kernel_config",
        "load_config",
        "lora_config",  # ``ucm.integration.vllm.adapters``, and by request
        "mamba_config",
        "model_config",
        "parallel_config",  # ``ucm.integration.vllm.topology``
        "quant_config",  # of the model's files, quantization and quantization_config
        "speculative_config",
        "diffusion_config",  # refused
        "aux_output_config",  # refused where tokens that are loaded would lack something
    ),
    "model_config": (
        "dtype",
        "enable_return_routed_experts",  # of vLLM before 0.31; as aux_output_config
        "generation_config",  # where attention depends on it
        "hf_config_path",  # with the weights
        "hf_overrides",
        "max_model_len",  # where positions depend on it
        "model",
        "model_weights",
        "multimodal_config",
        "override_generation_config",  # as generation_config
        "pooler_config",  # refused where it wants every token's output
        "quantization",
        "revision",  # with the weights
        "runner",
        "seed",  # with dummy weights
        "hf_config",  # of the files and hf_overrides; workers change it
        "hf_text_config",
    ),
    "model_config.multimodal_config": (),
    "cache_config": (
        "block_size",
        "cache_dtype",
        "calculate_kv_scales",  # refused
        "hash_block_size",
        "kv_cache_layout",
        "mamba_block_size",
        "mamba_cache_mode",
        "mamba_page_size_padded",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "skip_page_size_padded",
        "sliding_window",
    ),
    "load_config": ("load_format", "model_loader_extra_config"),
    "attention_config": (),
    "kernel_config": (  # where they are not left to the engine
        "linear_backend",
        "linear_backend_per_quant",
        "moe_backend",
    ),
    "mamba_config": (),
}
"""Fields that are in the key under another name, or checked at start-up."""

UNCOUNTED: Mapping[str, Mapping[str, Collection[str]]] = {
    "": {
        "how fast, not what": (
            "compilation_config",
            "offload_config",
            "optimization_level",
            "performance_mode",
            "scheduler_config",
        ),
        "differs from process to process": ("instance_id", "kv_transfer_config"),
        "what is told to others": (
            "ec_manager_config",
            "ec_transfer_config",
            "kv_events_config",
            "logging_config",
            "observability_config",
            "profiler_config",
            "watchdog_config",
        ),
        "which tokens, which hashes say": (
            "reasoning_config",
            "structured_outputs_config",
            "watermark_config",
        ),
        "how it ends, or what is to come": (
            "shutdown_timeout",
            "weight_transfer_config",
        ),
    },
    "model_config": {
        "how fast, not what": (
            "disable_cascade_attn",
            "enable_cumem_allocator",
            "enable_nccl_comm_suspend",
            "enable_sleep_mode",
            "enforce_eager",
            "renderer_num_workers",
            "sleep_mode_backend",
            "sleep_mode_offload_cudagraph",
            "sleep_preserve_parameter_names",
        ),
        "which tokens, which hashes say": (
            "allowed_local_media_path",
            "allowed_media_domains",
            "enable_prompt_embeds",
            "enable_trace_replay",
            "io_processor_plugin",
            "logits_processors",
            "skip_tokenizer_init",
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
            "use_fp64_gumbel",
        ),
        "what is told to others": (
            "logprobs_mode",
            "max_logprobs",
            "return_sampling_mask",
            "served_model_name",
        ),
        "says what may be loaded, not what is": (
            "allow_deprecated_quantization",
            "hf_token",
            "trust_remote_code",
        ),
        "of a view, or of a draft whose target is in the key": (
            "is_submodel_config",
            "spec_target_max_model_len",
            "word_embeddings_untied_by_checkpoint",
        ),
    },
    "model_config.multimodal_config": {
        "how fast, not what": (
            "limit_per_prompt",
            "mm_encoder_attn_backend",
            "mm_encoder_tp_mode",
            "mm_ipc_gpu_memory_gb",
            "mm_processor_cache_gb",
            "mm_processor_cache_type",
            "mm_processor_device",
            "mm_shm_cache_max_object_size_mb",
            "mm_tensor_ipc",
            "skip_mm_profiling",
        ),
        "which tokens and items, which hashes say": (
            "allow_missing_mm_embeddings",
            "enable_mm_embeds",
            "interleave_mm_strings",
            "mm_hasher_algorithm",
        ),
        "written, not read": (
            "mm_encoder_fp8_scale_save_margin",
            "mm_encoder_fp8_scale_save_path",
        ),
    },
    "cache_config": {
        "how much, not what": (
            "_block_size_resolved",
            "cache_hit_alignment_tokens",
            "effective_attention_block_size",
            "enable_mamba_shared_prefix_checkpoint",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "is_attention_free",
            "kv_cache_max_concurrency",
            "kv_cache_memory_bytes",
            "kv_cache_size_tokens",
            "kv_offloading_backend",
            "kv_offloading_size",
            "num_cpu_blocks",
            "num_gpu_blocks",
            "num_gpu_blocks_override",
            "prefix_cache_retention_interval",
            "replayssm_buffer_len",
            "simple_cpu_offload_num_blocks",
            "user_specified_block_size",
        ),
    },
    "load_config": {
        "how fast, not what": (
            "device",
            "download_dir",
            "pt_load_map_location",
            "safetensors_load_strategy",
            "safetensors_prefetch_block_size",
            "safetensors_prefetch_num_threads",
            "use_tqdm_on_load",
        ),
    },
    "attention_config": {
        "how fast, not what": (
            "flash_attn_max_num_splits_for_cuda_graph",
            "flash_attn_version",
            "flex_attn_block_m",
            "flex_attn_block_n",
            "flex_attn_kv_block_size",
            "flex_attn_q_block_size",
            "indexer_tp_shard_min_rows",
            "minimax_m3_msa_decode_backend",
            "mla_prefill_backend",
            "sparse_mla_force_mqa",
            "sparse_mla_prefill_workspace_factor",
            "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph",
            "trtllm_ragged_backend",
            "use_trtllm_attention",
        ),
    },
    "kernel_config": {
        "how fast, not what": (
            "enable_cutedsl_warmup",
            "enable_flashinfer_autotune",
            "enable_jit_warmup",
            "enable_rocm_segmented_attn_autotune",
            "ir_op_priority",
            "sparse_indexer_topk_backend",
        ),
    },
    "mamba_config": {
        "how fast, not what": (
            "backend",
            "ssu_algorithm",
            "stochastic_rounding_philox_rounds",
        ),
    },
}
"""Fields that no key has, by part and reason."""
