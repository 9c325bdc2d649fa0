# SPDX-License-Identifier: Apache-2.0
"""
Every metric's name, kind, labels and help.

Names are frozen by a test, and so are the words that a label can have (``ucm.reasons``):
none is made of a number or an id. The addresses of a cluster's servers are no such words: 32 of them
are told of at most, and all others as one.

An engine's ranks each carry out every order on their part of a block, and an exporter
adds their numbers up. What is named after *parts* counts each of them; blocks and tokens
count once, because only the scheduler counts them. Gauges are the scheduler's, and the
store's numbers too: whatever the ranks are, a store is told of once. Parts and their
bytes obey one law at all times, per direction::

    offered = committed + skipped + refused + failed + cancelled + in flight

so that what is offered less what is settled is the backlog. No metric is a rate or a
ratio: what is to be divided ships as two totals.

Of what saves stand behind, exactly one ``ucm_dump_event_..._used_total`` grows each time.
Where an event of the engine was asked for, as for layers only, one other counter says why
it was not used::

    none + missing + handle_failed + unrecorded + stale + foreign
        = current_stream + sync_fallback
"""

import enum

import attrs

__all__ = ["METRICS", "Metric", "MetricKind"]


class MetricKind(enum.Enum):
    """How a metric is aggregated."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class Metric:
    """One metric as exported, without the engine's prefix."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


_BY_OUTCOME = ("direction", "outcome", "reason")
_BY_STAGE = ("direction", "stage")


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, labels, text)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, labels, text)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, labels, text)


