# SPDX-License-Identifier: Apache-2.0
"""
The process off which engines of SGLang fork; imports take it half a minute.

It reads a line of JSON for each engine that is wanted, and forks. The engine's process
connects to the socket that the line names, and answers line by line until that is closed.
SGLang's own processes, which it would spawn, fork as well.
"""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

_FAILED = 1


class ToldError(Exception):
    """How a method of the scheduler returns something: by its text."""


class Serving:
    """
    One engine, in the process that SGLang calls main.

    Args:
        args: Keywords of SGLang's Engine.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**args)
        self._retractions = self._cached = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Decode greedily."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        said = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        self._retractions += sum(one["meta_info"]["num_retractions"] for one in said)
        self._cached += sum(one["meta_info"]["cached_tokens"] for one in said)
        return [one["output_ids"] for one in said]

    def abandon(self, prompts: list[list[int]]) -> None:
        """Abort the first request at once, the next after a piece of output, and so on."""
        self._engine.loop.run_until_complete(self._abandon(prompts))

    async def _abandon(self, prompts: list[list[int]]) -> None:
        async def one(at: int, tokens: list[int]) -> None:
            sampling = {"temperature": 0, "max_new_tokens": 99, "ignore_eos": True}
            rid = f"given-up-{at}-{id(tokens)}"
            pieces = await self._engine.async_generate(
                input_ids=tokens, sampling_params=sampling, stream=True, rid=rid
            )
            if at == 0:
                asyncio.get_running_loop().call_soon(self._abort, rid)
            with contextlib.suppress(ValueError):  # it says so of an abort
                count = 0
                async for _ in pieces:
                    if (count := count + 1) == at:
                        self._abort(rid)

        await asyncio.gather(*(one(at, tokens) for at, tokens in enumerate(prompts)))

    def _abort(self, rid: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=rid)

    def retractions(self) -> int:
        """Return how often a request has been taken its pages."""
        return self._retractions

    def cached(self) -> int:
        """Return how many tokens SGLang has not computed, as all ranks had them."""
        return self._cached

    def lose(self) -> None:
        """Have one rank lose what the others load next."""
        self._engine.collective_rpc("lose")

    def spoil(self) -> None:
        """Have recurrent states that are loaded be of no prompt, until it is asked for again."""
        self._engine.collective_rpc("spoil")

    def settle(self) -> None:
        """Wait for all saves, in the scheduler."""
        self._engine.collective_rpc("settle")

    def flush(self) -> bool:
        """Let the engine forget; False while it still ends a request."""
        return self._engine.flush_cache().success

    def look(self) -> dict[str, Any]:
        """Return what the door has loaded, and what it keeps."""
        try:
            self._engine.collective_rpc("look")
        except AssertionError as exc:
            return json.loads(str(exc))
        raise ToldError("it said nothing")

    def update_weights(self, path: str) -> bool:
        """Have the weights read anew."""
        loop, manager = self._engine.loop, self._engine.tokenizer_manager
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        given = UpdateWeightFromDiskReqInput(model_path=path)
        return loop.run_until_complete(manager.update_weights_from_disk(given, None))[0]

    def stop(self) -> None:
        """End all processes, as SGLang does it."""
        self._engine.shutdown()


def _door(scheduler: Any) -> Any:
    """Return our object within the scheduler."""
    tree = scheduler.tree_cache
    if tree.linker is not None:
        return tree.linker.cache_linker
    backend = tree.cache_controller.storage_backend
    return getattr(backend, "_backend", backend)


def _pages_of(door: Any) -> list[Any]:
    """Return what it keeps of pages, kind by kind."""
    kinds = getattr(door, "_kinds", None)
    return [door._pages] if kinds is None else [each.pages for each in kinds.values()]


def _settle(scheduler: Any) -> None:
    tree = scheduler.tree_cache
    busy = True
    while busy:
        tree.check_hicache_events()
        busy = bool(
            tree.linker.pending_offloads
            if tree.linker is not None
            else tree.ongoing_write_through
            or tree.ongoing_backup
            or tree.ongoing_prefetch
        )


def _look(scheduler: Any) -> None:
    door = _door(scheduler)
    kinds = _pages_of(door)
    staged = [each.staged for each in kinds]
    loaded = [
        value
        for each in staged
        for key, value in each._cache.measure().counters.items()
        if key.startswith("ucm_settled_parts_total|")
        and {"load", "committed"} <= set(key.split("|"))
    ]
    left = {
        "held": sum(len(each._held) for each in staged),
        "loads": sum(len(each._loads) for each in staged),
    }
    if scheduler.tree_cache.linker is not None:
        left |= {
            "saves": len(door._saves),
            "queued": len(door._queued),
            "batches": len(door.layer_done_counter.batches),
        }
    cores = [
        cache._core for each in kinds for cache in (each._pool, each.staged._cache)
    ]
    fetched = [each._counters.total("ucm_fetched_parts_total") for each in cores]
    told: dict[str, Any] = {
        "rows": sum(len(each.slots) for each in kinds),
        "loaded": int(sum(loaded)),
        "fetched": int(sum(fetched)),
        "are_served": all(each.fetches.is_served for each in cores),
        "left": left,
    }
    ranks = _of_ranks(scheduler, told)
    told["ranks"] = [each["loaded"] for each in ranks]
    told["left"] = {name: sum(each["left"][name] for each in ranks) for name in left}
    raise ToldError(json.dumps(told))


def _of_ranks(scheduler: Any, told: object) -> list[Any]:
    """Return what each rank tells; all of them are asked at once."""
    ranks: list[Any] = [None] * scheduler.tp_group.world_size
    torch.distributed.all_gather_object(ranks, told, group=scheduler.tp_cpu_group)
    return ranks


def _lose(scheduler: Any) -> None:
    """Have the last rank's next load find nothing staged: its look-up was too long ago."""
    door = _door(scheduler)
    if scheduler.tp_group.rank_in_group + 1 < scheduler.tp_group.world_size:
        return

    def load(rid: str, transfers: Sequence[Any]) -> bool:
        del door.load
        door._let_go(rid)
        door._pages.staged.forget()
        return door.load(rid, transfers)

    door.load = load


