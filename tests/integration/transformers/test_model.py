# SPDX-License-Identifier: Apache-2.0
"""What a model keeps is looked at, and what cannot be reused by prefix is refused."""

import contextlib
import copy
import functools
from types import FunctionType
from typing import Any

import attrs
import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from torch.nn.modules import module as everywhere

from tests.e2e.models import (
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    LLAMA,
    LLAMA4,
    LLAMA_LONGROPE,
    MISTRAL,
    Recipe,
)
from tests.integration.transformers.kit import BF16, KEEPS_TYPES_APART, OTHER, model_of
from ucm.errors import ConfigError
from ucm.integration.transformers.model import identify, observe

DYNAMIC = attrs.evolve(
    LLAMA,
    name="llama-dynamic",
    config=LLAMA.config
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
)


def identity_of(model: Any, weights: str = "") -> Any:
    """Look at a model."""
    return identify(model, block_tokens=16, weights=weights)


def nothing(*_: object) -> None:
    """Stand for what a stranger has called."""


class Hook:
    """One of accelerate, or several."""

    __module__ = "accelerate.hooks"

    def __init__(self, *hooks: object) -> None:
        self.hooks = hooks


def spread(module: Any, hook: object = None) -> None:
    """Have a module called as ``accelerate.hooks.add_hook_to_module`` does."""

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    new_forward.__module__ = "accelerate.hooks"
    module._hf_hook, module._old_forward = hook or Hook(), module.forward
    module.forward = functools.update_wrapper(
        functools.partial(new_forward, module), module.forward
    )


def compressed(model: Any, *, has_scales: bool) -> Any:
    """Return a model as transformers loads a checkpoint of compressed-tensors."""
    scales = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    settings = QuantizationConfig(
        config_groups={"all": preset_name_to_scheme("W8A16", ["Linear"])},
        ignore=["lm_head"],
        format="pack-quantized",
        kv_cache_scheme=scales if has_scales else None,
        quantization_status="frozen",
    )
    apply_quantization_config(model, settings)
    for name, each in model.named_parameters():
        if name.endswith("_scale"):
            each.data.fill_(1e-3)
    ModelCompressor(quantization_config=settings).compress_model(model)
    return model


@pytest.mark.slow
class TestShape:
    def test_layers_are_those_that_the_model_leaves_behind(self) -> None:
        """Heads and dims come of what was computed, keys' and values' each."""
        shape = observe(model_of(LLAMA))
        assert ((2, 32, 32),) * 4 == shape.layers
        assert torch.float32 == shape.dtype
        assert 4 * 2 * 64 == shape.token_elements
        assert 2 == len(set(observe(model_of(DEEPSEEK)).layers[0][1:]))

    def test_block_is_one_piece_of_all_layers(self) -> None:
        """One buffer, one row: a block is copied by one call."""
        layout = identity_of(model_of(LLAMA), "w").layout
        assert [16 * 512 * 4] == [row.page_bytes for row in layout.groups[0].rows]


