# SPDX-License-Identifier: Apache-2.0
"""
The scheduler's half of the connector: vLLM's words into ours and back.

Threading: all of it runs on the engine's scheduler thread. Nothing here waits; the
store is asked only through its index, and ``Adapters`` reads files on a thread of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ucm.agent.joining import open_client
from ucm.blocks import KeySpace
from ucm.errors import ConfigError, LayoutError, LedgerError, MessageError, StoreError
from ucm.integration.vllm.adapters import Adapters
from ucm.integration.vllm.doubts import Doubts
from ucm.integration.vllm.hits import Hits
from ucm.integration.vllm.kv_events import open_teller
from ucm.integration.vllm.lifelog import LifeLog
from ucm.integration.vllm.lookups import Lookups
from ucm.integration.vllm.messages import PlanEnvelope, RankHandshake, ReportEnvelope
from ucm.integration.vllm.modes import Loads
from ucm.integration.vllm.running import Known, Running
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.stats import SchedulerNumbers
from ucm.integration.vllm.tiers import Tiers
from ucm.integration.vllm.wishes import WishReader
from ucm.metrics import Counters
from ucm.ranks import Agreement
from ucm.scheduler.matches import PrefixMatch
from ucm.scheduler.messages import StepReport, decode_report, encode
from ucm.scheduler.paying import Paying
from ucm.scheduler.requests import Disposition
from ucm.stores.bypass import BypassStore
from ucm.stores.forgetter import Forgetter
from ucm.stores.neighbours import Neighbours
from ucm.tracing import (
    RUNTIME_FAILED,
    SCHEDULER_CLOSED,
    SCHEDULER_STARTED,
    STORE_DESCRIBE_FAILED,
    close_log,
    summarize,
)

__all__ = ["SchedulerHalf"]


class SchedulerHalf:
    """
    Looks prefixes up, orders loads and saves, and holds blocks.

    Args:
        setup: What both halves agree on.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._log = self.log = setup.open_log("scheduler")
        self._counters = self.counters = Counters()
        store = setup.open_store(index_only=True)
        self._clock = setup.threads.monotonic
        self._store = self.store = BypassStore(
            store, counters=self._counters, log=self._log, clock=self._clock
        )
        self._parks = setup.mode.loads is not Loads.LAYERWISE
        self._adapter = setup.make_decider(self._store)
        self._lifelog = LifeLog(
            self._adapter.records, self._log, setup.topology.num_ranks
        )
        self._adapters = Adapters(
            setup.adapters,
            is_immutable=setup.config.immutable_adapters,
            counters=self._counters,
            log=self._log,
            threads=setup.threads,
        )
        self._paying = paying = Paying(
            setup.layout,
            predicts=setup.config.predict_loads and self._parks,
            batches=1 + setup.topology.stages,
        )
        self._neighbours = Neighbours(self._store, setup.threads)
        self._lookups = Lookups(
            *(setup.layout, self._adapter.misses),
            elsewhere=self._neighbours.holding,
            problem_of=self._adapters.problem_of,
            paying=paying,
            counters=self._counters,
        )
        client = open_client(setup.config, setup.facts(0).slot_bytes, self._log)
        wishes = WishReader(
            *(setup.config.max_retain_seconds, self._counters, self._log, client),
            is_ranked=setup.is_ranked,
        )
        self.running = Running(self._adapters, self._adapter, wishes, setup.layout)
        of_tiers = client if setup.config.tiers else None
        self._tiers = Tiers(
            *(self._adapter.matcher, of_tiers, setup.config, paying.prompts),
            *(self._counters, self._clock),
        )
        self._forgetter = Forgetter(self._store, setup.threads, self._tiers.forget)
        self.events = open_teller(setup, client, self._counters)
        self._hits = Hits(self._counters, store.capabilities.tier)
        self.hit_sources = self._hits.sources
        self._agreement = Agreement(setup.topology, setup.facts(0))
        self._keyspace: KeySpace | None = None
        self._doubts = Doubts(
            setup.topology.num_ranks,
            clock=setup.threads.monotonic,
            counters=self._counters,
            log=self._log,
            on_doubt=self._adapter.doubt,
            on_proof=self._rekey,
        )
        self._is_closed = False
        tells = self._counters, self._adapter, self._store, self._clock
        self._numbers = SchedulerNumbers(*tells)
        self.stats = self._numbers.stats
        summarize(self._log, self._counters.totals)
        how = {"mode": setup.mode.name, "reason": setup.mode.reason}
        self._log.info(SCHEDULER_STARTED, store=type(store).__name__, **how)

    def agree(self, handshakes: Iterable[RankHandshake]) -> None:
        """
        Take note of what ranks store; with the last of them, begin to look up and save.

        Raises:
            ConfigError: Ranks are on other machines, and nothing brings their parts.
            LayoutError: Ranks disagree about what must be equal; names field and values.
            MessageError: A rank runs another release.
        """
        for handshake in handshakes:
            self._agreement.add(handshake.facts())
        if self._keyspace is not None or not self._agreement.is_complete:
            return
        self._tiers.agree(self._agreement)
        self._keyspace = self._agreement.keyspace()
        self._numbers.is_on = not self._is_closed
        self._adapter.resize(self._setup.span_blocks(self._agreement.block_bytes()))
        if self._doubts.name is not None:
            self._rekey(self._doubts.name)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's Request
        """
        Return how many tokens can be loaded, and whether the request waits so long.

        None tokens when it is to ask again: weights, or its LoRA adapter, are being read,
        or the rest of its prefix is being fetched.
        """
        known, tiers = self.running.known(request), self._tiers
        if known.record is None:
            self._lifelog.begun(known)
        known.own_tokens = known.computed_tokens = computed_tokens
        if tiers.are_there and tiers.is_pending(request.request_id, computed_tokens):
            return None, False
        if self._adapters.are_there and not self._adapters.may_match(request):
            return None, False
        if self._setup.mode.loads is Loads.NOTHING:
            return 0, False
        if self._doubts.look() and self._keyspace is not None:
            return None, False
        self._adapter.tick(now := self._clock())
        if (match := self._look_up(known, computed_tokens)) is None:
            return None, False
        match = self._lookups.looked(known, match, now)
        return match.tokens, self._parks and match.tokens > 0

    def watch_cache(self, block_pool: object) -> None:
        """Take the engine's blocks: they show when its cache is emptied, and what is free."""
        self._doubts.watch(block_pool)
        self._lookups.block_pool = block_pool

    def arrived(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request
        """Have what tiers have of a new request's prefix fetched while it waits."""
        known = self.running.known(request)
        may_ask = self._tiers.are_there and self._tiers.may_ask_early(request)
        may_ask = may_ask and self._setup.mode.loads is not Loads.NOTHING
        if may_ask and self._adapters.may_match(request):
            self._look_up(known, 0, is_early=True)

    def _look_up(
        self, known: Known, computed_tokens: int, *, is_early: bool = False
    ) -> PrefixMatch | None:
        """Return what the slab has of a prefix; None: tiers are asked for more."""
        request, wishes, tiers = known.request, known.wishes, self._tiers
        request_id, hashes = request.request_id, self._adapters.hashes_of(request)
        most = self._lookups.within(known) if self._lookups.has_limits else wishes
        if tiers.are_there:
            most = tiers.within_reach(request_id, computed_tokens, most)
        match = self._adapter.match_prefix(
            request_id, request.num_tokens, hashes, computed_tokens, most
        )
        is_asked = tiers.are_there and tiers.ask(
            request, hashes, computed_tokens, match, wishes, is_early=is_early
        )
        return None if is_asked else match

    def allocated(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        tables: Sequence[Sequence[int]],
        external_tokens: int,
        blocks: Any = None,  # noqa: ANN401 - vLLM's KVCacheBlocks
    ) -> None:
        """Order the load that the engine has decided on; *blocks* are all that it gave."""
        request_id, tiers = request.request_id, self._tiers
        known, hashes = self.running.known(request), self._adapters.hashes_of(request)
        known.has_blocks = True
        if self._adapters.are_there:
            self._adapters.begun(request_id)
        shortfall = tiers.shortfall(request_id) if tiers.are_there else None
        self._lookups.decided(known, shortfall, hashes)
        computed = known.computed_tokens
        record = self._lifelog.allocated(known)
        if self.events.is_told:
            self.events.begun(request, hashes)
        if tiers.are_there:
            tiers.begun(request_id, external_tokens)
        if not external_tokens:
            self.running.given.append((known, blocks))
            return
        known.own_tokens = computed + external_tokens
        self._adapter.blocks_allocated(
            request_id,
            tables,
            hashes,
            computed_tokens=computed,
            external_tokens=external_tokens,
            wishes=known.wishes,
            known_tokens=request.num_tokens - 1,
        )
        self._store.load_begun()
        self._counters.add("ucm_matched_tokens_total", external_tokens)
        loaded = range(computed, computed + external_tokens)
        self._paying.ordered(request_id, loaded, self._clock())
        hit = tiers.hit(request_id, loaded)
        self._hits.found(request_id, hit)
        self._lifelog.matched(record, computed, hit)

    def plan(self, output: Any) -> PlanEnvelope:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return this step's orders; does not touch *output*."""
        self._adapter.tick(now := self._clock())
        if not output.num_scheduled_tokens:
            # In process the next follows at once, and keeps our threads from the lock.
            self._setup.threads.give_way()
        is_busy = output.num_scheduled_tokens or any(self._adapter.lives.loading())
        self._lookups.stepped(now, is_idle=not is_busy)
        self._doubts.look()
        plan = self._adapter.plan_step(self.running.step(output))
        if self._doubts.awaits_plan:
            self._doubts.sent(in_use=self.running.have_blocks)
        tokens = getattr(output, "total_num_scheduled_tokens", 0)
        if drafts := getattr(output, "scheduled_spec_decode_tokens", None):
            tokens -= sum(map(len, drafts.values()))
        self._paying.planned(tokens - len(output.num_scheduled_tokens), now)
        plan = self._tiers.planned(plan) if self._tiers.are_there else plan
        plan = self._lifelog.ordered(plan) if plan.saves or plan.loads else plan
        self._lifelog.tell()
        return PlanEnvelope(encode(plan))

    def awaits_step(self) -> bool:
        """Return whether something waits for a step, even if nobody runs any more."""
        is_awaited = self._adapter.awaits_step() or self._tiers.elsewhere.awaits_plan()
        return is_awaited or self.events.are_due()

    def apply(self, output: Any) -> None:  # noqa: ANN401 - vLLM's KVConnectorOutput
        """Take note of what the workers report."""
        self._adapter.tick(now := self._clock())
        if lost := getattr(output, "invalid_block_ids", None):
            self._adapter.foreign.lost(lost)  # of anybody; the engine has gone back
        envelope = output.kv_connector_worker_meta
        if isinstance(envelope, ReportEnvelope):
            if envelope.handshakes:
                self._agree_late(envelope.handshakes)
            for payload in envelope.payloads:
                self._apply_report(payload)
        if loaded := output.finished_recving:
            self._adapter.loads_finished(loaded)
            self._paying.over(loaded, now)
            for request_id in loaded if self._tiers.are_there else ():
                self._tiers.drop(request_id)
        if sent := output.finished_sending:
            self._adapter.deferral_ended(sent)
        self._lifelog.tell()

    def _agree_late(self, handshakes: Iterable[RankHandshake]) -> None:
        """Agree in the middle of serving; ranks that disagree end our work only."""
        try:
            self.agree(handshakes)
        except (ConfigError, LayoutError, MessageError) as exc:
            self._log.error(RUNTIME_FAILED, error=repr(exc))
            self._adapter.apply_report(StepReport(rank=0, healthy=False))

    def _apply_report(self, payload: bytes) -> None:
        """Take one rank's report; one that makes no sense ends our work, not theirs."""
        try:
            report = decode_report(payload)
            self._adapter.apply_report(report)
        except (MessageError, LedgerError) as exc:
            self._log.error(RUNTIME_FAILED, error=repr(exc))
            self._adapter.apply_report(StepReport(rank=0, healthy=False))
            return
        if report.weights is not None:
            self._doubts.told(report.rank, report.weights)
        if self._tiers.are_there:
            self._tiers.reported(report, self._adapter.lives.get)
        for failure in report.failures:
            self._paying.forget(failure.request_id)
        if report.loads_done or report.failures:
            failures = {each.transfer_id: each.reason for each in report.failures}
            self._store.loads_ended(report.rank, failures, report.loads_done)
        self._lifelog.released(report)

    def finished(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]] = (),
        *,
        is_aborted: bool = False,
    ) -> bool:
        """Return whether the engine must keep a finished request's blocks for us."""
        if is_aborted:
            self._lifelog.aborted(request_id)
        end = self.running.end(request_id, tables)
        if request_id in self._paying.on_way:
            self._paying.forget(request_id)
        if self._tiers.are_there:
            self._tiers.drop(request_id)
        if self.events.is_told:
            self.events.ended(request_id)
        if self._adapters.are_there:
            self._adapters.forget(request_id)
        if end is not None and end.wishes.forgets:
            matcher = self._adapter.matcher
            self._forgetter.put(matcher.keys_of_prefix(end.hashes, end.prompt_tokens))
            self._tiers.elsewhere.forget(matcher, end.hashes, end.prompt_tokens)
        if is_aborted and self._adapter.foreign.doubts:
            end = None  # the step that loads may be under way, and its output late
        return self._adapter.request_finished(request_id, end) is Disposition.DEFER

    def reset_cache(self) -> bool:
        """
        Ask the ranks whether their weights are what they were; find nothing meanwhile.

        Nothing that is stored is touched: if the weights are the same it is still
        right, and if not it is under keys of the former ones. Never fails.
        """
        self._doubts.reset()
        return True

    def _rekey(self, weights: str) -> None:
        """Find and save under the keys of these weights, once the ranks have agreed."""
        if (keyspace := self._keyspace) is None:
            return
        if weights:
            keyspace = attrs.evolve(keyspace, weights=f"{keyspace.weights}/{weights}")
        self._adapter.rekey(keyspace.digest)
        self.events.rekey(keyspace.digest)
        try:
            self._store.describe(keyspace)  # for people; best effort
            self._neighbours.moved(keyspace)
        except StoreError as exc:
            self._log.warning(STORE_DESCRIBE_FAILED, error=repr(exc))

    def refresh(self) -> None:
        """Bring the gauges up to date; on any thread that may wait."""
        self._tiers.refresh()
        self._numbers.refresh()

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container; all zero when idle."""
        return {
            "requests": len(self.running),
            "loads_on_their_way": len(self._paying),
            "tables": self.running.num_tables,
            "adapters": len(self._adapters),
            "wants": len(self._tiers),
            "told_of": len(self.events),
            **self._adapter.counts(),
        }

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        if self._is_closed:
            return
        self._is_closed, self._numbers.is_on = True, False
        self._adapters.close()
        if all((self._neighbours.close(), self._forgetter.close())):
            self._store.close()
        self._tiers.close()
        self.events.close()
        self._lifelog.tell(at_end=True)
        self._log.info(SCHEDULER_CLOSED, holds=self._adapter.counts()["holds"])
        close_log(self._log)