def _spoil(scheduler: Any) -> None:
    """Have states that are loaded be zero, or no more."""
    door = _door(scheduler)
    if "batch_get_v2" in vars(door):
        del door.batch_get_v2
        return
    get = door.batch_get_v2

    def batch_get_v2(transfers: Sequence[Any], extra_info: object = None) -> Any:
        got = get(transfers, extra_info)
        for row in door._kinds["mamba"]._rows:
            row.zero_()
        return got

    door.batch_get_v2 = batch_get_v2


def _prepare() -> None:
    """Import all that engines need, and teach the scheduler what tests ask of it."""
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        # Let in more requests than there will be room for.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1",
    }
    from tests.sglang import stubs

    stubs.install()
    # Of several ranks each would compile how it looks up its part of the vocabulary.
    torch._dynamo.config.disable = True
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent
    from sglang.srt.models.registry import ModelRegistry

    from tests.sglang import host_copies, recurrences, short_convs, window_reads

    ModelRegistry.get_supported_archs()
    host_copies.install()
    window_reads.install()
    short_convs.install()
    recurrences.install()
    # What is computed of latents at once, without their heads, is the one way that reads
    # them from the pool; SGLang picks another where torch computes attention.
    latent.AttentionBackendRegistry.register(
        "torch_native", lambda *_: latent.AttnForwardMethod.MLA
    )
    Scheduler.settle, Scheduler.look = _settle, _look
    Scheduler.lose, Scheduler.spoil = _lose, _spoil
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force: set_start_method(
        "fork", force
    )


def _serve(wanted: dict[str, Any]) -> None:
    """Be an engine's main process."""
    os.setsid()
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(wanted["environment"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from fastapi import HTTPException

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(wanted["socket"])
        lines = connection.makefile("rw")
        serving = Serving(wanted["args"])
        print(json.dumps({"said": os.getpid()}), file=lines, flush=True)
        for line in lines:
            asked = json.loads(line)
            try:
                answer = {"said": getattr(serving, asked.pop("do"))(**asked)}
            except (
                AssertionError,
                HTTPException,
                LookupError,
                OSError,
                RuntimeError,
                ValueError,
            ) as exc:
                answer = {"error": repr(exc)}
            print(json.dumps(answer), file=lines, flush=True)


def main() -> None:
    """Fork an engine for each line."""
    gc.disable()  # nearly all that is made here stays
    _prepare()
    # To look at a million objects of modules copies the memory that a fork shares.
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            status = _FAILED
            try:
                _serve(json.loads(line))
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(status)


if __name__ == "__main__":
    main()