@pytest.mark.slow
class TestKeySpace:
    def test_same_model_from_elsewhere_has_the_same_key_space(self) -> None:
        """R-05: its path, and names of classes that it has no use for, count nothing."""
        moved = copy.deepcopy(model_of(LLAMA))
        moved.config._name_or_path = "/another/place"
        assert identity_of(model_of(LLAMA)).keyspace == identity_of(moved).keyspace

    @pytest.mark.parametrize(
        "change",
        [
            "weight",
            "recipe",
            "config",
            "attention",
            "experts",
            "precision",
            "code",
            "part",
            "frequencies",
            "kind",
            pytest.param("autocast", marks=KEEPS_TYPES_APART),
        ],
    )
    def test_whatever_decides_the_states_makes_another(
        self, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-05: one field at a time."""
        before = identity_of(model_of(LLAMA)).keyspace
        model = copy.deepcopy(model_of(OTHER if change == "recipe" else LLAMA))
        if change == "weight":
            model.lm_head.weight.data[7, 7] *= 1.01
        elif change == "config":
            model.config.rms_norm_eps *= 2
        elif change == "attention":
            model.set_attn_implementation("eager")
        elif change == "experts":
            model.config._experts_implementation = "batched_mm"
        elif change == "precision":
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        elif change == "frequencies":
            model.model.rotary_emb.inv_freq *= 1.01
        elif change == "kind":
            model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
        elif change == "code":

            class LlamaForCausalLM(type(model)):  # type: ignore[misc] # it is
                """Another model of the same name."""

            LlamaForCausalLM.__qualname__ = "LlamaForCausalLM"
            model.__class__ = LlamaForCausalLM
        elif change == "part":
            mlp = model.model.layers[1].mlp
            name = type(mlp).__name__
            mlp.__class__ = type(name, (type(mlp),), {"__module__": __name__})
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            assert before.digest != identity_of(model).keyspace.digest

    @pytest.mark.parametrize(
        "change",
        ["part", "class", "compiled", "layer", "Attention", "AttentionMask"],
    )
    def test_whatever_computes_otherwise_makes_another(
        self, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-05: what takes the place of a part's ``forward``, of that of all of its class,
        of attention or its mask, and what is compiled, as a whole or in place."""
        before = identity_of(model_of(LLAMA)).keyspace
        model = copy.deepcopy(model_of(LLAMA))
        layer = model.model.layers[1]
        if change == "part":
            layer.mlp.forward = lambda given: given
        elif change == "class":
            monkeypatch.setattr(type(layer.mlp), "forward", lambda _, given: given)
        elif change == "compiled":
            model = torch.compile(model, backend="eager")
        elif change.startswith("Attention"):
            known = getattr(transformers, f"{change}Interface")._global_mapping
            mine = lambda *of, own=known["sdpa"], **by: own(*of, **by)
            monkeypatch.setitem(known, "sdpa", mine)
        else:
            layer.compile(backend="eager")
        assert before.digest != identity_of(model).keyspace.digest

    def test_hooks_that_move_tensors_make_no_other(self) -> None:
        """A model that is spread by accelerate finds what it computed as a whole."""
        model = copy.deepcopy(model_of(LLAMA))
        before = identity_of(model).keyspace
        for module in model.modules():
            spread(module)
        assert before == identity_of(model).keyspace
        mlp = model.model.layers[1].mlp
        mlp._old_forward = lambda given: given
        assert before.digest != identity_of(model).keyspace.digest

    @pytest.mark.parametrize("weights", ["", "v1"])
    def test_model_whose_frequencies_were_rounded_is_another(
        self, weights: str
    ) -> None:
        """R-05: ``to`` rounds them, so that its weights and its configuration are those
        of a model that was loaded so, and its keys are turned otherwise."""
        loaded = copy.deepcopy(model_of(BF16))
        before = identity_of(loaded, weights).keyspace
        assert torch.float32 == loaded.model.rotary_emb.inv_freq.dtype
        moved = loaded.to(torch.bfloat16)
        assert before.weights == identity_of(moved, weights).keyspace.weights
        assert before.digest != identity_of(moved, weights).keyspace.digest

    def test_named_weights_of_another_type_are_others(self) -> None:
        """R-05: what is quantised once it is loaded has the name of its files."""
        model = copy.deepcopy(model_of(LLAMA))
        before = identity_of(model, "v1").keyspace
        model.model.norm.bfloat16()
        assert before.digest != identity_of(model, "v1").keyspace.digest

    def test_named_weights_are_not_read(self) -> None:
        """R-05: whoever names them says when they are others."""
        one, other = model_of(LLAMA), model_of(OTHER)
        assert identity_of(one, "v1").keyspace == identity_of(other, "v1").keyspace
        assert identity_of(one, "v1").keyspace != identity_of(one, "v2").keyspace


@pytest.mark.slow
class TestRefusals:
    @pytest.mark.parametrize(
        ("recipe", "named"),
        [
            (GEMMA3, "DynamicSlidingWindowLayer"),
            (MISTRAL, "DynamicSlidingWindowLayer"),
            (GEMMA2, "DynamicSlidingWindowLayer"),
            (LLAMA4, "DynamicSlidingWindowLayer"),
            (LLAMA_LONGROPE, "rope_type='longrope'"),
            (DYNAMIC, "rope_type='dynamic'"),
        ],
        ids=lambda each: getattr(each, "name", ""),
    )
    def test_model_whose_states_are_no_prefix_is_refused(
        self, recipe: Recipe, named: str
    ) -> None:
        """By the name of what stands in the way."""
        with pytest.raises(ConfigError, match=named):
            identity_of(model_of(recipe))

    def test_recurrent_state_is_refused(self) -> None:
        """It is one for all tokens, and cannot be cut."""
        config = transformers.MambaConfig(
            vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=1
        )
        with pytest.raises(ConfigError, match=r"past_key_values|LinearAttention"):
            identity_of(transformers.MambaForCausalLM(config).eval())

    def test_encoder_is_refused(self) -> None:
        """What its decoder keeps depends on another input."""
        config = transformers.T5Config(
            vocab_size=16, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
        )
        with pytest.raises(ConfigError, match="is_encoder_decoder"):
            identity_of(transformers.T5ForConditionalGeneration(config).eval())

    def test_model_that_also_sees_is_refused(self) -> None:
        """Token ids do not say what an image shows."""
        model = copy.copy(model_of(LLAMA))
        model.config = transformers.LlavaConfig(text_config=copy.deepcopy(model.config))
        with pytest.raises(ConfigError, match="model_type='llava'"):
            identity_of(model)

    def test_model_that_looks_ahead_is_refused(self) -> None:
        """States of a prefix depend on what follows it."""

        class LooksAhead(type(model_of(LLAMA))):  # type: ignore[misc] # it is
            """Adds to every state what is to come."""

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                """Compute, and mix tokens of the last layer's values."""
                out = super().forward(*args, **kwargs)
                layer = out.past_key_values.layers[-1]
                layer.values = layer.values.flip(2).cumsum(2)
                return out

        model = copy.copy(model_of(LLAMA))
        model.__class__ = LooksAhead
        with pytest.raises(ConfigError, match="not causal"):
            identity_of(model)

    def test_model_that_trains_or_has_adapters_is_refused(self) -> None:
        """Its states are not a function of tokens and weights alone."""
        model = copy.copy(model_of(LLAMA))
        model.peft_config = {"default": object()}
        with pytest.raises(ConfigError, match="peft_config"):
            identity_of(model)
        model = copy.deepcopy(model_of(LLAMA))
        model.model.layers[0].peft_config = {"default": object()}
        with pytest.raises(ConfigError, match="peft_config"):
            identity_of(model)
        model = copy.deepcopy(model_of(LLAMA)).train()
        with pytest.raises(ConfigError, match="training"):
            identity_of(model)

    @pytest.mark.parametrize("when", ["behind", "before", "each", "any", "accelerate"])
    def test_model_with_hooks_is_refused(self, when: str) -> None:
        """What a stranger's hook does to states is in no key; the engine's own do nothing."""
        model = copy.deepcopy(model_of(LLAMA))
        model(torch.tensor([[1]]), output_hidden_states=True)  # hooks of transformers
        before = identity_of(model_of(LLAMA)).keyspace
        assert before == identity_of(model).keyspace
        layer = model.model.layers[1]
        if when == "behind":
            layer.register_forward_hook(lambda _module, _given, out: out + 1)
        elif when == "before":
            layer.register_forward_pre_hook(lambda _module, given: given)
        elif when == "accelerate":
            spread(layer, Hook(Hook(), lambda given: given))
        with contextlib.ExitStack() as kept:
            if when == "each":
                kept.enter_context(everywhere.register_module_forward_hook(nothing))
            elif when == "any":
                kept.enter_context(everywhere.register_module_forward_pre_hook(nothing))
            with pytest.raises(ConfigError, match="forward hook"):
                identity_of(model)

    def test_function_of_a_library_with_arguments_is_known(self) -> None:
        """Whose it is says the function, not what holds its arguments."""
        model = copy.deepcopy(model_of(LLAMA))
        theirs = FunctionType(nothing.__code__, {"__name__": "transformers.theirs"})
        model.register_forward_hook(functools.partial(theirs, 1))
        assert identity_of(model_of(LLAMA)).keyspace == identity_of(model).keyspace

    def test_hook_that_goes_with_the_first_call_is_taken(self) -> None:
        """Whosever it is, nothing that is stored is computed with it."""
        model = copy.deepcopy(model_of(LLAMA))
        hook = model.register_forward_pre_hook(lambda *_: hook.remove())
        assert identity_of(model_of(LLAMA)).keyspace == identity_of(model).keyspace

    @pytest.mark.parametrize("kept", [0, 4])
    def test_compressed_model_is_taken(self, kept: int) -> None:
        """It decompresses as it is first called, by a hook that goes then; those of scales
        of keys and values stay, and their modules say so."""
        model = compressed(copy.deepcopy(model_of(LLAMA)), has_scales=bool(kept))
        assert 1 + kept == sum(len(each._forward_pre_hooks) for each in model.modules())
        assert identity_of(model).keyspace == identity_of(model).keyspace
        assert kept == sum(len(each._forward_pre_hooks) for each in model.modules())

    def test_rank_of_a_model_is_refused(self) -> None:
        """All ranks have blocks of the same size, and under one name the same keys."""
        model = copy.copy(model_of(LLAMA))
        model._tp_size = 2
        with pytest.raises(ConfigError, match="tp_size=2"):
            identity_of(model, "v1")

    def test_model_that_counts_padding_is_refused(self) -> None:
        """Its states behind padding are not those of the same tokens alone."""
        config = transformers.RoFormerConfig(
            is_decoder=True,
            vocab_size=512,
            embedding_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        )
        model = transformers.RoFormerForCausalLM(config).eval()
        with pytest.raises(ConfigError, match="they count padding"):
            identity_of(model)

    def test_model_on_several_types_is_refused(self) -> None:
        """Its states are not in one piece."""

        class Mixed(type(model_of(LLAMA))):  # type: ignore[misc] # it is
            """Keeps one layer in another type."""

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                """Compute, and change the last layer's type."""
                out = super().forward(*args, **kwargs)
                layer = out.past_key_values.layers[-1]
                layer.values = layer.values.bfloat16()
                return out

        model = copy.copy(model_of(LLAMA))
        model.__class__ = Mixed
        with pytest.raises(ConfigError, match="one type on one device"):
            identity_of(model)

    def test_weights_that_cannot_be_read_have_to_be_named(self) -> None:
        """R-05: without a name for them nothing could be promised."""
        model = copy.deepcopy(model_of(LLAMA))
        model.register_buffer("elsewhere", torch.empty(3, device="meta"))
        with pytest.raises(ConfigError, match="weights="):
            identity_of(model)
        assert "v1" == identity_of(model, "v1").keyspace.weights
