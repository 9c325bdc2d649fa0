# SPDX-License-Identifier: Apache-2.0
"""
Both halves of a connector that makes up its hits, for sizing.

With ``hit_ratio`` set, this share of every prompt is claimed as a hit and reported as
loaded in the step that asks for it. No byte moves and no store is opened: the claimed
blocks hold whatever was in them, the output is garbage, and none of it can be stored.

Threading: as for the halves in whose place these stand.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from ucm.blocks import Owner
from ucm.errors import ConfigError
from ucm.integration.vllm.kv_events import NoTeller
from ucm.integration.vllm.messages import (
    PlanEnvelope,
    RankHandshake,
    ReportEnvelope,
    plan_in,
)
from ucm.integration.vllm.modes import Loads
from ucm.integration.vllm.plugin import NAME
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.stats import UCMStats, stats_of
from ucm.integration.vllm.weights import EngineParts
from ucm.metrics import Counters
from ucm.scheduler.messages import SpanOrder, StepPlan, TransferKind, encode
from ucm.tracing import SETTING_UNSAFE, close_log

__all__ = ["MockSchedulerHalf", "MockWorkerHalf"]

logger = init_logger("vllm.ucm")

_EPSILON = 1e-9
"""A share such as 0.29 of 100 tokens is 29, not what is left of it in binary."""


class MockSchedulerHalf:
    """
    Claims hits.

    Args:
        setup: What both halves agree on.
    """

    def __init__(self, setup: Setup) -> None:
        claims = setup.mode.loads is Loads.CLAIMED
        self._ratio = (setup.config.hit_ratio or 0.0) if claims else 0.0
        self._alignment = setup.layout.alignment_tokens
        self._counters = Counters()
        self._claimed: list[str] = []
        self._step = 0
        self.events = NoTeller()
        remedy = "For sizing only: the output is garbage, nothing is saved."
        log = setup.open_log("scheduler")
        log.warning(
            SETTING_UNSAFE, key="hit_ratio", value=setup.config.hit_ratio, remedy=remedy
        )
        close_log(log)
        logger.warning(
            "hit_ratio=%s: OUTPUT IS GARBAGE. Hits are made up for sizing, nothing is "
            "loaded or saved. Remove hit_ratio to serve.",
            setup.config.hit_ratio,
        )

    def agree(self, handshakes: Iterable[RankHandshake]) -> None:
        """Do nothing: nothing is stored under any key."""

    def hit_sources(self, request_id: str, tokens: int) -> dict[Any, int]:
        """Return nothing: hits that are made up come from nowhere."""
        return {}

    def awaits_step(self) -> bool:
        """Return False: nothing is saved."""
        return False

    def arrived(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request
        """Do nothing: nothing is fetched."""

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's Request
        """Claim whole blocks up to the ratio, less what is computed and one token."""
        prompt: int = request.num_prompt_tokens
        share = min(int(prompt * self._ratio + _EPSILON), prompt - 1)
        claimed = max(0, share - share % self._alignment - computed_tokens)
        return claimed, claimed > 0

    def allocated(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        tables: Sequence[Sequence[int]],
        external_tokens: int,
        blocks: Any = None,  # noqa: ANN401 - vLLM's KVCacheBlocks
    ) -> None:
        """Order the end of a load that the engine has decided on."""
        if external_tokens:
            self._claimed.append(request.request_id)
            self._counters.add("ucm_matched_tokens_total", external_tokens)

    def plan(self, output: Any) -> PlanEnvelope:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return which requests wait for a load that is over."""
        self._step += 1
        claimed, self._claimed = self._claimed, []
        loads = (
            SpanOrder(
                transfer_id=0,
                kind=TransferKind.LOAD,
                owners=(Owner(request_id, generation=0, num_blocks=1),),
                group_id=0,
                block_ids=(0,),
                hashes=b"",
            )
            for request_id in claimed
        )
        return PlanEnvelope(encode(StepPlan(step=self._step, loads=tuple(loads))))

    def apply(self, output: Any) -> None:  # noqa: ANN401 - vLLM's KVConnectorOutput
        """Do nothing: no rank has anything to report."""

    def finished(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]] = (),
        *,
        is_aborted: bool = False,
    ) -> bool:
        """Return False: no block is kept for a save."""
        return False

    def watch_cache(self, block_pool: object) -> None:
        """Do nothing: hits are made up, whatever the weights are."""

    def reset_cache(self) -> bool:
        """Return True: there is nothing to forget."""
        return True

    def stats(self) -> UCMStats | None:
        """Return what is new since the last call."""
        return stats_of(self._counters)

    def refresh(self) -> None:
        """Nothing is held or open here."""

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container; all zero when idle."""
        return {"claimed": len(self._claimed)}

    def close(self) -> None:
        """Do nothing: nothing was opened."""


def _check_alone(hit_ratio: float | None) -> None:
    """
    Refuse to be one connector of several; workers alone are made where this is known.

    Raises:
        ConfigError: The engine's own connector is another one.
    """
    engine = get_current_vllm_config_or_none()
    own = None if engine is None else engine.kv_transfer_config
    if own is None or own.kv_connector == NAME:  # wherever the setting is given
        return
    if "hit_ratio" not in own.kv_connector_extra_config:
        raise ConfigError(
            "hit_ratio",
            hit_ratio,
            f"{own.kv_connector} has other connectors, which would store what was "
            "never computed",
            "Make this connector the engine's only one, or remove hit_ratio.",
        )


class MockWorkerHalf:
    """
    Reports every load as over.

    Args:
        setup: What both halves agree on.
        rank: This worker's rank.
        device_type: Of no consequence.

    Raises:
        ConfigError: Another connector of this engine would store the garbage.
    """

    def __init__(self, setup: Setup, rank: int, device_type: str) -> None:
        _check_alone(setup.config.hit_ratio)
        self._facts = setup.facts(rank)
        self._counters = Counters()
        self._counters.set("ucm_healthy", 1)
        self._plan: StepPlan | None = None
        self._loaded_step = 0
        self._received: set[str] = set()

    def register(
        self, kv_caches: Mapping[str, object], parts: EngineParts | None = None
    ) -> None:
        """Do nothing: the engine's memory is left alone."""

    def unregister(self) -> None:
        """Do nothing: nothing was registered."""

    restore = unregister

    def handshake(self) -> RankHandshake:
        """Return what this rank would store."""
        return RankHandshake.of(self._facts)

    def fence(self, metadata: object) -> None:
        """Do nothing: no save reads any block."""

    def bind(self, metadata: object) -> None:
        """Take this step's plan."""
        self._plan = plan_in(metadata)

    def clear(self) -> None:
        """Forget this step's plan."""
        self._plan = None

    def start_loads(self) -> None:
        """Take the plan's loads as over."""
        if self._plan is None or self._plan.step == self._loaded_step:
            return
        self._loaded_step = self._plan.step
        self._received.update(order.request_id for order in self._plan.loads)

    def wait_for_layer(self, layer_name: str) -> None:
        """Return at once: nothing is loaded."""

    def layer_saved(self, layer_name: str, attn_metadata: object) -> None:
        """Do nothing: nothing is saved."""

    def kv_written(self, layer_name: str) -> None:
        """Do nothing: nothing is saved."""

    def submit_saves(self) -> None:
        """Do nothing: nothing is saved."""

    def finished(
        self, *, by_blocks: bool = False
    ) -> tuple[set[str], set[str], set[str]]:
        """Return the requests whose loads are over; none is released, none failed."""
        received, self._received = self._received, set()
        return set(), received, set()

    def bad_blocks(self) -> set[int]:
        """Return nothing: no load fails."""
        return set()

    def report(self) -> ReportEnvelope | None:
        """Return None: nothing happened."""

    def stats(self) -> UCMStats | None:
        """Return what is new since the last call."""
        return stats_of(self._counters)

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container; all zero when idle."""
        return {"received": len(self._received)}

    def close(self) -> None:
        """Do nothing: nothing was opened."""
