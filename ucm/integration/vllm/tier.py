# SPDX-License-Identifier: Apache-2.0
"""
A store of ours below vLLM's own offloading: a secondary tier of ``TieringOffloadingSpec``.

vLLM moves blocks between its device and its CPU tier; what gets there is saved in the
store, and what is found in the store is promoted to the CPU tier, verified, before
vLLM hears of it. The memory of the CPU tier is the host's pool of ``ucm.blocking``, its
chunks are the blocks; see ``tier_setup`` for keys.

A save that is refused, a load that fails and a store that does not answer cost what a
miss costs. A job is told as finished only when nothing of ours touches its chunks: a load
whose copy does not end is never told, because vLLM would reuse them.

Threading: vLLM's scheduler thread, which never waits here but in ``drain_jobs`` and
``shutdown``.
"""

import contextlib
import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ucm.blocking
from ucm.cache.sync import Answer, Fetching, Load, Save
from ucm.errors import DeviceTimeoutError, UCMError
from ucm.integration.vllm.tier_lookups import Lookups
from ucm.integration.vllm.tier_setup import CHUNKS, TierSetup
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.stores.opening import open_store
from ucm.threads import SYSTEM

__all__ = ["UCMTier"]

_LOG = logging.getLogger("vllm.ucm")
_KEPT_WAITING = (Reason.DEADLINE, Reason.UNAVAILABLE, Reason.STORE_HUNG)
"""Ends of loads after which the store is left alone for a while."""


@attrs.frozen
class _Began:
    """When a request did, in nanoseconds: all its blocks count as used then."""

    at_ns: int


@attrs.frozen(eq=False)
class _Job:
    """
    A job of vLLM's that was begun.

    Args:
        keys: vLLM's, in the order in which they are moved.
        moved: What is under way; None where it could not be begun.
        began: On the clock.
    """

    keys: list[bytes]
    moved: Save | Load | None
    began: float

    def wait(self) -> None:
        """Block until nothing of ours touches its chunks."""
        if isinstance(self.moved, Save):
            self.moved.wait_released()
            self.moved.wait_committed()
        elif self.moved is not None:
            self.moved.wait()


