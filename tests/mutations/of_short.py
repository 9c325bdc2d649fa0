# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is done where descriptors, threads or room run out."""

from tests.mutations.mutant import Mutant

__all__ = ["SHORT"]

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
)
