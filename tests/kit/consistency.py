# SPDX-License-Identifier: Apache-2.0
"""Whether what a scheduler keeps agrees with itself, as it must between any two calls."""

from ucm.errors import LedgerError
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.holds import HoldLedger
from ucm.scheduler.messages import TransferKind
from ucm.scheduler.transfers import OpenTransfers

__all__ = ["validate", "validate_holds", "validate_transfers"]


def validate(adapter: SchedulerAdapter) -> None:
    """
    Compare all that is kept, and see that no request loads and saves at once.

    Raises:
        LedgerError: It does not agree.
    """
    validate_holds(adapter._ledger)
    validate_transfers(adapter._transfers)
    for life in adapter._lives.loading():
        if adapter._ledger.holds_of(life.key):
            raise LedgerError(f"request {life.key[0]} loads and saves at once")


def validate_holds(ledger: HoldLedger) -> None:
    """
    Compare the indexes of a ledger with its holds.

    Raises:
        LedgerError: They disagree.
    """
    holds = ledger._holds
    held = {each for hold in holds.values() for each in hold.block_ids}
    by_life: dict[tuple[str, int], int] = {}
    for transfer_id, hold in holds.items():
        if not hold.ranks_left:
            raise LedgerError(f"transfer {transfer_id}: impossible {hold}")
        for life in hold.lives:
            by_life[life] = by_life.get(life, 0) + 1
        if any(transfer_id not in ledger.readers_of([i]) for i in hold.block_ids):
            raise LedgerError("the indexes of the ledger do not fit its holds")
    nbytes = sum(hold.nbytes for hold in holds.values())
    told = (held, by_life, nbytes, len(holds))
    blocks, lives = set(ledger._by_block), ledger._by_life
    if told != (blocks, lives, ledger.held_nbytes, ledger.num_holds):
        raise LedgerError("the indexes of the ledger do not fit its holds")


def validate_transfers(book: OpenTransfers) -> None:
    """
    Compare the indexes of open tickets with the tickets.

    Raises:
        LedgerError: They disagree.
    """
    orders = [entry.order for entry in book._open.values()]
    saves = [each for each in orders if each.kind is TransferKind.SAVE]
    loads = {each.transfer_id for each in orders if each.kind is TransferKind.LOAD}
    saving = [(order.group_id, key) for order in saves for key in order.split_hashes()]
    known = {(group, key) for group, keys in book.saving.items() for key in keys}
    if len(saving) != len(set(saving)) or set(saving) != known:
        raise LedgerError("two open saves write one block, or the index is off")
    if not loads.issuperset(book.filling.values()):
        raise LedgerError("a block waits for a load that is not open")
