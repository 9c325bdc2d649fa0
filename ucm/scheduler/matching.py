# SPDX-License-Identifier: Apache-2.0
"""
How much of a request's prefix can be loaded.

A hit over ``L`` tokens needs every block of a ``FULL`` group, the blocks that the
window ending at ``L`` touches of a ``WINDOW`` group, and of a ``STATE`` group the one
block that ends at ``L``, each on every shard; blocks that the engine has computed
itself are not asked for. All shards of a block are asked for together. ``FULL`` groups
bound ``L``, by looks from the front that grow. From there the others walk down: a missing
block rules out every length that needs it, so the walk jumps below the lowest one. Their
look-ups go backwards in batches that double, and are remembered for the call, so that a
call asks for no block twice.

Asking changes nothing, here or in the store: the engine asks again in every step in
which a request waits.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

from ucm.blocks import GroupId, KeyPacker, PackedKey, ShardId
from ucm.errors import LayoutError, StoreBypassedError, StoreUnavailableError
from ucm.fates import Told
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.matches import MatchReason, MissingBlock, PrefixMatch
from ucm.uses import Uses

__all__ = ["BlockIndex", "DeniedKey", "PrefixMatcher"]

_FIRST_LOOK: Final = 32
_GROWTH: Final = 8
_LONGEST_LOOK: Final = 1024
"""Keys of the looks at a prefix, each longer than the one before."""

DeniedKey = tuple[int, bytes]
"""Group id and block hash of a block that must not be loaded."""


class BlockIndex(Protocol):
    """What is asked of a store: which blocks are committed."""

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed. No side effect."""
        ...

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether it is committed. No side effect."""
        ...

    def fates(self, keys: Sequence[PackedKey]) -> list[Told]:
        """Return what has become of blocks; a hint. No side effect."""
        ...

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Mark blocks as used; unknown keys are passed over."""
        ...


