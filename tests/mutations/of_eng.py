# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a request may say that no engine of today lets through."""

from tests.mutations.mutant import Mutant

__all__ = ["ENG"]

_READER = "tests/integration/vllm/test_wishes.py::TestReader"
_SKIPS = (
    "tests/integration/vllm/test_wishes.py::TestHalves"
    "::test_request_that_skips_the_prefix_cache_loads_nothing_and_is_saved"
)
_WISHES = "ucm/integration/vllm/wishes.py"

ENG = (
    Mutant(
        name="long_number_made_a_float",
        why="A request that wants to be kept for 10**400 s ends the engine.",
        file=_WISHES,
        find="float(max(-most, min(cast(float, value), most)))",
        replace="max(-most, min(float(cast(float, value)), most))",
        killers=(f"{_READER}::test_wish_is_read",),
    ),
    Mutant(
        name="long_number_written_out",
        why="A number of thousands of digits, which Python does not print, ends the engine.",
        file=_WISHES,
        find="except (ValueError, RecursionError):",
        replace="except RecursionError:",
        killers=(f"{_READER}::test_wish_that_makes_no_sense_is_as_if_not_given",),
    ),
    Mutant(
        name="medium_that_no_message_carries",
        why="A request with half a surrogate pair waits for tiers that are never asked.",
        file=_WISHES,
        find="if not medium.isprintable():",
        replace="if False:",
        killers=(
            f"{_READER}::test_words_of_the_engine_that_make_no_sense_are_counted",
        ),
    ),
    Mutant(
        name="skipping_request_loads",
        why="Before vLLM 0.32 log-probabilities of loaded tokens are memory that nobody has written.",
        file=_WISHES,
        find="most_loaded=0 if skips else most_loaded",
        replace="most_loaded=most_loaded",
        killers=(_SKIPS,),
    ),
    Mutant(
        name="skipping_request_that_wishes_nothing_else_loads",
        why="Before vLLM 0.32 whoever asks for log-probabilities and nothing else gets unwritten rows.",
        file=_WISHES,
        find="(salt or given or priority or skips)",
        replace="(salt or given or priority)",
        killers=(_SKIPS,),
    ),
)
