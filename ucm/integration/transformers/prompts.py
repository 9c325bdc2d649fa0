# SPDX-License-Identifier: Apache-2.0
"""
Prompts as ``generate`` takes them: ids and a mask, rows padded at their left.

Pure. What is wrong with them is a ``KeyFormatError``.
"""

from typing import Any

import attrs
import torch

from ucm.errors import KeyFormatError
from ucm.prefixes import PrefixHasher, tenant_of

__all__ = ["Row", "check_batch", "rows_of"]


@attrs.frozen(kw_only=True)
class Row:
    """
    One prompt of a batch.

    Args:
        padding: Columns before its first token.
        keys: Of its whole blocks.
        tenant: Whose they are.
    """

    padding: int
    keys: list[bytes]
    tenant: int = 0


def rows_of(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    columns: int | None,
    hasher: PrefixHasher,
    salt: bytes,
) -> list[Row]:
    """
    Return the rows of a batch.

    Args:
        input_ids: ``[batch, length]``.
        attention_mask: Zeros for padding; what it does not reach is no padding. None:
            there is none.
        columns: Only the tokens of so many; None: of all.
        hasher: Makes the keys.
        salt: See ``PrefixHasher.keys``.

    Raises:
        KeyFormatError: It is no such batch.
    """
    check_batch(input_ids, attention_mask)
    paddings = [0] * len(input_ids)
    if attention_mask is not None:
        paddings = _paddings(input_ids, attention_mask)
    return [
        Row(
            padding=padding,
            keys=hasher.keys(tokens[padding:columns], salt=salt),
            tenant=tenant_of(salt),
        )
        for padding, tokens in zip(paddings, input_ids.tolist(), strict=True)
    ]


def check_batch(input_ids: Any, attention_mask: object) -> None:  # noqa: ANN401 - checked here
    """
    Refuse what are no ids of a batch, such as all that a tokenizer returns.

    Raises:
        KeyFormatError: Says what they are.
    """
    is_one = isinstance(input_ids, torch.Tensor)
    if not is_one or input_ids.dim() != 2 or input_ids.is_floating_point():
        told = [*input_ids.shape] if is_one else type(input_ids).__name__
        form = "a tensor [batch, length] of integers"
        raise KeyFormatError(f"input_ids are {told}, not {form}")
    if not isinstance(attention_mask, torch.Tensor | None):
        told = type(attention_mask).__name__
        raise KeyFormatError(f"attention_mask is {told}, not a tensor")


def _paddings(input_ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """Return how many columns of padding each row has."""
    (batch, length), shape = input_ids.shape, tuple(mask.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] > length:
        told = f"attention_mask is {[*shape]} and input_ids {[batch, length]}"
        raise KeyFormatError(told)
    tokens = mask.ne(0)
    paddings = (~tokens).sum(dim=1)
    if (~tokens).cumprod(dim=1).sum(dim=1).ne(paddings).any():
        raise KeyFormatError("attention_mask has zeros behind a token: pad at the left")
    return [int(each) for each in paddings.tolist()]
