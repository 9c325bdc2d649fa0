# SPDX-License-Identifier: Apache-2.0
"""A small model with random weights that sees images, and images for it."""

from pathlib import Path
from typing import Any, Final

from tests.e2e import models

__all__ = ["NUM_IMAGE_TOKENS", "make_seeing", "noise"]

_SIDE, _PATCH, _SCALE = 112, 14, 2
NUM_IMAGE_TOKENS: Final = (_SIDE // _PATCH // _SCALE) ** 2 + 3
"""What an image is in a prompt: its patches, and what stands around them."""


def make_seeing(target: Path) -> Path:
    """
    Write an Idefics 3, a Llama that sees, and return *target*.

    It needs neither torchvision nor what else an engine on CPU goes without. Words are
    those of ``models``; ``<image>`` stands for one image.

    Args:
        target: A directory that is not there.
    """
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    target.mkdir()
    models.write_tokenizer(500, target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    eyes = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": _SIDE},
        max_image_size={"longest_edge": _SIDE},
        do_image_splitting=False,
    )
    transformers.Idefics3Processor(
        image_processor=eyes,
        tokenizer=tokenizer,
        image_seq_len=NUM_IMAGE_TOKENS - 3,
    ).save_pretrained(target)
    config = transformers.Idefics3Config(
        text_config=models.LLAMA.config | {"model_type": "llama", "pad_token_id": 0},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=_SCALE,
        pad_token_id=0,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                continue
            std = 1.0 if "embed_tokens" in name else 1.6 / weight[0].numel() ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.save_pretrained(target)
    return target


def noise(seed: int) -> Any:
    """Return an image that no other seed has."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    return Image.fromarray(pixels)
