# SPDX-License-Identifier: Apache-2.0
"""Mutants of what was made to cost less."""

from tests.mutations.mutant import Mutant

__all__ = ["COST"]

_HOLDS = "ucm/scheduler/holds.py"
_LEDGER = "tests/scheduler/test_holds.py::TestHoldLedger"
_TRANSFERS = "ucm/scheduler/transfers.py"
_OPENED = "tests/scheduler/test_transfers.py::TestOpenTransfers"

COST = (
    Mutant(
        name="second_reader_hides_the_first",
        why="A block is overwritten while the first of two saves still reads it.",
        file=_HOLDS,
        find="            self._shadowed.update(",
        replace="            set().update(",
        killers=(f"{_LEDGER}::test_blocks_read_by_two_tickets_count_once",),
    ),
    Mutant(
        name="second_reader_takes_the_block_along",
        why="A block that is still read is not counted as held.",
        file=_HOLDS,
        find="                held.setdefault(block_id, other)\n",
        replace="                pass\n",
        killers=(f"{_LEDGER}::test_block_stays_held_by_the_first_of_two_tickets",),
    ),
    Mutant(
        name="block_twice_in_a_ticket",
        why="A ticket that names a key twice fails, and with it all its blocks.",
        file=_TRANSFERS,
        find=" or len(set(hashes)) < len(hashes):",
        replace=":",
        killers=(f"{_OPENED}::test_block_twice_in_a_run_is_saved_once",),
    ),
)