class PrefixMatcher:
    """
    Finds the longest prefix whose blocks are all stored.

    Args:
        layout: Groups and their windows.
        index: Which blocks are stored.
        keyspace_digest: Key space of all keys; empty while it is not known.
        shards: Parts of which each block consists; all must be there.
        full_hits: Whether a prompt may hit as a whole. The engine recomputes the last
            token itself where loads are asynchronous; elsewhere one token must be
            left to compute. Never done where the window of the last token begins one
            block before that of the next one: that block is not restored. Nor where a
            group keeps a state: the last token would be applied to it twice.

    Raises:
        LayoutError: No group needs any block of a hit.
    """

    def __init__(
        self,
        layout: KVLayout,
        index: BlockIndex,
        keyspace_digest: bytes,
        shards: Sequence[ShardId],
        *,
        full_hits: bool,
    ) -> None:
        self.layout = layout
        self._full = [each for each in layout.groups if each.kind is GroupKind.FULL]
        self._windows = [each for each in layout.groups if each not in self._full]
        self._index = index
        self.keyspace_digest = self.stored_digest = keyspace_digest
        """The second stays in a doubt: blocks of before are still stored under it."""
        self._stored: dict[GroupId, tuple[bytes, ...]] = {}
        self.reshard(shards)
        self._align = layout.alignment_tokens
        if not any(group.window_blocks(self._align) for group in layout.groups):
            raise LayoutError("a hit would restore no block of any group")
        self._full_hits = full_hits and all(
            group.kind is not GroupKind.STATE
            and (
                group.window_tokens is None
                or (group.window_tokens - 1) % group.block_tokens
            )
            for group in layout.groups
        )

    def rekey(self, keyspace_digest: bytes) -> None:
        """Look up under another key space from now on; without one, find nothing."""
        self.keyspace_digest = keyspace_digest
        self._prefixes = {
            group.group_id: tuple(
                KeyPacker(keyspace_digest, group.group_id, shard).prefix
                for shard in self._shards
            )
            for group in self.layout.groups
            if keyspace_digest
        }
        if keyspace_digest:
            self.stored_digest, self._stored = keyspace_digest, self._prefixes

    def reshard(self, shards: Sequence[ShardId]) -> None:
        """Look for these parts of blocks only: others are known elsewhere."""
        self._shards, self.num_shards = tuple(shards), len(shards)
        self.rekey(self.keyspace_digest)

    def match(
        self,
        num_tokens: int,
        hashes: Sequence[bytes],
        computed_tokens: int,
        denied: Collection[DeniedKey],
    ) -> PrefixMatch:
        """
        Return how many tokens beyond *computed_tokens* can be loaded.

        Args:
            num_tokens: Tokens of the request.
            hashes: The engine's block hashes, as far as it knows them.
            computed_tokens: Tokens that the engine has already.
            denied: Blocks that count as missing whatever the store says.
        """
        top = self.longest(num_tokens, hashes)
        wanted = max(0, top - computed_tokens)
        if not self.keyspace_digest:
            return PrefixMatch(0, MatchReason.UNKEYED, wanted)
        if computed_tokens % self._align:
            return PrefixMatch(0, MatchReason.PARTIAL_BLOCK, wanted)
        if not wanted:
            return PrefixMatch(0, MatchReason.TOO_SHORT)
        try:
            top, missing = self._bound_full(top, hashes, computed_tokens, denied)
            if self._windows:
                top, lower = self._walk_windows(top, hashes, computed_tokens, denied)
                missing = lower or missing
        except StoreBypassedError:
            return PrefixMatch(0, MatchReason.PAUSED, wanted)
        except StoreUnavailableError:
            return PrefixMatch(0, MatchReason.UNAVAILABLE, wanted)
        if top <= computed_tokens:
            return PrefixMatch(0, MatchReason.MISS, wanted, missing)
        return PrefixMatch(top - computed_tokens, MatchReason.HIT, wanted, missing)

    def declined(
        self,
        reason: MatchReason,
        num_tokens: int,
        hashes: Sequence[bytes],
        computed_tokens: int,
        found_tokens: int = 0,
    ) -> PrefixMatch:
        """Return that no more was looked for, and how much might have been found."""
        wanted = max(0, self.longest(num_tokens, hashes) - computed_tokens)
        return PrefixMatch(found_tokens, reason, wanted)

    def within(self, num_tokens: int, computed_tokens: int, loaded: int) -> int:
        """
        Return how many tokens of a request to look at, to load so many at most.

        All of them while no key space is known: nothing is found whatever the limit, and
        that is why.
        """
        if not self.keyspace_digest:
            return num_tokens
        left = 0 if self._full_hits else 1  # to compute
        return min(num_tokens, computed_tokens + loaded + left)

    def longest(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """Return how many tokens a hit may cover at most."""
        limit = min(
            num_tokens if self._full_hits else num_tokens - 1,
            len(hashes) * self.layout.hash_block_tokens,
        )
        return limit // self._align * self._align

    def stored(
        self,
        group: GroupLayout,
        hashes: Sequence[bytes],
        denied: Collection[DeniedKey],
    ) -> list[bool]:
        """
        Return for each block whether all its shards are stored and not denied.

        A store that does not answer has all: saving to it would fail as well.
        """
        try:
            return self._present(group, hashes, denied) if hashes else []
        except StoreUnavailableError:
            return [True] * len(hashes)

    @property
    def is_all_full(self) -> bool:
        """Whether a part of a hit is a hit, as no group has windows or states."""
        return not self._windows

    def keys_of(
        self, group: GroupLayout, hashes: Sequence[bytes], *, are_old: bool = False
    ) -> list[PackedKey]:
        """
        Return the keys of all parts of blocks, side by side.

        None while unkeyed; of blocks that *are_old*, those of before a doubt.
        """
        prefixes = (self._stored if are_old else self._prefixes).get(group.group_id, ())
        keys: list[Any]  # the first block's, then the second's; no call for each
        if len(prefixes) == 1:
            keys = list(map(prefixes[0].__add__, hashes))
        else:
            keys = [prefix + each for each in hashes for prefix in prefixes]
        return keys

    def keys_of_prefix(self, hashes: Sequence[bytes], tokens: int) -> list[PackedKey]:
        """Return the keys of what may be stored of so many tokens, also in a doubt."""
        keys: list[PackedKey] = []
        for group in self.layout.groups:
            stop = tokens // group.block_tokens
            some = self.layout.hashes_of(group, hashes, 0, stop)
            keys += self.keys_of(group, some, are_old=True)
        return keys

    def _bound_full(
        self,
        top: int,
        hashes: Sequence[bytes],
        computed_tokens: int,
        denied: Collection[DeniedKey],
    ) -> tuple[int, MissingBlock | None]:
        """
        Return the longest length up to *top* that every full group allows, and why.

        The first look is a short one: most prompts that are new differ at once.
        """
        missing, num_shards = None, self.num_shards
        for group in self._full:
            size = group.block_tokens
            start, stop, num_keys = computed_tokens // size, top // size, _FIRST_LOOK
            while start < stop:
                end = min(start + max(1, num_keys // num_shards), stop)
                wanted = named = self.layout.hashes_of(group, hashes, start, end)
                if denied:
                    wanted = _before_first(denied, group, named)
                keys = self.keys_of(group, wanted)
                found = self._index.match(keys) // num_shards
                start += found
                if start < end:
                    keys = keys[found * num_shards :][:num_shards]
                    missing = MissingBlock(group, start, named[found], keys)
                    break
                num_keys = min(_GROWTH * num_keys, _LONGEST_LOOK)
            top = start * size // self._align * self._align
            if top <= computed_tokens:
                break
        return top, missing

    def _walk_windows(
        self,
        top: int,
        hashes: Sequence[bytes],
        computed_tokens: int,
        denied: Collection[DeniedKey],
    ) -> tuple[int, MissingBlock | None]:
        """Return the longest length up to *top* that all other groups allow, and why."""

        def missing_of(group: GroupLayout) -> _Missing:
            def look_up(start: int, stop: int) -> list[bool]:
                wanted = self.layout.hashes_of(group, hashes, start, stop)
                return self._present(group, wanted, denied)

            size = group.block_tokens
            return _Missing(look_up, computed_tokens // size, top // size)

        windows = [(group, missing_of(group)) for group in self._windows]
        lacks = None
        while top > computed_tokens:
            for group, missing in windows:
                lowest = missing.lowest_in(group.window_blocks(top))
                if lowest is not None:
                    block_hash = hashes[self.layout.hash_index(group, lowest)]
                    lacks = MissingBlock(group, lowest, block_hash)
                    top = lowest * group.block_tokens // self._align * self._align
                    break
            else:
                break
        return top, lacks

    def _present(
        self,
        group: GroupLayout,
        hashes: Sequence[bytes],
        denied: Collection[DeniedKey],
    ) -> list[bool]:
        present = self._index.contains(self.keys_of(group, hashes))
        if len(self._shards) > 1:
            of_block = itertools.repeat(iter(present), len(self._shards))
            present = list(map(all, zip(*of_block, strict=True)))
        for at, block_hash in enumerate(hashes if denied else ()):
            present[at] &= (group.group_id, block_hash) not in denied
        return present


class _Missing:
    """
    The missing blocks of one group, looked up backwards as needed.

    Args:
        look_up: Tells of blocks ``start`` to ``stop`` whether they are there.
        floor: Blocks below it are computed and never asked for.
        stop: First block that no candidate needs.
    """

    __slots__ = ("_floor", "_known_from", "_look_up", "_missing", "_stop")

    def __init__(
        self, look_up: Callable[[int, int], list[bool]], floor: int, stop: int
    ) -> None:
        self._look_up = look_up
        self._floor = floor
        self._stop = stop
        self._known_from = stop
        self._missing: list[int] = []

    def lowest_in(self, blocks: range) -> int | None:
        """Return the lowest missing block of a range, if there is one."""
        first = max(blocks.start, self._floor)
        if first < self._known_from:
            doubled = 2 * self._known_from - self._stop
            start = max(min(first, doubled), self._floor)
            found = self._look_up(start, self._known_from)
            self._missing[:0] = [
                start + at for at, is_there in enumerate(found) if not is_there
            ]
            self._known_from = start
        at = bisect_left(self._missing, first)
        if at < len(self._missing) and self._missing[at] < blocks.stop:
            return self._missing[at]
        return None


def _before_first(
    denied: Collection[DeniedKey], group: GroupLayout, hashes: Sequence[bytes]
) -> Sequence[bytes]:
    """Return the hashes before the first denied one."""
    for at, block_hash in enumerate(hashes):
        if (group.group_id, block_hash) in denied:
            return hashes[:at]
    return hashes
