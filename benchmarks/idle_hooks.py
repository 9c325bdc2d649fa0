# SPDX-License-Identifier: Apache-2.0
"""
What the scheduler's hooks cost in a step of 1024 requests that completes no block.

``plan``, ``apply`` and ``stats`` of the scheduler's half, in CPU time of their thread,
for one and for four groups, while nothing is held and while something is. Each way of
saving decoded blocks is measured, and so is an engine that only loads. Run
``python -m benchmarks.idle_hooks``; it starts no engine.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs

from benchmarks.memory import make_keyspace
from ucm.blocks import GroupId, RowId
from ucm.config import SaveDecoded, UCMConfig
from ucm.integration.vllm.modes import DIRECT, Saves
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore

BLOCK = 32
PAGE_BYTES = 1024
RUNNING = 1024
STEPS = 400
TARGET_MS = 0.3


@attrs.frozen(kw_only=True)
class _Setup(Setup):
    """A setup over a store of this process."""

    def open_store(self, *, index_only: bool) -> Store:
        """Return a store."""
        return MemoryStore(64, self.layout.max_block_bytes)


def make_half(groups: int, decoded: SaveDecoded, *, saves: bool) -> SchedulerHalf:
    """Return a scheduler's half whose one rank has agreed."""
    layout = KVLayout(
        groups=tuple(
            GroupLayout(
                group_id=GroupId(at),
                kind=GroupKind.FULL,
                block_tokens=BLOCK,
                window_tokens=None,
                rows=(
                    RowLayout(
                        row_id=RowId(at),
                        page_bytes=PAGE_BYTES,
                        layer_names=(f"layer.{at}",),
                    ),
                ),
            )
            for at in range(groups)
        ),
        hash_block_tokens=BLOCK,
        engine_tag="benchmark",
    )
    setup = _Setup(
        config=UCMConfig.from_mapping(
            {"save_decoded": decoded.value, "log": {"level": "off"}}
        ),
        layout=layout,
        keyspace=make_keyspace(layout),
        num_blocks=4 * RUNNING,
        recomputes=True,
        mode=DIRECT if saves else attrs.evolve(DIRECT, saves=Saves.NOTHING),
    )
    from ucm.integration.vllm.messages import RankHandshake

    half = SchedulerHalf(setup)
    half.agree([RankHandshake.of(setup.facts(0))])
    return half


class Steps:
    """
    An engine's scheduler, as far as a connector sees it.

    Args:
        half: Ours.
        groups: KV cache groups.
    """

    def __init__(self, half: SchedulerHalf, groups: int) -> None:
        self._half = half
        self._names = [f"cmpl-{at:032x}-0" for at in range(RUNNING)]
        self._tables = {
            name: tuple(
                [1 + 2 * (at * groups + group), 2 + 2 * (at * groups + group)]
                for group in range(groups)
            )
            for at, name in enumerate(self._names)
        }
        self._computed = 0
        for at, name in enumerate(self._names):
            hashes = [at.to_bytes(4) + bytes([i]) * 28 for i in range(2)]
            request = SimpleNamespace(
                request_id=name,
                num_tokens=BLOCK + 1,
                num_prompt_tokens=BLOCK,
                num_computed_tokens=0,
                block_hashes=hashes,
                lora_request=None,
            )
            half.allocated(request, self._tables[name], 0)

    def output(self, tokens: int) -> Any:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the next step, in which each request computes so many tokens."""
        new = [] if self._computed else self._names
        cached = self._names if self._computed else []
        output = SimpleNamespace(
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=self._tables.__getitem__, boundary_state_offloads={}
            ),
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, num_computed_tokens=0, block_ids=self._tables[name]
                )
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                resumed_req_ids=set(),
                num_computed_tokens=[self._computed] * len(cached),
                new_block_ids=[None] * len(cached),
            ),
            num_scheduled_tokens=dict.fromkeys(self._names, tokens),
        )
        self._computed += tokens
        return output

    def go_back(self) -> None:
        """Compute the same token once more, so that no block becomes whole."""
        self._computed = BLOCK


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU time that a call takes of this thread."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


def measure(
    groups: int, decoded: SaveDecoded, *, saves: bool, held: bool
) -> tuple[float, float]:
    """Return the median, and the 99th percentile, of all hooks of a step together."""
    half = make_half(groups, decoded, saves=saves)
    steps = Steps(half, groups)
    half.plan(steps.output(BLOCK))
    nothing = SimpleNamespace(
        kv_connector_worker_meta=None, finished_recving=None, finished_sending=None
    )
    if not held:
        adapter = half._adapter  # noqa: SLF001 - as if the workers had reported
        for number in range(1, adapter.counts()["open_saves"] + 1):
            adapter._ledger.release(number, 0)  # noqa: SLF001
    taken = []
    for _ in range(STEPS):
        steps.go_back()
        output = steps.output(1)

        def hooks(output: Any = output) -> None:  # noqa: ANN401
            half.plan(output)
            half.apply(nothing)
            half.stats()

        taken.append(cpu_ms(hooks))
    half.close()
    return statistics.median(taken), statistics.quantiles(taken, n=100)[98]


def main() -> None:
    """Print a table."""
    print(f"CPU ms a step, {RUNNING} running, no block whole (target {TARGET_MS})")
    print("| groups | save_decoded | held | median | p99 |\n|---|---|---|---|---|")
    for groups in (1, 4):
        for decoded in SaveDecoded:
            for held in (False, True):
                median, p99 = measure(groups, decoded, saves=True, held=held)
                print(
                    f"| {groups} | {decoded.value} | {held} | {median:.3f} | {p99:.3f} |"
                )
        median, p99 = measure(groups, SaveDecoded.AT_END, saves=False, held=True)
        print(f"| {groups} | kv_consumer | - | {median:.3f} | {p99:.3f} |")


if __name__ == "__main__":
    main()
