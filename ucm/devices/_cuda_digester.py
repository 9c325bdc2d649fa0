# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks on an NVIDIA GPU, by a kernel of ours: ``digest.cu``."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ucm.devices._libcuda import CudaLibrary
from ucm.devices.driver import Digester, Placed, Stream, Table, Words

__all__ = ["CudaDigester"]

_CODE: Final = Path(__file__).with_name("digest.ptx")
_KERNEL: Final = "ucm_digest"
_NUM_THREADS: Final = 288
"""As ``digest.cu`` says."""
_MOST_GROUPS: Final = 64
"""Of threads at a time: 800 GB/s, on half of an H200's processors."""


class CudaDigester(Digester):
    """
    The kernel's.

    Args:
        index: Of the device; the thread's current one.
        library: libcuda.

    Raises:
        OSError: The driver does not take it.
    """

    chunk_bytes = 1024

    def __init__(self, index: int, library: CudaLibrary) -> None:
        self._device = torch.device("cuda", index)
        self._library = library
        self._kernel = library.load(_CODE.read_bytes(), _KERNEL)

    def place(self, words: npt.NDArray[np.int64]) -> Placed:
        """Copy words to a tensor; see ``Digester.place``."""
        try:
            with self._library.apart_from_graphs():
                tensor = torch.from_numpy(words).to(self._device)
        except torch.OutOfMemoryError as exc:
            raise OSError(f"{words.nbytes} bytes are not free on the GPU") from exc
        return Placed(tensor.data_ptr(), tensor)

    def make_memory(self, num_words: int) -> Words:
        """Return pinned memory, which has the same address for all."""
        try:
            with self._library.apart_from_graphs():
                memory = torch.zeros(
                    num_words, dtype=torch.int64, device="cpu", pin_memory=True
                )
        except RuntimeError as exc:
            raise OSError(f"{num_words} words cannot be pinned: {exc}") from exc
        words: Words = memory.numpy().view(np.uint64)
        return words

    def submit(self, table: Table, job: Words, count: int, stream: Stream) -> None:
        """Launch the kernel; see ``Digester.submit``."""
        chunks = table.starts.address, table.strides.address, table.num_chunks
        arguments = *chunks, *(row.ctypes.data for row in job), count
        groups = min(count, _MOST_GROUPS)
        with self._library.apart_from_graphs():
            self._library.launch(
                self._kernel, groups, _NUM_THREADS, arguments, stream.cuda_stream
            )
