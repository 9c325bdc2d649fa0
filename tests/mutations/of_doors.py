# SPDX-License-Identifier: Apache-2.0
"""Mutants of the doors to vLLM, and one of SGLang's."""

from tests.mutations.mutant import Mutant

__all__ = ["DOORS"]

_WORKER = "ucm/integration/vllm/worker.py"
_PROGRESS = "ucm/progress.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_KEYSPACE = "ucm/integration/vllm/keyspace.py"
_OF_SGLANG = "tests/integration/sglang/test_engine.py"
_LOADS = "tests/integration/vllm/test_worker.py::TestLoads"
_TOGETHER = "tests/integration/vllm/test_halves.py::TestTogether"
_HUNG = "tests/integration/vllm/test_hung_loads.py::TestTogether"
_ORDERS = "tests/integration/vllm/test_worker_orders.py"
_KEYSPACES = "tests/integration/vllm/test_keyspace.py::TestKeyspace"
_IDENTITY = "ucm/integration/vllm/identity.py"
_GREETING = "tests/integration/vllm/test_messages.py::TestGreeting"
_REUSABLE = "tests/integration/vllm/test_identity.py::TestReusable"
_EXPERTS = "test_experts_of_tokens_are_refused_where_tokens_are_loaded"

DOORS = (
    Mutant(
        name="handshake_of_ours_before_others",
        why="NixlConnector behind ours in MultiConnector gets it, and the engine does not start.",
        file="ucm/integration/vllm/messages.py",
        find="    return all(type(each).get_handshake_metadata in usual for each in others)\n",
        replace="    return bool(usual) or any(others)\n",
        killers=(f"{_GREETING}::test_other_handshakes_go_before_ours",),
    ),
    Mutant(
        name="handshake_of_stages_to_all",
        why="A child of MultiConnector that knows of no stages gets it, and the engine does not start.",
        file="ucm/integration/vllm/messages.py",
        find="pipeline_parallel_size == 1:\n",
        replace="pipeline_parallel_size:\n",
        killers=(f"{_GREETING}::test_other_handshakes_go_before_ours",),
    ),
    Mutant(
        name="no_fence_in_the_worker",
        why="The forward pass overwrites blocks that a save still reads.",
        file=_WORKER,
        find="            runtime.fence((*plan.fences, *plan.overwritten), (), plan.lost)\n",
        replace="            pass\n",
        killers=(
            f"{_ORDERS}::TestBlocks::test_blocks_under_a_save_are_not_overwritten_in_silence",
        ),
    ),
    Mutant(
        name="plan_saved_twice",
        why="A hook that is called again saves blocks that may be another's by now.",
        file=_WORKER,
        find="if step.is_bound and not step.has_saved and not step.note_error():",
        replace="if step.is_bound and not step.note_error():",
        killers=(f"{_ORDERS}::TestBlocks::test_hooks_called_again_do_nothing_more",),
    ),
    Mutant(
        name="plan_loaded_twice",
        why="A load overwrites blocks that the engine was told are its own.",
        file=_WORKER,
        find="if not step.is_bound or step.has_loaded:",
        replace="if not step.is_bound:",
        killers=(f"{_ORDERS}::TestBlocks::test_hooks_called_again_do_nothing_more",),
    ),
    Mutant(
        name="failure_not_told",
        why="The engine computes on blocks that were never loaded.",
        file=_WORKER,
        find="if load.failed}",
        replace="if load is None}",
        killers=(f"{_LOADS}::test_failed_load_is_never_told_as_loaded",),
    ),
    Mutant(
        name="load_told_twice",
        why="The engine's own assertion on a request that it knows no more ends it.",
        file=_PROGRESS,
        find="self._loads.pop(name) for name in names",
        replace="self._loads[name] for name in names",
        killers=(f"{_LOADS}::test_failed_load_is_never_told_as_loaded",),
    ),
    Mutant(
        name="deferral_told_twice",
        why="The engine frees blocks of a request that it knows no more, and ends.",
        file=_PROGRESS,
        find="            del self._deferred[request_id]\n",
        replace="            pass\n",
        killers=(f"{_ORDERS}::TestTold::test_deferred_request_is_told_once",),
    ),
    Mutant(
        name="told_before_all_spans",
        why="A request runs when the first span of its prefix is there.",
        file=_PROGRESS,
        find="            load.waiting.discard(ticket.transfer_id)\n",
        replace="            load.waiting.clear()\n",
        killers=(
            f"{_ORDERS}::TestTold::test_request_is_told_when_all_its_spans_are_over",
        ),
    ),
    Mutant(
        name="told_before_the_copy_ends",
        why="A request runs, or is freed, while the device still writes its blocks.",
        file=_PROGRESS,
        find="if load is None or not ticket.guard.is_released:",
        replace="if load is None:",
        killers=(
            f"{_ORDERS}::TestBlocks::test_stuck_load_is_not_told_before_its_copy_ends",
        ),
    ),
    Mutant(
        name="freed_under_a_save",
        why="The blocks of a finished request are reused while a save reads them.",
        file=_PROGRESS,
        find="if (request_id, generation) not in self._reading",
        replace="if True",
        killers=(
            f"{_ORDERS}::TestTold::test_deferred_request_is_not_told_under_a_copy",
        ),
    ),
    Mutant(
        name="quarantined_told_as_released",
        why="Nobody ever sees that a copy was lost.",
        file=_PROGRESS,
        find="ids = outbox.quarantined if is_given_up else outbox.released",
        replace="ids = outbox.released",
        killers=(f"{_ORDERS}::TestBlocks::test_stuck_save_is_told_as_quarantined",),
    ),
    Mutant(
        name="door_never_defers",
        why="The engine frees the blocks of every request as soon as it ends.",
        file=_SCHEDULER,
        find="is Disposition.DEFER",
        replace="is None",
        killers=(
            f"{_ORDERS}::TestHolds::test_finished_request_with_holds_is_deferred_until_told",
        ),
    ),
    Mutant(
        name="failures_ahead_of_their_ends_pass",
        why="R-14: loads of a store that hangs are told as failed first, and it counts as well.",
        file=_SCHEDULER,
        find="        if report.loads_done or report.failures:\n",
        replace="        if report.loads_done:\n",
        killers=(f"{_HUNG}::test_failures_that_are_told_ahead_of_their_ends_count",),
    ),
    Mutant(
        name="door_forgets_the_end",
        why="An id that is used again is deferred for ever.",
        file=_SCHEDULER,
        find="            self._adapter.deferral_ended(sent)\n",
        replace="            pass\n",
        killers=(
            f"{_ORDERS}::TestHolds::test_finished_request_with_holds_is_deferred_until_told",
        ),
    ),
    Mutant(
        name="preemption_not_passed_on",
        why="A request that comes back is taken for the one that lost its blocks.",
        file="ucm/integration/vllm/running.py",
        find="self._known_tokens(preempted) if preempted else {}",
        replace="{}",
        killers=(f"{_ORDERS}::TestHolds::test_preempted_request_defers_nothing",),
    ),
    Mutant(
        name="hash_seed_left_out",
        why="Engines whose block hashes differ share keys that mean other tokens.",
        file=_KEYSPACE,
        find='hash_algorithm=f"{cache.prefix_caching_hash_algo}/{python_hash_seed()}"',
        replace='hash_algorithm=f"{cache.prefix_caching_hash_algo}/"',
        killers=(f"{_KEYSPACES}::test_hash_seed_moves_the_hash_algorithm",),
    ),
    Mutant(
        name="missing_fence_ends_the_step",
        why="A device that has failed ends the engine's step, and with it the engine.",
        file=_WORKER,
        find="except Exception as exc:  # noqa: BLE001 - a device of others",
        replace="except DeviceError as exc:  # a device of others",
        killers=(
            "tests/integration/vllm/test_worker_orders.py::TestBlocks::test_failed_device_fails_orders_and_not_the_engine",
        ),
    ),
    Mutant(
        name="engine_that_tells_experts_taken",
        why="The engine raises at the first hit, because nobody knows the experts of loaded tokens.",
        file=_IDENTITY,
        find='getattr(part, "enable_return_routed_experts", False)',
        replace="False",
        killers=(f"{_REUSABLE}::{_EXPERTS}",),
    ),
    Mutant(
        name="experts_of_a_producer_refused",
        why="An engine that loads nothing, and knows the experts of all tokens, does not start.",
        file=_IDENTITY,
        find="    if loads and _tells_experts(vllm_config):",
        replace="    if _tells_experts(vllm_config):",
        killers=(f"{_REUSABLE}::{_EXPERTS}",),
    ),
    Mutant(
        name="variables_that_sglang_does_not_list_are_in_no_key",
        why="An engine loads what another one has computed in fewer bits.",
        file="ucm/integration/sglang/engine.py",
        find="for name, one in given if name in _UNLISTED}",
        replace="for name, one in ()}",
        killers=(
            f"{_OF_SGLANG}::test_variables_that_sglang_lists_nowhere_are_in_the_key",
        ),
    ),
)
