# SPDX-License-Identifier: Apache-2.0
"""
What a tier is worth by what is admitted to it: hits and writes, over a trace.

A slab as it is (``ucm.replay.policies.Ours``) stands over one tier, which keeps what was put
or fetched last. Three ways to spill::

    all      what is stored in the slab, at once
    again    what is stored in the slab and was stored there before, as far as is remembered
    used     the same, and what is hit in the slab, which an agent cannot see

Beside these, ``all`` where nothing of a prompt below a number of tokens is stored at all.

Run ``python -m benchmarks.admission TRACE.jsonl ...``; shares of a trace's distinct blocks
are the sizes.
"""

import argparse
import json
from collections import OrderedDict
from pathlib import Path

import attrs

from ucm.replay.policies import Ours
from ucm.replay.traces import Request, Trace, read

__all__ = ["WAYS", "Tiered", "main", "measure"]

WAYS = ("all", "again", "used")
_SHORTEST = (2048, 8192, 32768)
"""Tokens of a prompt from which on it is stored."""
_SIZES = ((0.01, 0.1), (0.01, 0.5), (0.02, 0.2), (0.05, 0.2), (0.05, 1.0))
"""Of the slab and of the tier, as shares of the distinct blocks."""
_NAMES = 1 << 20


class Tiered:
    """A slab over a tier."""

    def __init__(
        self, slab: int, tier: int, block_tokens: int, way: str, shortest: int = 0
    ) -> None:
        self.slab = Ours(slab, block_tokens)
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.num_written = 0
        self._most = tier
        self._way = way
        self._shortest = shortest
        self._names: OrderedDict[int, None] = OrderedDict()

    def ask(self, request: Request) -> int:
        """Return how many blocks of a prompt are found; count all as used."""
        blocks = request.blocks
        in_slab = found = self.slab.held(blocks)
        while found < len(blocks) and (
            blocks[found] in self.slab or blocks[found] in self.kept
        ):
            found += 1
        if request.num_tokens < self._shortest:
            blocks = blocks[:found]
            request = attrs.evolve(request, blocks=blocks)
        lacking = [block for block in blocks if block not in self.slab]
        for block in blocks[in_slab:found]:
            if block in self.kept:
                self.kept.move_to_end(block)
        self.slab.use(request, in_slab)
        if self._way == "used":
            self._spill(blocks[:in_slab])
        stored = [block for block in lacking if block in self.slab]
        if self._way == "all":
            self._spill(stored)
            return found
        self._spill([block for block in stored if block in self._names])
        for block in stored:
            self._names[block] = None
            self._names.move_to_end(block)
        while len(self._names) > _NAMES:
            self._names.popitem(last=False)
        return found

    def _spill(self, blocks: "list[int] | tuple[int, ...]") -> None:
        for block in reversed(blocks):
            if block in self.kept:
                continue
            self.kept[block] = None
            self.num_written += 1
            if len(self.kept) > self._most:
                self.kept.popitem(last=False)


def measure(trace: Trace) -> list[dict[str, object]]:
    """Return a row for each size and way."""
    distinct = trace.distinct_blocks()
    rows: list[dict[str, object]] = []
    for slab, tier in _SIZES:
        for way, shortest in (
            *((way, 0) for way in WAYS),
            *(("all", n) for n in _SHORTEST),
        ):
            sizes = int(slab * distinct), int(tier * distinct)
            model = Tiered(*sizes, trace.block_tokens, way, shortest)
            asked = hit = 0
            for request in trace.requests:
                found = model.ask(request) * trace.block_tokens
                asked += request.num_tokens
                hit += min(found, request.num_tokens)
            rows.append(
                {
                    "trace": trace.name,
                    "slab": slab,
                    "tier": tier,
                    "way": f"{way} from {shortest}" if shortest else way,
                    "ratio": round(hit / asked, 4),
                    "written_blocks": model.num_written,
                }
            )
    return rows


def main() -> None:
    """Measure the traces that are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [row for path in given.traces for row in measure(read(path, 512))]
    for row in rows:
        print(*row.values(), sep="\t")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
