# SPDX-License-Identifier: Apache-2.0
"""``ucm store``: what lies in a slab, and looking after it, while engines use it."""

from typing import Final

import click

from ucm.cli.lazy import Lazy
from ucm.cli.telling import examples

__all__ = ["store"]

_PARTS: Final = {
    "ls": "ucm.cli.store.look:ls",
    "stat": "ucm.cli.store.look:stat",
    "verify": "ucm.cli.store.look:verify",
    "compact": "ucm.cli.store.change:compact",
    "rm": "ucm.cli.store.change:rm",
    "export": "ucm.cli.store.move:export",
    "import": "ucm.cli.store.move:import_",
    "warm": "ucm.cli.store.move:warm",
}


@click.command(cls=Lazy, places=_PARTS, epilog=examples("ucm store ls /dev/shm/ucm"))
def store() -> None:
    """
    See what lies in a slab, and look after it, while engines use it.

    PATH is the slab's directory (store.path). Nothing is made there, and a directory that
    has no slab of ours is left as it is. Exit codes: 0 done; 1 something is damaged, or
    was left undone; 2 the call is wrong; 3 what was named cannot be read.
    """
