# SPDX-License-Identifier: Apache-2.0
"""
The verbs of a cache that ask its store, and move no bytes.

Threading: any thread; nothing blocks.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from ucm.blocks import KeySpace, PackedKey
from ucm.cache.orders import Orders
from ucm.cache.pending import Pending
from ucm.cache.questions import Questions
from ucm.errors import PipelineClosedError
from ucm.prefixes import Place
from ucm.stores.abc import Store
from ucm.threads import Threads

__all__ = ["Asking"]

_LONGEST_TTL_S = 86400.0
_T = TypeVar("_T")


class Asking:
    """
    A cache, as far as it is asked.

    Args:
        store: That is asked.
        orders: Know keys and sizes.
        questions: Where it is asked.
        threads: Where the clock comes from.
    """

    def __init__(
        self, store: Store, orders: Orders, questions: Questions, threads: Threads
    ) -> None:
        self._store = store
        self._orders = orders
        self._questions = questions
        self._threads = threads
        self._is_open = False

    def match(self, keys: Sequence[bytes], *, group: int) -> Pending[int]:
        """Ask how many keys from the first are stored."""
        return self._ask(self._store.match, keys, group)

    def contains(self, keys: Sequence[bytes], *, group: int) -> Pending[list[bool]]:
        """Ask of each key whether it is stored."""
        return self._ask(self._store.contains, keys, group)

    def touch(
        self, keys: Sequence[bytes], *, group: int, place: Place
    ) -> Pending[None]:
        """Say that blocks are used."""
        return self._touch(keys, group, place, self._now_ns())

    def retain(
        self, keys: Sequence[bytes], *, ttl: float, group: int, place: Place
    ) -> Pending[None]:
        """Keep blocks as if they were used in *ttl* seconds; see ``Cache.retain``."""
        ttl = float(ttl)  # small numbers of numpy's would overflow
        if not 0 < ttl <= _LONGEST_TTL_S:
            raise ValueError(f"ttl={ttl} is not above 0 and at most {_LONGEST_TTL_S} s")
        place = attrs.evolve(place, began_ns=0)
        return self._touch(keys, group, place, self._now_ns() + int(ttl * 1e9))

    def describe(self, keyspace: KeySpace) -> Pending[None]:
        """Have the text of a key space kept beside the blocks, for people."""
        return self._questions.ask(lambda: self._store.describe(keyspace))

    def _touch(
        self, keys: Sequence[bytes], group: int, place: Place, now_ns: int
    ) -> Pending[None]:
        uses = self._orders.uses(len(keys), group, place, now_ns)
        return self._ask(lambda packed: self._store.touch(packed, uses), keys, group)

    def _check_open(self) -> None:
        if not self._is_open:
            raise PipelineClosedError(self._questions.why_closed)

    def _now_ns(self) -> int:
        return int(self._threads.monotonic() * 1e9)

    def _ask(
        self,
        question: Callable[[list[PackedKey]], _T],
        keys: Sequence[bytes],
        group: int,
    ) -> Pending[_T]:
        """Ask the store about keys, which are checked here and packed there."""
        self._check_open()
        packer, own = self._orders.packer(keys, group), tuple(keys)
        return self._questions.ask(lambda: question(packer.pack(own)))
