# SPDX-License-Identifier: Apache-2.0
"""
vLLM's own offloading on a machine without an accelerator.

The engine refuses it there: ``CPUOffloadingWorker`` copies on streams. Here all of it is
vLLM's but that copy: connector, scheduler's half, tiering manager, primary tier, shared
region. A copy is over when its call returns.
"""

import ctypes
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["HostTieringSpec"]


class HostWorker(OffloadingWorker):
    """
    Copies pages between the engine's blocks and the primary tier's chunks.

    Args:
        kv_caches: The engine's pages, one tensor for each row.
        blocks_per_chunk: Blocks of a chunk.
        region: The primary tier's memory, as this rank sees it.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
    ) -> None:
        self._region = region
        self._step = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages = [
            (one.tensor.data_ptr(), one.tensor.stride(0)) for one in kv_caches.tensors
        ]
        sizes = [one.page_size_bytes for one in kv_caches.tensors]
        views = [region.create_next_worker_view(size * self._step) for size in sizes]
        self._chunks = [(one.data_ptr(), one.stride(0)) for one in views]
        self._sizes = sizes
        self._over: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks into chunks."""
        assert isinstance(dst_spec, CPULoadStoreSpec)
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        """Copy chunks into blocks."""
        assert isinstance(src_spec, CPULoadStoreSpec)
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(
        self,
        job_id: int,
        blocks: GPULoadStoreSpec,
        chunks: CPULoadStoreSpec,
        *,
        is_store: bool,
    ) -> bool:
        nbytes = at = chunk_at = 0
        for group, (count, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            skipped = first % self._step
            for place in range(skipped, skipped + count):
                block = int(blocks.block_ids[at])
                chunk = int(chunks.block_ids[chunk_at + place // self._step])
                nbytes += self._copy_block(
                    group, block, chunk, place % self._step, is_store=is_store
                )
                at += 1
            chunk_at += -(-(skipped + count) // self._step) if count else 0
        assert len(chunks.block_ids) == chunk_at
        self._over.append(TransferResult(job_id, True, nbytes, 1e-6))
        return True

    def _copy_block(
        self, group: int, block: int, chunk: int, place: int, *, is_store: bool
    ) -> int:
        copied = 0
        for ref in self._refs[group]:
            pages, page_stride = self._pages[ref.tensor_idx]
            chunks, chunk_stride = self._chunks[ref.tensor_idx]
            here = pages + block * page_stride
            there = chunks + chunk * chunk_stride + place * self._sizes[ref.tensor_idx]
            to, of = (there, here) if is_store else (here, there)
            ctypes.memmove(to, of, ref.page_size_bytes)
            copied += ref.page_size_bytes
        return copied

    def get_finished(self) -> list[TransferResult]:
        """Return what was submitted since the last call."""
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy is over."""

    def shutdown(self) -> None:
        """Let go of the region."""
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with a worker that copies on the calling thread."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, whatever the platform is."""
        if not self._worker:
            region: dict[str, Any] = {
                "engine_id": self._engine_id,
                "num_chunks": self.num_chunks,
                "kv_bytes_per_chunk": self.kv_bytes_per_chunk,
                "cpu_page_size": self.cpu_page_size_per_worker,
            }
            self._worker = HostWorker(
                kv_caches,
                self.blocks_per_chunk,
                SharedOffloadRegion(rank=self.config.parallel.rank, **region),
            )
        return self._worker
