# SPDX-License-Identifier: Apache-2.0
"""
What a model's weights are, as one digest of all their bytes.

Taken are parameters and persistent buffers, with name, type, shape and strides: what a
checkpoint holds. Left out are buffers that are made of the configuration, some of which
change their type in the first forward pass.

Some kernels keep a packed copy out of reach and leave an empty parameter behind (linear
layers on CPU). Of these only is seen whether the engine has packed anew: such weights
are equal to themselves, and to no others.

What lies on an accelerator is summed up there (``Sums``) and only the sums are copied:
16 GB over the bus take seconds, and hold up whatever else uses it.

Threading: any thread. Reading takes no lock of the engine; whoever writes meanwhile
gets the bytes of neither time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
import xxhash

__all__ = ["Reading", "Sums", "read_weights"]

_CHUNK_BYTES = 16 << 20
"""Hashed at a time: bounds how long a reading goes on that is given up."""
_SUMMED_BYTES = 8 << 20
"""Summed up at a time, with ten times as much memory of the device."""
_AT_A_TIME = 32
"""Pieces that may be under way: bounds how long a reading goes on that is given up."""
_SEED = 0x75636D
_streams: dict[torch.device, torch.Stream] = {}


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
                sums: dict[torch.device, Sums] = {}
                for name, tensor in _named(model):
                    what = f"{at}.{name} {tensor.dtype} {[*tensor.shape]}"
                    digest.update(f"{what} {tensor.stride()}\n".encode())
                    is_here = tensor.device.type == "cpu"
                    for chunk in _chunks(
                        tensor, _CHUNK_BYTES if is_here else _SUMMED_BYTES
                    ):
                        if is_given_up():
                            return None
                        if is_here:
                            digest.update(chunk.numpy().data)
                        else:
                            _of_device(sums, chunk.device).add(chunk)
                for each in sums.values():
                    digest.update(each.take())
    except (LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return Reading(b"", tuple(hidden))
    return Reading(digest.digest() if models else b"", tuple(hidden))


def _aside(model: torch.nn.Module) -> contextlib.ExitStack:
    """
    Let what follows run on streams of its own, behind all there is; and wait for it.

    One stream for each device and process: torch reserves memory for each stream apart.
    """
    stack = contextlib.ExitStack()
    for device in {each.device for each in model.parameters()}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # what wrote them may not be over
            if device not in _streams:
                _streams[device] = torch.Stream(device=device)
            stream = _streams[device]
            stack.enter_context(stream)
            stack.callback(stream.synchronize)  # nothing reads behind a reading's end
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


def _chunks(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield all bytes in pieces of about so many, where they are."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    # In the order of memory, so that a transposed weight needs no copy.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    tensor = tensor.permute(order)
    if tensor.is_contiguous():
        whole = tensor.reshape(-1).view(torch.uint8)
        yield from _cut(whole, nbytes)
        return
    rows = max(1, nbytes // (tensor[0].numel() * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        piece = tensor[start : start + rows].contiguous()
        yield from _cut(piece.reshape(-1).view(torch.uint8), nbytes)


def _cut(whole: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(whole), nbytes):
        yield whole[start : start + nbytes]


class Sums:
    """
    Sums of bytes on their device that tell any change: 128 bits for each 8 MB.

    Each word of 32 bits counts a factor of its own, modulo 2**64, twice over. For two
    different pieces, and factors drawn at random, both sums are equal with a chance of
    2**-66 at the most: multilinear hashing (Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014). The factors are no secret: it is for mistakes, not attacks.

    Args:
        device: Where the bytes are.
    """

    def __init__(self, device: torch.device) -> None:
        drawn = torch.Generator().manual_seed(_SEED)
        ends = torch.iinfo(torch.int64)
        shape = (2, _SUMMED_BYTES // 4)
        factors = torch.randint(ends.min, ends.max, shape, generator=drawn)
        self._factors = factors.to(device)
        self._sums: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        """
        Take further bytes; returns before the last ones are read.

        Args:
            piece: ``[n]`` uint8, of at most 8 MB.
        """
        missing = -len(piece) % 4
        if missing or piece.storage_offset() % 4 or piece.data_ptr() % 4:
            piece = torch.nn.functional.pad(piece, (0, missing)).clone()
        words = piece.view(torch.int32).to(torch.int64)
        self._sums.append((self._factors[:, : len(words)] * words).sum(1))
        if len(self._sums) % _AT_A_TIME == 0:
            self._sums[-1].cpu()  # waits

    def take(self) -> bytes:
        """Wait for the sums of all pieces, in order, and return them."""
        sums, self._sums = self._sums, []
        found: bytes = torch.stack(sums).cpu().numpy().tobytes()
        return found


def _of_device(sums: dict[torch.device, Sums], device: torch.device) -> Sums:
    if device not in sums:
        sums[device] = Sums(device)
    return sums[device]
