# SPDX-License-Identifier: Apache-2.0
"""Mutants of the table of modes, of made-up hits and of the store that keeps nothing."""

from tests.mutations.mutant import Mutant

__all__ = ["MODES"]

_MODES = "ucm/integration/vllm/modes.py"
_MOCK = "ucm/integration/vllm/mock.py"
_SETUP = "ucm/integration/vllm/setup.py"
_NULL = "ucm/stores/null.py"
_TABLE = "tests/integration/vllm/test_modes.py::TestTable"
_SETUPS = "tests/integration/vllm/test_modes.py::TestSetup"
_CLAIMS = "tests/integration/vllm/test_mock.py::TestClaims"
_ALONE = "tests/integration/vllm/test_mock.py::TestAlone"
_LOADS = "tests/integration/vllm/test_mock.py::TestLoads"
_NULLS = "tests/stores/test_null.py::TestNullStore"

MODES = (
    Mutant(
        name="overlapping_batches_load_layerwise",
        why="A load that fails kills an engine whose next step has begun.",
        file=_MODES,
        find='{"use_layerwise": True, "overlapping_batches": True}',
        replace='{"use_layerwise": True, "is_mock": True}',
        killers=(
            f"{_TABLE}::test_every_combination_is_as_written_down",
            f"{_TABLE}::test_every_rule_is_reached",
            f"{_TABLE}::test_layerwise_is_as_asked_for_saves_and_as_possible_for_loads",
        ),
    ),
    Mutant(
        name="mock_saves",
        why="Garbage is stored under the keys of true blocks.",
        file=_MODES,
        find="saves=Saves.NOTHING,\n            loads=Loads.CLAIMED",
        replace="saves=Saves.WHOLE,\n            loads=Loads.CLAIMED",
        killers=(
            f"{_TABLE}::test_every_combination_is_as_written_down",
            f"{_TABLE}::test_nothing_of_a_mock_is_saved",
        ),
    ),
    Mutant(
        name="mock_is_alone_by_the_engines_own_setting",
        why="Who sizes by a file or a variable is told of connectors that are not there.",
        file=_MOCK,
        find="    if own is None or own.kv_connector == NAME:",
        replace="    if own is None:",
        killers=(f"{_ALONE}::test_mock_is_the_engines_only_connector",),
    ),
    Mutant(
        name="consumer_saves",
        why="An engine that must not write writes.",
        file=_MODES,
        find='"kv_consumer": (False, True)',
        replace='"kv_consumer": (True, True)',
        killers=(f"{_TABLE}::test_every_combination_is_as_written_down",),
    ),
    Mutant(
        name="hit_ratio_of_zero_is_no_mock",
        why="The base line of a sizing run saves and loads as a real engine does.",
        file=_SETUP,
        find="is_mock=config.hit_ratio is not None",
        replace="is_mock=bool(config.hit_ratio)",
        killers=(f"{_SETUPS}::test_mode_follows_settings_and_engine",),
    ),
    Mutant(
        name="silent_engine_taken_for_one_batch",
        why="Layer-wise loads on an engine that does not say whether batches overlap.",
        file=_SETUP,
        find='"max_concurrent_batches", 2)',
        replace='"max_concurrent_batches", 1)',
        killers=(f"{_SETUPS}::test_engine_that_does_not_say_is_taken_to_overlap",),
    ),
    Mutant(
        name="claim_of_the_last_token",
        why="The engine has no token left to compute and asserts.",
        file=_MOCK,
        find="prompt - 1)",
        replace="prompt)",
        killers=(
            f"{_CLAIMS}::test_share_is_claimed_in_whole_blocks",
            f"{_CLAIMS}::test_claim_is_one_that_an_engine_can_take",
        ),
    ),
    Mutant(
        name="made_up_load_told_twice",
        why="The engine's own assertion on a request that it knows no more ends it.",
        file=_MOCK,
        find="received, self._received = self._received, set()",
        replace="received = self._received",
        killers=(f"{_LOADS}::test_load_is_over_in_its_own_step_and_told_once",),
    ),
    Mutant(
        name="null_store_keeps",
        why="A sizing run finds what it saved and measures nothing.",
        file=_NULL,
        find="self._entries.pop(key).slot for key in keys",
        replace="self._entries[key].slot for key in keys",
        killers=(
            f"{_NULLS}::test_capabilities_tell_what_is_kept",
            f"{_NULLS}::test_save_is_counted_and_evicted_at_once",
        ),
    ),
    Mutant(
        name="null_store_writes_one_slot",
        why="Saves write what a cache holds and look cheaper than they are.",
        file=_NULL,
        find="self._free[:0] = gone",
        replace="self._free.extend(gone)",
        killers=(f"{_NULLS}::test_slots_are_used_in_turn",),
    ),
)
