# SPDX-License-Identifier: Apache-2.0
"""What of SGLang is taken, and what its pages are called."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.sglang import fake, pools
from tests.integration.sglang.fake import PoolTransfer, hashes
from tests.integration.sglang.kit import Kit
from ucm.errors import ConfigError
from ucm.integration.sglang import engine
from ucm.integration.sglang.engine import device_rows, named


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_cp_size", 2),
        ("attn_dp_size", 2),
        ("dcp_size", 2),
        ("disaggregation_mode", "prefill"),
        ("dllm_algorithm", "LowConfidence"),
        ("enable_linear_replayssm", True),
        ("enable_lora", True),
        ("enable_memory_saver", True),
        ("enable_return_indexer_topk", True),
        ("enable_return_routed_experts", True),
        ("enable_unified_memory", True),
        ("is_embedding", True),
        ("pp_size", 2),
        ("quantization_param_path", "scales.json"),
        ("speculative_algorithm", "EAGLE"),
    ],
)
def test_setting_that_is_not_taken_is_refused_by_name(
    kit: Kit, name: str, value: object
) -> None:
    """R-81: by both doors, before anything is opened."""
    with pytest.raises(ConfigError, match=name):
        kit.engine(args={name: value})
    with pytest.raises(ConfigError, match=name):
        kit.storage(args={name: value})


def test_memory_that_is_given_back_is_taken_where_nothing_of_ours_is_in_it(
    kit: Kit,
) -> None:
    """R-81: SGLang gives pages back before it tells the linker; HiCache has its own copies."""
    kept = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    with pytest.raises(ConfigError, match=r"enable_memory_saver.*read it"):
        kit.engine(args=kept)
    kit.storage(args=kept)


def test_model_that_is_not_taken_is_refused_by_name(kit: Kit) -> None:
    """R-81: images, blocks of several kinds, pools of other kinds."""
    with pytest.raises(ConfigError, match="image"):
        kit.engine(args={"is_multimodal": True})
    with pytest.raises(ConfigError, match="SWA"):
        kit.engine(components=["FULL", "SWA"])

    class DSATokenToKVPool(pools.MLATokenToKVPool):
        pass

    with pytest.raises(ConfigError, match="DSATokenToKVPool"):
        kit.engine(DSATokenToKVPool())
    latent = pools.MLATokenToKVPool()
    latent.kv_scale_buffer = []
    with pytest.raises(ConfigError, match="scaled"):
        kit.engine(latent)
    for change in ({"kv_cache_layout": "hnd"}, {"k_scale_buffer": []}):
        pool = pools.MHATokenToKVPool()
        vars(pool).update(change)
        with pytest.raises(ConfigError, match=r"hnd|scaled"):
            kit.engine(pool)


def test_release_that_nobody_tried_is_refused(kit: Kit) -> None:
    """R-81: with the one to install."""
    with pytest.raises(ConfigError, match=r"sglang==0\.5\.23"):
        kit.engine(args={"release": "0.5.24"})


def test_settings_of_ours_are_checked(kit: Kit) -> None:
    """R-81: by name, in the words of the settings' page."""
    for wrong in (
        {"patience": "long"},
        {"patience": -1},
        {"stage_bytes": 7},
        {"stage_bytes": "much"},
        {"stroe": {}},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kit.engine(**wrong)


def test_weights_without_a_name_are_refused(kit: Kit, tmp_path: Path) -> None:
    """R-81: a name of the hub, or what is read from elsewhere, also a part of it."""
    for wrong in (
        {"model_path": "owner/model"},
        {"load_format": "remote"},
        {"decrypted_config_file": "config.json"},
        {"kt_weight_path": "experts"},
        {"modelopt_checkpoint_restore_path": "quantised.pt"},
        {"weight_cache_mode": "client"},
    ):
        with pytest.raises(ConfigError, match="weights_revision"):
            kit.engine(args=wrong)
        kit.engine(args=wrong, weights_revision="r1")


def test_weights_written_while_a_server_starts_are_refused(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81: what lies there now may not be what the server loaded."""
    monkeypatch.setattr(engine, "engine_began_ns", lambda: 0)
    with pytest.raises(ConfigError, match="changed since the server began"):
        kit.engine()
    kit.engine(weights_revision="r1")


def test_whatever_decides_bytes_is_in_the_key(kit: Kit) -> None:
    """R-81: another setting, model, rank count or shape of a page is another key space."""
    rows = device_rows(pools.MHATokenToKVPool(), pools.TOKENS)
    kit.installed()

    def digest(
        weights: str = "", ranks: int = 1, pages: Any = None, **changed: Any
    ) -> bytes:
        args = fake.server_args(kit.model, **changed)
        return named(args, pages or rows, weights, ranks)[1].digest

    half = {name: row.half() for name, row in rows.items()}
    flat = {name: row.flatten(2).unsqueeze(2) for name, row in rows.items()}
    digests = [
        digest(),
        digest("r1"),
        digest(ranks=2),
        digest(pages=half),
        digest(pages=flat),
        digest("r1", model_path="another"),
        digest(quantization="fp8"),
        digest(context_length=64),
        digest(dtype="float16"),
        digest(json_model_override_args='{"rope_theta": 1}'),
        digest(attention_backend="triton"),
        digest(decode_attention_backend="triton"),
        digest(prefill_attention_backend="triton"),
        digest(load_format="pt"),
        digest(chosen={"load_format": "mistral"}),
        digest(kv_cache_dtype="fp8"),
        digest(model_impl="transformers"),
        digest(rl_on_policy_target="fsdp"),
        digest(deepep_dispatcher_output_dtype="fp8"),
        digest(enable_mamba_cache_stochastic_rounding=True),
        digest(enable_quant_communications=True),
        digest(enable_w4a4_mxfp4_megamoe=True),
        digest(enforce_shared_experts_fusion=True),
        digest(flashinfer_a2a_dispatch_type="nvfp4"),
        digest(flashinfer_mxfp4_moe_precision="fp8"),
        digest(bf16_gemm_backend="gemv"),
        digest(enable_tf32_matmul=True),
        digest(forward_hooks=[{"hook_factory": "steering:more"}]),
        digest(forward_hooks=[{"hook_factory": "steering:less"}]),
        digest(fp4_gemm_runner_backend="marlin"),
        digest(fp4_gemm_runner_backend="flashinfer_cutlass"),
        digest(fp8_gemm_runner_backend="triton"),
        digest(kt_max_deferred_experts_per_token=2),
        digest(kt_method="AMXINT8"),
        digest(kt_num_gpu_experts=1),
        digest(linear_attn_backend="flashinfer"),
        digest(linear_attn_decode_backend="flashinfer"),
        digest(linear_attn_prefill_backend="flashinfer"),
        digest(mamba_backend="flashinfer"),
        digest(mamba_cache_philox_rounds=4),
        digest(model_config_parser="mistral"),
        digest(modelopt_quant="fp8"),
        digest(moe_a2a_backend="deepep"),
        digest(moe_runner_backend="marlin"),
    ]
    assert len(digests) == len(set(digests))
    assert digest() == digest()
    (kit.model / "config.json").write_text('{"rope_theta": 2}')
    assert digests[0] != digest()


def test_variables_that_decide_bytes_are_in_the_key(kit: Kit) -> None:
    """R-81: code that an engine alone computes with, and bits; those that are not set change none."""
    rows = device_rows(pools.MHATokenToKVPool(), pools.TOKENS)
    digests = set()
    for given in (
        {},
        {"SGLANG_EXTERNAL_MODEL_PACKAGE": ""},
        {"SGLANG_EXTERNAL_MODEL_PACKAGE": "others"},
        {"SGLANG_EXTERNAL_MODEL_PACKAGE": "models"},
        {"SGLANG_FORCE_FP8_MARLIN": True},
        {"SGLANG_HUMMING_ONLINE_QUANT_CONFIG": {"dtype": "int4"}},
    ):
        kit.installed(environment=given)
        digests.add(named(kit.args, rows, "", 1)[1].digest)
    assert 5 == len(digests)


def test_variables_that_sglang_lists_nowhere_are_in_the_key(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81: it asks the environment itself for some by which it computes in fewer bits."""
    kit.installed()
    rows = device_rows(pools.MHATokenToKVPool(), pools.TOKENS)
    digests = {named(kit.args, rows, "", 1)[1].digest}
    for name in ("AITER_FORCE_A8W4", "ROCM_QUICK_REDUCE_QUANTIZATION"):
        monkeypatch.setenv(name, "INT4")
        digests.add(named(kit.args, rows, "", 1)[1].digest)
    assert 3 == len(digests)


def test_blocks_of_other_weights_are_not_found(kit: Kit) -> None:
    """R-81: one store, two models."""
    first = kit.engine(weights_revision="r1")
    assert first.offload(hashes(2), first.take(2))
    second = kit.engine(weights_revision="r2")
    assert [] == second.linker.lookup("a", [PoolTransfer(hashes(2))])


def test_what_sglang_has_chosen_itself_counts(kit: Kit) -> None:
    """R-81: as what it runs with; what an operator has given is left as it was."""
    rows = device_rows(pools.MHATokenToKVPool(), pools.TOKENS)
    kit.installed()
    given = fake.server_args(kit.model)
    chosen = fake.server_args(kit.model, chosen={"mamba_backend": "flashinfer"})
    assert named(given, rows, "", 1)[1] != named(chosen, rows, "", 1)[1]
    with pytest.raises(ConfigError, match="attn_dp_size"):
        kit.engine(args={"chosen": {"attn_dp_size": 2}})
