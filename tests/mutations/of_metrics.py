# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is counted, and of how it is told while no step runs."""

from tests.mutations.mutant import Mutant

__all__ = ["METRICS"]

_EXPORTER = "ucm/exporter.py"
_MEASURING = "ucm/cache/measuring.py"
_RECORDER = "ucm/pipeline/recorder.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_STATS = "ucm/integration/vllm/stats.py"
_EXPORTS = "tests/test_exporter.py::TestExporter"
_FRONT = "tests/integration/vllm/test_vitals.py::TestFront"
_NUMBERS = "tests/integration/vllm/test_stats.py::TestPrometheus"
_LOOKS = "tests/integration/vllm/test_health.py::TestRefresh"
_TICKETS = "tests/pipeline/test_recorder.py::TestRecorder"

METRICS = (
    Mutant(
        name="first_damage_is_no_step",
        why="X-10: the alert of a damaged block, or a stuck copy, waits for a second one.",
        file=_STATS,
        find="self._child(key, engine).inc(0)",
        replace="pass",
        killers=(f"{_NUMBERS}::test_what_happens_once_is_none_before",),
    ),
    Mutant(
        name="first_damage_of_a_host_is_no_step",
        why="X-10: the alert of a host's damaged block waits for a second one.",
        file=_EXPORTER,
        find="(born | seen.counters",
        replace="(seen.counters",
        killers=(f"{_EXPORTS}::test_what_happens_once_is_none_before",),
    ),
    Mutant(
        name="hung_engine_stays_healthy",
        why="X-11: an engine that hangs is as healthy as it was when it last moved.",
        file=_STATS,
        find="if asked_at - min(answered.values()) > _LATE_S:",
        replace="if False:",
        killers=(f"{_FRONT}::test_engine_that_hangs_or_is_gone_is_not_healthy",),
    ),
    Mutant(
        name="old_sign_undoes_a_step",
        why="X-11: an engine that has just failed is told to be well again.",
        file=_STATS,
        find="elif asked_at < told_at:",
        replace="elif False:",
        killers=(f"{_FRONT}::test_step_that_told_later_is_believed",),
    ),
    Mutant(
        name="best_process_is_the_engine",
        why="X-11: a rank that failed while the engine idles is outvoted.",
        file=_STATS,
        find="gauges[key] = min(gauges.get(key, value), value)\n        if asked_at",
        replace="gauges[key] = max(gauges.get(key, value), value)\n        if asked_at",
        killers=(f"{_FRONT}::test_gauges_of_an_idle_engine_are_as_fresh",),
    ),
    Mutant(
        name="engines_of_a_group_share_a_name",
        why="X-11: of several engines behind one front end, none is found.",
        file=_STATS,
        find="""name if is_one else f"{name}_dp{each}\"""",
        replace="""name""",
        killers=(f"{_FRONT}::test_engines_of_a_group_are_told_apart",),
    ),
    Mutant(
        name="timer_keeps_its_metrics",
        why="Each engine that a program opens leaves a thread behind for good.",
        file=_STATS,
        find="partial(_look_often, weakref.ref(self))",
        replace="partial(_look_often, lambda: self)",
        killers=(f"{_FRONT}::test_timer_of_the_front_end_does_not_keep_it",),
    ),
    Mutant(
        name="idle_store_is_well",
        why="X-11: a slab that was removed shows only when somebody asks for a prefix.",
        file=_STATS,
        find="            self._answers = False\n",
        replace="            self._answers = True\n",
        killers=(f"{_LOOKS}::test_idle_engine_whose_slab_is_gone_is_not_healthy",),
    ),
    Mutant(
        name="hold_does_not_age",
        why="X-11: a save that holds blocks for ever looks like one that just began.",
        file="ucm/scheduler/saves.py",
        find="            now=self._transfers.denied.now,\n",
        replace="            now=1e18,\n",
        killers=(f"{_LOOKS}::test_what_is_held_and_open_is_told_with_its_age",),
    ),
    Mutant(
        name="save_is_a_hit",
        why="X-10: hits by tier count what was only stored.",
        file=_RECORDER,
        find="if ticket.direction is Direction.LOAD and outcome.committed:",
        replace="if outcome.committed:",
        killers=(f"{_EXPORTS}::test_scrape_tells_what_a_cache_did_and_how_it_stands",),
    ),
    Mutant(
        name="stored_blocks_make_bandwidth",
        why="X-10: saves of what is stored already look like a fast disk.",
        file=_RECORDER,
        find="moved = (num_blocks - outcome.skipped) * ticket.block_bytes",
        replace="moved = num_blocks * ticket.block_bytes",
        killers=(f"{_TICKETS}::test_nothing_but_what_was_copied_is_a_hit",),
    ),
    Mutant(
        name="stage_of_a_host_names_a_series",
        why="S0-43: a host's stage called a|b ends every ticket with an error.",
        file=_RECORDER,
        find='word = stage if stage in STAGES else "own"',
        replace="word = stage",
        killers=(
            f"{_TICKETS}::test_stages_and_hits_are_counted_with_the_bytes_they_moved",
        ),
    ),
    Mutant(
        name="closed_cache_is_well",
        why="X-11: a host that closed its cache sees it healthy.",
        file=_MEASURING,
        find="        is_healthy = False\n    counters.set",
        replace="        is_healthy = True\n    counters.set",
        killers=(f"{_EXPORTS}::test_scrape_tells_what_a_cache_did_and_how_it_stands",),
    ),
    Mutant(
        name="buckets_are_not_cumulative",
        why="X-10: every quantile that Prometheus computes is wrong.",
        file=_EXPORTER,
        find="        total += count\n",
        replace="        total = count\n",
        killers=(f"{_EXPORTS}::test_buckets_are_cumulative_and_sum_up",),
    ),
    Mutant(
        name="caches_not_told_apart",
        why="Two caches of a process are one series, which jumps back and forth.",
        file=_EXPORTER,
        find="            _add(families, list(own.values()), measure())\n",
        replace='            _add(families, ["a"] * len(own), measure())\n',
        killers=(
            f"{_EXPORTS}::test_caches_of_one_process_are_told_apart_by_their_names",
        ),
    ),
    Mutant(
        name="label_of_a_metric_taken_twice",
        why="Each scrape of the process fails, or loses what the label said.",
        file=_EXPORTER,
        find="        elif name in _TAKEN:\n",
        replace="        elif name in ():\n",
        killers=(f"{_EXPORTS}::test_label_that_cannot_be_is_refused",),
    ),
)