_TABLE = (
    _counter(
        "ucm_offered_parts_total",
        "Parts of blocks, one for each rank, that were to be saved or loaded.",
        "direction",
    ),
    _counter(
        "ucm_offered_part_bytes_total",
        "Bytes of these parts.",
        "direction",
    ),
    _counter(
        "ucm_settled_parts_total",
        "Parts by how they ended: committed, skipped, refused, failed, cancelled.",
        *_BY_OUTCOME,
    ),
    _counter(
        "ucm_settled_part_bytes_total",
        "Bytes of parts by how they ended.",
        *_BY_OUTCOME,
    ),
    _counter(
        "ucm_saved_blocks_total",
        "Blocks that became visible in the store, all parts of them.",
    ),
    _counter(
        "ucm_dropped_blocks_total",
        "Complete blocks that nobody took in time: no room, or their request was "
        "preempted first. Some may be stored already.",
    ),
    _counter(
        "ucm_loaded_blocks_total",
        "Blocks that were verified and copied into the engine, on all ranks.",
    ),
    _counter(
        "ucm_loaded_tokens_total",
        "Tokens of these blocks: matched before, and all of the request's load ended "
        "well.",
    ),
    _counter(
        "ucm_load_failures_total",
        "Requests whose load ended in a recompute, by what was told first.",
        "reason",
    ),
    _counter(
        "ucm_matched_tokens_total",
        "Tokens that were found and that the engine chose to load; some loads fail.",
    ),
    _counter(
        "ucm_lookups_total",
        "Look-ups that decided what a request loads, once each time it gets blocks.",
    ),
    _counter(
        "ucm_missed_lookups_total",
        "Of these, those that found less than all whole blocks, by why the first one "
        "is missing.",
        "reason",
    ),
    _counter(
        "ucm_wanted_tokens_total",
        "Tokens of whole blocks, beyond the engine's own, that these looked for.",
    ),
    _counter(
        "ucm_hit_tokens_total",
        "Matched tokens by where they were: the slab, or a tier that brought them into it.",
        "tier",
    ),
    _counter(
        "ucm_kv_event_blocks_total",
        "Blocks that KV events told of, in each medium once, by what: stored, removed.",
        "event",
    ),
    _counter(
        "ucm_fetch_wants_total",
        "Requests, and prefetches, that waited for blocks from tiers, by why not all came; empty: all did.",
        "reason",
    ),
    _gauge(
        "ucm_agent_up",
        "1 while the node's agent is there and answers; only where there are tiers.",
    ),
    _counter(
        "ucm_agents_total",
        "Agents of the node, one after the other: with each but the first, the one before had ended.",
    ),
    _gauge(
        "ucm_tier_up",
        "1 while the node's agent asks a tier, 0 while that does not answer, or no agent is there.",
        "tier",
    ),
    _gauge(
        "ucm_tier_server_up",
        "1 while a server of a tier's cluster, or one of its drives, answers (load), or takes blocks (save), "
        "0 while it does not; of such as once did not: 32 by their addresses, all others together as others.",
        *("tier", "direction", "address"),
    ),
    _counter(
        "ucm_spilled_parts_total",
        "Parts that the node's agent has brought into a tier, of any engine.",
        "tier",
    ),
    _counter(
        "ucm_unspilled_parts_total",
        "Parts that it has not, by why.",
        *("tier", "reason"),
    ),
    _counter(
        "ucm_forgotten_parts_total",
        "Parts that it has deleted from a tier, since somebody wanted them forgotten.",
        "tier",
    ),
    _counter(
        "ucm_unforgotten_parts_total",
        "Parts that a tier may still have all the same: it, or the agent, could not be asked.",
        "tier",
    ),
    _counter(
        "ucm_fetched_parts_total",
        "Parts that prefetches of hosts found, and that a tier had brought into the slab.",
        "tier",
    ),
    _counter(
        "ucm_cut_messages_total",
        "Plans and reports that left something to the next one, for want of room.",
        "message",
    ),
    _counter(
        "ucm_failed_lookups_total",
        "Look-ups that the store did not answer, or answered too late.",
        "reason",
    ),
    _counter(
        "ucm_bypassed_lookups_total",
        "Look-ups that were misses at once, because several before had failed.",
    ),
    _counter(
        "ucm_unkeyed_lookups_total",
        "Look-ups that were misses, because it was not known what an adapter holds.",
        "reason",
    ),
    _counter(
        "ucm_ignored_wishes_total",
        "What requests asked of the store, by key, and was not understood.",
        "key",
    ),
    _gauge(
        "ucm_held_blocks",
        "Blocks that the engine may not reuse yet because a save reads them.",
    ),
    _gauge("ucm_held_bytes", "Bytes of these blocks, for each rank once."),
    _gauge(
        "ucm_oldest_hold_seconds",
        "How long the oldest save that still reads blocks has held them; 0: none does.",
    ),
    _gauge(
        "ucm_open_tickets",
        "Saves and loads that were ordered and are not over on every rank.",
        "direction",
    ),
    _gauge(
        "ucm_ending_requests",
        "Requests that have ended, and have blocks that no plan has saved yet.",
    ),
    _counter(
        "ucm_quarantined_holds_total",
        "Holds whose device copy never ended on some rank; they are not waited for.",
    ),
    _gauge(
        "ucm_healthy",
        "1 while the engine's saves and loads are served, 0 in bypass.",
    ),
    _gauge(
        "ucm_weights_proven",
        "1 while blocks are found and saved, 0 while the weights are in doubt.",
    ),
    _counter(
        "ucm_weights_doubted_total",
        "Times that the weights may have changed, so that all ranks read them.",
    ),
    _histogram(
        "ucm_fence_wait_seconds",
        "Time the engine waited for saves that still read blocks it reused.",
    ),
    _histogram(
        "ucm_save_duration_seconds",
        "From a save's admission to its end.",
    ),
    _histogram(
        "ucm_load_duration_seconds",
        "From a load's admission to its end.",
    ),
    _histogram(
        "ucm_hold_duration_seconds",
        "From a save's admission to the release of its source blocks.",
    ),
    _counter(
        "ucm_stage_part_bytes_total",
        "Bytes of parts of ended tickets that were in a stage, without those stored "
        "before: what the seconds beside it were spent on.",
        *_BY_STAGE,
    ),
    _counter(
        "ucm_stage_seconds_total",
        "Seconds that ended tickets spent in a stage, from begin to end.",
        *_BY_STAGE,
    ),
    _counter(
        "ucm_hit_parts_total",
        "Parts that were verified and copied into the engine, by where they lay.",
        "tier",
    ),
    _counter("ucm_hit_part_bytes_total", "Bytes of these parts.", "tier"),
    _gauge(
        "ucm_store_capacity_parts",
        "Parts of this engine's size for which the store has slots.",
    ),
    _gauge("ucm_store_committed_parts", "Parts that the store has, of any engine."),
    _gauge("ucm_store_reserved_parts", "Slots that are being written."),
    _gauge("ucm_store_capacity_bytes", "Bytes that the store may have for slots."),
    _gauge(
        "ucm_store_populated_bytes",
        "Bytes that it has by now: its memory comes behind the start.",
    ),
    _counter(
        "ucm_store_evicted_parts_total",
        "Parts that made room for others since this engine's start. Like the other "
        "numbers of a store it is the node's: of engines that share it take one.",
    ),
    _counter(
        "ucm_store_curbed_parts_total",
        "Parts that were to be retained, beyond the share for that; they count as used "
        "now.",
    ),
    _counter(
        "ucm_store_over_share_parts_total",
        "Parts refused to a tenant that had its share, and no older ones of its own.",
    ),
    _counter(
        "ucm_dropped_log_lines_total",
        "Lines of the log that were lost because they could not be written in time.",
    ),
    _gauge(
        "ucm_last_sign_timestamp_seconds",
        "When the engine last told of itself, in Unix time; also an idle one does.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_layer_used_total",
        "Saves behind the engine's event for their layer.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_direct_used_total",
        "Saves behind the engine's one event for all layers.",
    ),
    _counter(
        "ucm_dump_event_written_hook_used_total",
        "Saves behind the engine's word that a layer is written.",
    ),
    _counter(
        "ucm_dump_event_current_stream_used_total",
        "Saves behind all that the engine had submitted.",
    ),
    _counter(
        "ucm_dump_event_sync_fallback_used_total",
        "Saves for which the engine's thread waited for the device.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_none_total",
        "Saves of a layer without metadata to find an event in.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_missing_total",
        "Saves of a layer whose metadata has no event.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_handle_failed_total",
        "Saves of a layer whose event could not be read or waited for.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_unrecorded_total",
        "Saves of a layer whose event was never recorded.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_stale_total",
        "Saves of a layer whose event is of an earlier step.",
    ),
    _counter(
        "ucm_dump_event_reshape_cache_foreign_total",
        "Saves of a layer whose event is of another device.",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
