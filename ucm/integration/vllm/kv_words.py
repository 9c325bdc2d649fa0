# SPDX-License-Identifier: Apache-2.0
"""What the node's ledger tells, in the words of the engine's KV events, and what requests say."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ucm.agent.joining import check_records
from ucm.agent.mirror import News, Said
from ucm.config import KVEvents, UCMConfig
from ucm.errors import ConfigError
from ucm.layout import KVLayout

__all__ = ["EventWords", "GroupWords", "check_events", "contents", "group_words"]

_LOCAL: Final = ("slab", "disk", "memory")
_MOST_MERGED: Final = 64
"""Blocks of one event."""


class GroupWords(NamedTuple):
    """
    What events say of a group.

    Args:
        block_tokens: Tokens of a block.
        kind: The engine's word for its kind of attention.
        window: Tokens that it sees, where it slides.
    """

    block_tokens: int
    kind: str | None = None
    window: int | None = None


def group_words(kv_cache_config: Any, layout: KVLayout) -> tuple[GroupWords, ...]:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Return what events say of each group, by number."""
    from vllm.v1 import kv_cache_interface as words

    kind_of = getattr(words, "get_kv_cache_spec_kind", None)
    window_of = getattr(words, "get_kv_cache_spec_sliding_window", None)
    found = [GroupWords(0) for _ in kv_cache_config.kv_cache_groups]
    for group in layout.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        kind = None if kind_of is None else kind_of(spec).value
        window = None if window_of is None else window_of(spec)
        found[group.group_id] = GroupWords(group.block_tokens, kind, window)
    return tuple(found)


def contents(
    request: Any,  # noqa: ANN401 - vLLM's Request
    block_tokens: int,
    hashes: Sequence[bytes],
) -> Iterator[Said]:
    """
    Yield what blocks of a request hold, as far as they are whole.

    Args:
        request: On any thread: what is read of it only grows.
        block_tokens: Tokens of a block.
        hashes: The engine's, of blocks from the first one on.
    """
    adapter = request.lora_request
    number = None if adapter is None else adapter.adapter_id
    name = None if adapter is None else adapter.name
    extra_of = _Extra(request)
    parent = None
    for at, block_hash in enumerate(hashes):
        start, stop = at * block_tokens, (at + 1) * block_tokens
        tokens = request.all_token_ids[start:stop]
        extra = extra_of(start, stop)
        yield Said(block_hash, parent, tokens, number, name, extra)
        parent = block_hash


class _Extra:
    """What goes into the hashes of a request's blocks beside tokens, as events say it."""

    def __init__(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request
        from vllm.v1.core import kv_cache_utils as utils

        self._request = request
        self._image = 0
        self._generate = utils.generate_block_hash_extra_keys
        self._untagged = getattr(utils, "to_event_extra_keys", list)
        self._has_any = any(
            getattr(request, name, None)
            for name in ("mm_features", "lora_request", "cache_salt")
        ) or (getattr(request, "prompt_embeds", None) is not None)

    def __call__(self, start: int, stop: int) -> list[object] | None:
        """Return it of the tokens *start* to *stop*; to be asked in order."""
        if not self._has_any:
            return None
        keys, self._image = self._generate(self._request, start, stop, self._image)
        if keys is None:
            return None
        return list(self._untagged([keys])[0])


class EventWords:
    """
    Makes the engine's events.

    Args:
        groups: By number.
    """

    def __init__(self, groups: Sequence[GroupWords]) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._groups = groups
        self._stored = kv_events.BlockStored
        self._removed = kv_events.BlockRemoved
        self._hash = maybe_convert_block_hash
        self._owners: Sequence[str] = ("slab",)

    def joined(self, tiers: Sequence[str]) -> None:
        """Take note of the tiers that there are: their words for themselves."""
        names = ["slab", *tiers]
        self._owners = [
            f"{name}.{names[:at].count(name)}" if name in names[:at] else name
            for at, name in enumerate(names)
        ]

    def events(self, news: Iterable[News]) -> list[Any]:
        """Return what is told of blocks that came and went, in order."""
        events = []
        run: list[News] = []
        for one in news:
            if run and not _goes_on(run, one):
                events.append(self._event(run))
                run = []
            run.append(one)
        if run:
            events.append(self._event(run))
        return events

    def _event(self, run: Sequence[News]) -> Any:  # noqa: ANN401 - vLLM's KVCacheEvent
        first = run[0]
        hashes = [self._hash(one.block_hash) for one in run]
        owner = self._owners[first.medium]
        where = {
            "medium": "STORAGE" if first.medium else "CPU",
            "group_idx": first.group,
            "locality": "LOCAL" if owner.partition(".")[0] in _LOCAL else "REMOTE",
            "ownership": owner,
        }
        if not first.is_stored:
            return _make(self._removed, block_hashes=hashes, **where)
        said = [one.said for one in run if one.said is not None]
        if not said:
            return self._bare(hashes, where)
        words, parent = self._groups[first.group], said[0].parent
        extra = [None if one.extra is None else tuple(one.extra) for one in said]
        return _make(
            self._stored,
            block_hashes=hashes,
            parent_block_hash=None if parent is None else self._hash(parent),
            token_ids=[token for one in said for token in one.tokens],
            block_size=words.block_tokens,
            lora_id=said[0].lora_id,
            lora_name=said[0].lora_name,
            extra_keys=extra if any(extra) else None,
            kv_cache_spec_kind=words.kind,
            kv_cache_spec_sliding_window=words.window,
            **where,
        )

    def _bare(self, hashes: list[Any], where: dict[str, Any]) -> Any:  # noqa: ANN401 - vLLM's KVCacheEvent
        """Tell of blocks of which nobody has said what they hold, as the engine does."""
        return _make(
            self._stored,
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            lora_name=None,
            **where,
        )


def _goes_on(run: Sequence[News], one: News) -> bool:
    """Return whether one event tells of both: blocks of a chain, or that went."""
    last = run[-1]
    if (last.medium, last.group, last.is_stored) != (
        one.medium,
        one.group,
        one.is_stored,
    ):
        return False
    if len(run) >= _MOST_MERGED:
        return False
    if not one.is_stored:
        return True
    if last.said is None or one.said is None:
        return last.said is one.said
    is_next = one.said.parent == last.said.block_hash
    return is_next and one.said.lora_name == last.said.lora_name


def _make(event: Any, **said: Any) -> Any:  # noqa: ANN401 - vLLM's struct and its fields
    """Make an event of what this release's events can say."""
    return event(
        **{name: said[name] for name in said if name in event.__struct_fields__}
    )


def check_events(config: UCMConfig, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """
    Refuse events that nobody would hear, or that no store keeps a record of.

    Raises:
        ConfigError: The engine publishes none, or the store is no slab.
    """
    if config.kv_events is KVEvents.OFF:
        return
    check_records(config)
    engines = getattr(vllm_config, "kv_events_config", None)
    if engines is None or not engines.enable_kv_cache_events:
        raise ConfigError(
            "kv_events",
            config.kv_events.value,
            "the engine publishes no KV events",
            "Add --kv-events-config '{\"enable_kv_cache_events\": true}', or leave it out.",
        )
