# SPDX-License-Identifier: Apache-2.0
"""
What a model's weights are, as one digest of all their bytes.

Taken are parameters and persistent buffers, with name, type, shape and strides: what a
checkpoint holds. Left out are buffers that are made of the configuration, some of which
change their type in the first forward pass.

Some kernels keep a packed copy out of reach and leave an empty parameter behind (linear
layers on CPU). Of these only is seen whether the engine has packed anew: such weights
are equal to themselves, and to no others.

Threading: any thread. Reading takes no lock of the engine; whoever writes meanwhile
gets the bytes of neither time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
import xxhash

__all__ = ["Reading", "read_weights"]

_CHUNK_BYTES = 16 << 20
"""Hashed at a time: bounds how long a reading goes on that is given up."""
_Bytes = npt.NDArray[np.uint8]


@attrs.frozen(eq=False)
class Reading:
    """
    Weights at one time.

    Args:
        digest: Of all that can be read; empty if something cannot.
        hidden: What stands for weights that are out of reach, in order. Kept, so that
            none of these objects can come again as another one.
    """

    digest: bytes
    hidden: tuple[object, ...]

    def hides_as(self, other: "Reading") -> bool:
        """Return whether what is out of reach was not made anew."""
        return len(self.hidden) == len(other.hidden) and all(
            mine is theirs
            for mine, theirs in zip(self.hidden, other.hidden, strict=True)
        )


def read_weights(
    models: Sequence[torch.nn.Module], is_given_up: Callable[[], bool]
) -> Reading | None:
    """
    Read all weights; None if the reading was given up.

    Args:
        models: In the same order each time.
        is_given_up: Asked every now and then.
    """
    hidden: list[object] = []
    digest = xxhash.xxh3_128()
    try:
        for at, model in enumerate(models):
            hidden += _hidden(model)
            with _aside(model):
                for name, tensor in _named(model):
                    what = f"{at}.{name} {tensor.dtype} {[*tensor.shape]}"
                    digest.update(f"{what} {tensor.stride()}\n".encode())
                    for chunk in _chunks(tensor):
                        if is_given_up():
                            return None
                        digest.update(chunk.data)
    except (LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return Reading(b"", tuple(hidden))
    return Reading(digest.digest() if models else b"", tuple(hidden))


def _aside(model: torch.nn.Module) -> contextlib.ExitStack:
    """Let what follows run on streams of its own, behind all there is."""
    stack = contextlib.ExitStack()
    for device in {each.device for each in model.parameters()}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # what wrote them may not be over
            stack.enter_context(torch.Stream(device=device))
    return stack


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}")
        yield from _inner(name, value)
    # A parameter whose bytes are in others is in no dictionary of states.
    for name, value in model.named_parameters():
        for key, part in getattr(value, "partitions", {}).items():
            yield from _inner(f"{name}.{key}", part)


def _inner(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, or those that it is made of (quantised ones of torchao)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from _inner(f"{name}.{part}", getattr(tensor, part))


def _hidden(model: torch.nn.Module) -> Iterator[object]:
    """
    Yield what stands for the weights of modules that show an empty parameter.

    Empty integers are none of these: kernels for quantised weights ask for them.

    Raises:
        LookupError: There is nothing.
    """
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if all(each.numel() or not each.is_floating_point() for each in own):
            continue
        held = [
            value
            for value in vars(module).values()
            if callable(value) or isinstance(value, torch.Tensor)
        ]
        if not held:
            raise LookupError(f"the weights of {name} are nowhere to be seen")
        yield from held


def _chunks(tensor: torch.Tensor) -> Iterator[_Bytes]:
    """Yield all bytes, on the host."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    # In the order of memory, so that a transposed weight needs no copy.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    tensor = tensor.permute(order)
    if tensor.is_contiguous():
        whole = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(whole), _CHUNK_BYTES):
            yield _on_host(whole[start : start + _CHUNK_BYTES])
        return
    rows = max(1, _CHUNK_BYTES // (tensor[0].numel() * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        piece = tensor[start : start + rows].contiguous()
        yield _on_host(piece.reshape(-1).view(torch.uint8))


def _on_host(chunk: torch.Tensor) -> _Bytes:
    found: _Bytes = chunk.cpu().numpy()
    return found
