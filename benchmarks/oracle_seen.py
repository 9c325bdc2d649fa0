# SPDX-License-Identifier: Apache-2.0
"""
What ``benchmarks.oracle`` compares: blocks as bytes of KV, where they become somebody else's.

That is before a commit makes them visible, before a load gives them to the engine, in pages of
requests that run, and in the slab in the end. The first sight of a block is kept; each later
one must equal it, and it what an engine without connector computes for these tokens.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ucm.blocks import BlockId, PackedKey, group_of, hash_of
from ucm.devices.cpu import CPUDevice
from ucm.errors import BlockCorruptError, BlockNotFoundError
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.pipeline import load, save
from ucm.plan import HostSlots
from ucm.stores.slab import SlabStore

__all__ = ["COARSE", "TOLERANCE", "Eyes", "Oracle", "difference"]

_Block = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]
_Key = tuple[int, bytes]
"""Group, and the engine's hash of the block."""

TOLERANCE: Final = 5e-3
"""Rounding of other batches is 5e-5; another token's block differs by 0.1 and more."""
COARSE: Final = 0.25
"""Of numbers of two bytes, or one, and of the length of a block: its distance from the right one."""
_Part = tuple[int, int, torch.dtype]
"""Where in a block numbers of one type begin and end."""


def difference(one: _Block, other: _Block) -> float:
    """Return by how much two blocks differ at most; infinite if something is no number."""
    with np.errstate(invalid="ignore"):
        most = float(np.abs(one - other).max())
    return most if math.isfinite(most) else math.inf


def _distance(one: _Block, other: _Block) -> float:
    """Return how far a block is from the right one, in lengths of that."""
    with np.errstate(invalid="ignore"):
        apart = float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-6))
    return apart if math.isfinite(apart) else math.inf


class Oracle:
    """
    Knows blocks as they were first seen, and as they should be.

    Args:
        share: Of a block that is compared: behind it are layers of a draft model, which
            the engine fills when it likes.
        is_coarse: Whether numbers are no float32, so that other batches round them otherwise.
    """

    def __init__(self, share: float = 1.0, *, is_coarse: bool = False) -> None:
        self._share, self._is_coarse = share, is_coarse
        self.parts: dict[int, list[_Part]] = {}
        """Of a group's blocks; float32 all through if nothing is said."""
        self._lock = threading.Lock()
        self._known: dict[_Key, tuple[_Block, str]] = {}
        self.truth: dict[_Key, _Block] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.worst = 0.0

    def see(self, where: str, key: _Key, raw: _Bytes) -> None:
        """Compare a block with its first sight."""
        block = self._block(key, raw)
        with self._lock:
            self.counts[where] += 1
            first, at = self._known.setdefault(key, (block, where))
            self._compare(f"{where}, first seen at {at}", key, block, first)

    def learn(self, key: _Key, raw: _Bytes) -> None:
        """Take a block that is right."""
        self.truth[key] = self._block(key, raw)

    def hold(self, where: str, key: _Key, raw: _Bytes) -> None:
        """Compare a block with what is right."""
        if key in self.truth:
            self.counts[where] += 1
            self._compare(where, key, self._block(key, raw), self.truth[key])

    def judge(self, *, may_be_unknown: bool = False) -> None:
        """
        Compare all first sights with what is right.

        Args:
            may_be_unknown: Whether there may be blocks that nobody knows; they are a problem
                otherwise, as it is if nothing at all was compared.
        """
        for key, (block, where) in self._known.items():
            if key in self.truth:
                self.counts["verified"] += 1
                self._compare(f"{where}, against truth", key, block, self.truth[key])
            else:
                self.counts["unknown"] += 1
        if (unknown := self.counts["unknown"]) and not may_be_unknown:
            self.problems.append(f"{unknown} blocks are of no tokens that were asked")
        if not self.counts["verified"]:
            self.problems.append("no block was compared with the truth")

    def _block(self, key: _Key, raw: _Bytes) -> _Block:
        whole = torch.from_numpy(np.array(raw))
        parts = self.parts.get(key[0], [(0, len(whole), torch.float32)])
        found = [whole[at:end].view(dtype).float().numpy() for at, end, dtype in parts]
        block = np.concatenate(found)
        return block[: int(len(block) * self._share)].copy()

    def _compare(self, where: str, key: _Key, block: _Block, right: _Block) -> None:
        measure, most = (
            (_distance, COARSE) if self._is_coarse else (difference, TOLERANCE)
        )
        apart = measure(block, right)
        if apart < most:
            self.worst = max(self.worst, apart)
        else:
            name = f"group {key[0]}, {key[1].hex()[:16]}"
            self.problems.append(f"{where}: {name} differs by {apart:.3g}")