class UCMTier(SecondaryTierManager):
    """
    Named by vLLM's ``secondary_tiers``, as ``type``, with this module as ``module_path``.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: The CPU tier's memory, ``[num_chunks, chunk_bytes]``.
        tier_type: vLLM's label for it.
        backpressure_detector: vLLM's.
        locality: Where vLLM says that the store is; ``LOCAL`` if left out.
        settings: Ours.

    Raises:
        ConfigError: A setting cannot be used, or the engine cannot be served safely.
        LayoutError: The model's KV cache cannot be mapped.
    """

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - vLLM's OffloadingSpec
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401 - vLLM's
        locality: str | None = None,
        **settings: object,
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector
        )
        setup = TierSetup.of(offloading_spec, self.block_size_bytes, settings)
        config, self._layout = setup.config, setup.layout
        self._timeout = config.timeout
        with contextlib.ExitStack() as unowned:
            nbytes = self._layout.max_block_bytes
            store = open_store(config.store, block_bytes=nbytes, index_only=False)
            unowned.callback(store.close)
            self._cache = ucm.blocking.open(
                config,
                layout=self._layout,
                device={CHUNKS: primary_kv_view},
                keyspace=setup.keyspace,
                store=store,
            )
            unowned.pop_all()
        on_disk = store.capabilities.tier == "disk"
        self.medium = Medium.STORAGE if on_disk else Medium.CPU
        self.cache_hit_source = CacheHitSource.DISK if on_disk else CacheHitSource.HOST
        self.locality = Locality(locality or Locality.LOCAL)
        self._jobs: dict[int, _Job] = {}
        self._over: deque[tuple[int, float]] = deque()
        """Numbers of jobs, and when they were over; other threads append."""
        self._secret = b""
        self._has_tiers = bool(config.tiers)
        self._lookups = self._new_lookups()

    # -- look-ups --------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401 - vLLM's ReqContext
        """Take note of when a request began."""
        req_context.set_state(_Began(int(SYSTEM.monotonic() * 1e9)))
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401 - vLLM's ReqContext
        """Return whether a chunk is stored, or that this will be known soon."""
        place_of = req_context.get_offload_key_position
        found = self._lookups.find(key, req_context.req_id, place_of)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:  # noqa: ANN401 - vLLM's ScheduleEndContext
        """Ask the store what this step wanted to know, and forget what who runs asked."""
        for names in (context.new_req_ids, context.preempted_req_ids):
            for name in names:
                self._lookups.release(name)
        self._lookups.end_step()

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401 - vLLM's ReqContext
        """Forget what a request asked."""
        self._lookups.release(req_context.req_id)

    # -- jobs ------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's TransferJob
        """Have chunks saved; what is stored already is not moved."""
        self._begin(job_metadata, self._cache.save)

    def submit_load(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's TransferJob
        """Have chunks loaded and verified."""
        self._begin(job_metadata, self._cache.begin_load)

    def _begin(self, job: Any, begin: Callable[..., Save | Load]) -> None:  # noqa: ANN401 - vLLM's TransferJob
        """Move chunks in the order of their tokens, whatever the order of the keys."""
        context = job.req_context
        position = context.get_offload_key_position
        given = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        pairs = sorted(given, key=lambda pair: position(pair[0]) or 0)
        keys = [key for key, _ in pairs]
        tokens = (position(keys[0]) or 0) if keys else 0
        began = context.get_state(_Began)
        place = Place(
            first=max(0, tokens // self._layout.hash_block_tokens - 1),
            began_ns=began.at_ns if began else 0,
        )
        number, now = job.job_id, SYSTEM.monotonic()
        over = self._over
        try:
            moved = begin(self._own(keys), [chunk for _, chunk in pairs], place=place)
        except UCMError as exc:
            _LOG.warning("tier %s: a job was not begun: %s", self.tier_type, exc)
            if job.is_promotion:
                self._lookups.missed(keys)
            self._jobs[number] = _Job(keys, None, now)
            over.append((number, now))
            return
        self._jobs[number] = _Job(keys, moved, now)
        moved.when_over(lambda: over.append((number, SYSTEM.monotonic())))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what is over since the last call."""
        results = []
        while self._over:
            number, at = self._over.popleft()
            job = self._jobs.pop(number, None)
            if job is not None:
                results += self._told(number, job, at)
        return results

    def _told(self, number: int, job: _Job, at: float) -> list[JobResult]:
        """Return what vLLM is told of a job; nothing while its chunks are in use."""
        leading, moved = 0, job.moved
        try:
            if isinstance(moved, Save):
                leading = moved.wait_committed().leading
            elif moved is not None:
                result = moved.wait()
                leading = result.leading
                if result.reason in _KEPT_WAITING:
                    self._lookups.rest(self._timeout.load)
        except DeviceTimeoutError as exc:
            self._jobs[number] = job
            _LOG.error("tier %s: requests wait for it: %s", self.tier_type, exc)
            return []
        if isinstance(moved, Load):
            self._lookups.missed(job.keys[leading:])
        return [
            JobResult(
                job_id=number,
                success=leading == len(job.keys),
                successful_keys=tuple(job.keys[:leading]) or None,
                transfer_time=at - job.began,
                transfer_bytes=len(job.keys) * self.block_size_bytes,
            )
        ]

    def drain_jobs(self) -> None:
        """
        Block until all jobs are over; called when the engine resets its caches.

        It does so when its weights may have changed. What was stored so far is not found
        by this engine any more, nor what it stores from here on by another one.

        Raises:
            DeviceTimeoutError: A copy does not end.
        """
        self._secret = secrets.token_bytes(16)
        former, self._lookups = self._lookups, self._new_lookups()
        former.close()
        for job in list(self._jobs.values()):
            job.wait()
        now = SYSTEM.monotonic()
        self._over.extend((number, now) for number in self._jobs)

    def shutdown(self) -> None:
        """Drain for ``timeout.shutdown``, end the rest and close the store. Idempotent."""
        self._cache.close()

    def _new_lookups(self) -> Lookups:
        fetch = self._fetch if self._has_tiers else None
        return Lookups(self._ask, SYSTEM.monotonic, fetch)

    def _ask(self, keys: list[bytes]) -> Answer:
        return self._cache.begin_contains(self._own(keys), timeout=self._timeout.fetch)

    def _fetch(self, keys: list[bytes], since: float) -> Fetching:
        """Have tiers asked, for as long as look-ups may take that began then."""
        left = max(since + self._timeout.fetch - SYSTEM.monotonic(), 0.0)
        return self._cache.begin_prefetch(self._own(keys), timeout=left)

    def _own(self, keys: list[bytes]) -> list[bytes]:
        """Return our keys: vLLM's, or of weights that have no name, nobody's."""
        if not self._secret:
            return keys
        return [
            hashlib.blake2b(key, key=self._secret, digest_size=32).digest()
            for key in keys
        ]
