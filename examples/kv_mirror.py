# SPDX-License-Identifier: Apache-2.0
r"""
Mirror what an engine holds, above and below: a subscriber of its KV events.

Start the engine with events, and ask ucm for its own::

    vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true,
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}' \
      --kv-transfer-config '{..., "kv_connector_extra_config": {"kv_events": "node"}}'

    python examples/kv_mirror.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

It prints how many blocks are where, and how many of the tokens of a prompt could be reused
from each place (``--prompt 1,2,3``). A router asks just that of each engine's mirror.
"""

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

_END = (-1).to_bytes(8, "big", signed=True)


class Place(NamedTuple):
    """Where a block is: the engine's own memory, or a tier below it."""

    medium: str
    """The engine's word: GPU, CPU or STORAGE."""
    name: str
    """Ours: slab, disk, redis ...; empty: the engine's own."""
    group: int


class Block(NamedTuple):
    """What a block holds; no tokens: nobody has said so yet."""

    parent: Any
    tokens: tuple[int, ...]
    lora: str | None


class Mirror:
    """
    What one publisher has told.

    Args:
        replay: Returns the batches from a number on that the publisher still has.
    """

    def __init__(self, replay: Any = None) -> None:
        self.places: dict[Place, dict[Any, Block]] = {}
        self.next_number = 0
        self.num_lost = 0
        """Batches that are gone for good: the mirror may be wrong until all is told anew."""
        self.num_cleared = 0
        """How often the engine has emptied its own cache."""
        self._replay = replay
        self._last: bytes | None = None

    def take(self, number: int, payload: bytes) -> None:
        """Take a batch as it was published; those that were missed are asked for."""
        if number < self.next_number:  # the engine has started again, and holds nothing
            self.places.clear()
            self.next_number, self._last = 0, None
        if number > self.next_number:
            for earlier, batch in self._missed():
                if self.next_number <= earlier < number:
                    self.num_lost += earlier - self.next_number
                    self._apply(batch)
                    self.next_number = earlier + 1
            self.num_lost += number - self.next_number
        self._apply(payload)
        self._last, self.next_number = payload, number + 1

    def _missed(self) -> Sequence[tuple[int, bytes]]:
        """Return what the publisher still has, all of it where it is another by now."""
        if self._replay is None:
            return ()
        last = self.next_number - 1
        found = list(self._replay(max(0, last)))
        if self._last not in (None, dict(found).get(last, self._last)):
            self.places.clear()  # what it said by this number is not what we heard
            self.next_number, self._last = 0, None
            return list(self._replay(0))
        return found

    def _apply(self, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":  # what is below is told anew behind it
                self.places.clear()
                self.num_cleared += 1
                continue
            name, group = event.get("ownership") or "", event.get("group_idx") or 0
            place = Place(event.get("medium") or "GPU", name, group)
            blocks = self.places.setdefault(place, {})
            if kind == "BlockStored":
                blocks.update(_blocks(event))
            else:
                for block_hash in event["block_hashes"]:
                    blocks.pop(block_hash, None)

    def count(self) -> Counter[Place]:
        """Return how many blocks are where."""
        return Counter({place: len(blocks) for place, blocks in self.places.items()})

    def reusable(
        self, tokens: Sequence[int], lora: str | None = None
    ) -> dict[Place, int]:
        """Return how many tokens from the start of a prompt each place has."""
        return {
            place: _reusable(blocks, tokens, lora)
            for place, blocks in self.places.items()
        }


def _blocks(event: dict[str, Any]) -> Iterator[tuple[Any, Block]]:
    size, tokens = event["block_size"], event["token_ids"]
    parent = event.get("parent_block_hash")
    for at, block_hash in enumerate(event["block_hashes"]):
        held = tuple(tokens[at * size : (at + 1) * size])
        yield block_hash, Block(parent, held, event.get("lora_name"))
        parent = block_hash


def _reusable(blocks: dict[Any, Block], tokens: Sequence[int], lora: str | None) -> int:
    chain = {
        (block.parent, block.tokens): block_hash
        for block_hash, block in blocks.items()
        if block.tokens and block.lora == lora
    }
    sizes = {len(held) for _, held in chain}
    found, last = 0, None
    while sizes:
        for size in sizes:
            following = chain.get((last, tuple(tokens[found : found + size])))
            if following is not None:
                found, last = found + size, following
                break
        else:
            break
    return found


class Subscription:
    """
    Batches of one publisher, with those that it keeps for who comes late.

    Args:
        endpoint: Where it publishes.
        replay_endpoint: Where it is asked for earlier ones; empty: nowhere.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self.mirror = Mirror(self._replayed)

    def follow(self, seconds: float) -> None:
        """Take what comes within a time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                _, number, payload = self._socket.recv_multipart()
                self.mirror.take(int.from_bytes(number, "big"), payload)

    def catch_up(self) -> None:
        """Take all that the publisher still has: what it told before we listened."""
        for number, payload in self._replayed(self.mirror.next_number):
            self.mirror.take(number, payload)

    def _replayed(self, start: int) -> Iterator[tuple[int, bytes]]:
        if not self._replay_endpoint:
            return
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            while socket.poll(5000):
                _, _, number, payload = socket.recv_multipart()
                if number == _END:
                    return
                yield int.from_bytes(number, "big"), payload

    def close(self) -> None:
        """Hear no more."""
        self._context.destroy(linger=0)


def main() -> None:
    """Print what is where, until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("endpoint")
    parser.add_argument("replay_endpoint", nargs="?", default="")
    parser.add_argument("--prompt", help="token ids, with commas between them")
    parser.add_argument("--seconds", type=float, default=5.0, help="between two lines")
    arguments = parser.parse_args()
    prompt = [int(word) for word in (arguments.prompt or "").split(",") if word]
    subscription = Subscription(arguments.endpoint, arguments.replay_endpoint)
    subscription.catch_up()
    while True:
        subscription.follow(arguments.seconds)
        reusable = subscription.mirror.reusable(prompt)
        for place, count in sorted(subscription.mirror.count().items()):
            words = f"{place.medium:8}{place.name or 'engine':8}group {place.group}"
            print(f"{words}: {count} blocks, {reusable[place]} tokens of the prompt")
        print(f"lost batches: {subscription.mirror.num_lost}", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