class Eyes:
    """
    Looks at blocks of the engine that runs in this process.

    Args:
        oracle: Is shown them.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._device: CPUDevice | None = None
        self._layout: KVLayout | None = None

    @property
    def layout(self) -> KVLayout:
        """The layout of the last engine with a connector."""
        assert self._layout is not None
        return self._layout

    def open(self, patch: pytest.MonkeyPatch, *, sees_commits: bool) -> None:
        """See what engines register, commit and publish."""
        oracle, register = self._oracle, CPUDevice.register
        commit, publish = save.Commit.run, load._publish  # noqa: SLF001 - blocks are the engine's behind it

        def registered(
            device: CPUDevice, layout: KVLayout, kv_caches: Mapping[str, object]
        ) -> None:
            self._device, self._layout = device, layout
            register(device, layout, kv_caches)

        def committed(stage: save.Commit, given: save.Sealed) -> save.Finished:
            lease = given.ticket.write_lease
            if not given.is_whole or lease is None or not sees_commits:
                return commit(stage, given)
            blocks = [lease.slots.block(at).copy() for at in range(len(lease.keys))]
            finished = commit(stage, given)
            for at, key in enumerate(lease.keys):
                if lease.positions[at] not in given.ticket.guard.lost:
                    oracle.see("commit", _name(key), blocks[at])
            return finished

        def published(given: load.Scattered) -> None:
            span = given.ticket.span
            pages = self._pages(self.layout.group(span.group_id), span.block_ids)
            publish(given)
            for key, page in zip(span.keys, pages, strict=True):
                oracle.see("publish", _name(key), page)

        patch.setattr(CPUDevice, "register", registered)
        patch.setattr(save.Commit, "run", committed)
        patch.setattr(load, "_publish", published)

    def begin(self, llm: Any) -> None:  # noqa: ANN401 - vLLM's LLM
        """Learn of an engine what its numbers are: what it registers of a state are bytes."""
        for group in self.layout.groups:
            parts = [*_parts_of(group, _caches_of(llm, self.layout))]
            self._oracle.parts[int(group.group_id)] = parts

    def look(
        self,
        scheduler: Any,  # noqa: ANN401 - vLLM's
        request: Any,  # noqa: ANN401 - vLLM's
        hashes: Sequence[bytes],
        *,
        spare: int,
    ) -> None:
        """Compare a request's blocks that are computed, but for its last *spare* tokens."""
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(computed, request.num_tokens - 1) - spare
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group in self.layout.groups:
            found = [*self._whole(group, tables, computed, hashes)]
            # What a window has left behind, the engine drops when it likes.
            found = found if group.kind is GroupKind.FULL else found[-1:]
            if group.kind is GroupKind.STATE:
                pool = scheduler.kv_cache_manager.block_pool.blocks
                found = [each for each in found if pool[each[0]].block_hash]
            pages = self._pages(group, [block for block, _ in found])
            for (_, key), page in zip(found, pages, strict=True):
                self._oracle.see("running", key, page)

    @contextlib.contextmanager
    def learning(
        self,
        llm: Any,  # noqa: ANN401 - vLLM's LLM
        hashes: Mapping[tuple[tuple[int, ...], str, str], Sequence[bytes]],
    ) -> Iterator[None]:
        """
        Take for right what an engine without connector computes.

        Args:
            llm: That engine.
            hashes: Of the blocks of each prompt, by its tokens, salt and adapter's name.
        """
        core = llm.llm_engine.engine_core.engine_core
        found = _caches_of(llm, self.layout)
        caches = {name: found[name][0] for name in found}
        scheduler, update = core.scheduler, core.scheduler.update_from_output
        self._device = CPUDevice(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        self._device.register(self.layout, caches)

        def updated(scheduled: Any, output: object) -> object:  # noqa: ANN401 - vLLM's
            for name in scheduled.num_scheduled_tokens:
                request = scheduler.requests[name]
                lora, salt = request.lora_request, request.cache_salt or ""
                adapter = lora.lora_name if lora else ""
                prompt = tuple(request.prompt_token_ids), salt, adapter
                tables = scheduler.kv_cache_manager.get_block_ids(name)
                done = min(request.num_computed_tokens, len(prompt[0]))
                for group in self.layout.groups:
                    self._learn(group, tables, done, hashes[prompt])
            return update(scheduled, output)

        scheduler.update_from_output = updated
        yield
        scheduler.update_from_output = update

    def _learn(
        self,
        group: GroupLayout,
        tables: Sequence[Sequence[int]],
        computed: int,
        hashes: Sequence[bytes],
    ) -> None:
        oracle = self._oracle
        if group.kind is GroupKind.STATE and computed % group.block_tokens:
            return
        whole = [*self._whole(group, tables, computed, hashes)]
        whole = whole[-1:] if group.kind is GroupKind.STATE else whole
        found = [each for each in whole if each[1] not in oracle.truth]
        pages = self._pages(group, [block for block, _ in found])
        for (_, key), page in zip(found, pages, strict=True):
            oracle.learn(key, page)

    def look_into(self, slab: Path) -> Iterator[str]:
        """Compare all that lies in a slab; yield which blocks of it are corrupt."""
        for index in sorted(slab.glob("index-*")):
            nbytes = int(index.name.split("-")[1].split(".")[0])
            with SlabStore.join(slab, block_bytes=nbytes, index_only=False) as store:
                for key in _keys_in(store):
                    with (
                        contextlib.suppress(BlockNotFoundError),
                        contextlib.closing(store.read([key])) as lease,
                    ):
                        try:
                            lease.verify(0, 1)
                        except BlockCorruptError as exc:
                            yield f"corrupt in the slab: {exc}"
                            continue
                        block = lease.slots.block(0)
                        self._oracle.hold("slab", _name(key), block)

    def _pages(self, group: GroupLayout, block_ids: Sequence[BlockId]) -> _Bytes:
        """Return blocks as they are in the engine."""
        assert self._device is not None
        pool = np.zeros((len(block_ids), group.block_bytes), np.uint8)
        slots = HostSlots(pool, np.arange(len(block_ids)), group.block_bytes)
        rows = [row.row_id for row in group.rows]
        if block_ids:
            self._device.gather(group.group_id, rows, block_ids, slots)
        return pool

    def _whole(
        self,
        group: GroupLayout,
        tables: Sequence[Sequence[int]],
        computed: int,
        hashes: Sequence[bytes],
    ) -> Iterator[tuple[BlockId, _Key]]:
        """Yield a request's whole blocks in a group that it still has, with their keys."""
        table, size = tables[group.group_id], group.block_tokens
        for at in range(min(computed // size, len(table))):
            last = (at + 1) * size // self.layout.hash_block_tokens - 1
            if table[at] and last < len(hashes):
                yield BlockId(table[at]), (int(group.group_id), bytes(hashes[last]))


def _name(key: PackedKey) -> _Key:
    return int(group_of(key)), bytes(hash_of(key))


def _layers_of(layout: KVLayout) -> Iterator[str]:
    for group in layout.groups:
        for row in group.rows:
            yield from row.layer_names


def _parts_of(
    group: GroupLayout, caches: Mapping[str, Sequence[Any]]
) -> Iterator[_Part]:
    """Yield where numbers are in a group's blocks; behind a state its page is nobody's."""
    for row, at in zip(group.rows, group.row_offsets, strict=True):
        first, *rest = caches[row.layer_names[0]]
        if group.kind is not GroupKind.STATE:
            yield at, at + row.page_bytes, first.dtype
            continue
        for state in (first, *rest):
            begin = at + state.data_ptr() - first.data_ptr()
            yield begin, begin + state[0].nbytes, state.dtype


def _caches_of(llm: Any, layout: KVLayout) -> dict[str, Sequence[Any]]:  # noqa: ANN401 - vLLM's LLM
    """Return each layer's tensors, as it computes with them."""
    core = llm.llm_engine.engine_core.engine_core
    layers = core.vllm_config.compilation_config.static_forward_context
    caches = {name: layers[name].kv_cache for name in _layers_of(layout)}
    return {
        name: cache if isinstance(cache, list | tuple) else [cache]
        for name, cache in caches.items()
    }


def _keys_in(store: SlabStore) -> list[PackedKey]:
    keys: dict[PackedKey, None] = {}
    cursor, is_all = None, False
    while not is_all:
        changes = store.changes(cursor)
        cursor, is_all = changes.cursor, changes.is_all
        for change in changes.told:
            keys.pop(change.key, None)
            if change.nbytes:
                keys[change.key] = None
    return [*keys]
