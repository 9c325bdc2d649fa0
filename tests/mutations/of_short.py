# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is done where descriptors, threads or room run out."""

from tests.mutations.mutant import Mutant

__all__ = ["SHORT"]

_WEIGHTS = "tests/integration/vllm/test_weights.py::TestAnswers"
_AGENT = "tests/agent/test_exhausted.py"

SHORT = (
    Mutant(
        name="agent_ends_for_want_of_a_descriptor",
        why="R-63: one engine that cannot be served costs all others their tiers.",
        file="ucm/agent/connection.py",
        find="        except (OSError, RuntimeError) as exc:  # no descriptor or thread",
        replace="        except ZeroDivisionError as exc:  # no descriptor or thread",
        killers=(
            f"{_AGENT}::test_agent_without_descriptors_for_an_engine_serves_the_others",
        ),
    ),
    Mutant(
        name="engine_ends_for_want_of_a_thread",
        why="Weights that may have changed while no thread is to be had end the engine.",
        file="ucm/integration/vllm/weights.py",
        find="            with contextlib.suppress(RuntimeError):  # no thread;",
        replace="            with contextlib.suppress(ZeroDivisionError):  # no thread;",
        killers=(
            f"{_WEIGHTS}::test_reading_that_gets_no_thread_begins_in_a_later_step",
        ),
    ),
)
