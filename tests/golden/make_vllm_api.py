# SPDX-License-Identifier: Apache-2.0
"""
Write what each release of vLLM offers to a connector, and asks of it, as JSON.

Run ``python -m tests.golden.make_vllm_api vllm*.whl > tests/golden/vllm_api.json`` with
the wheels (or unpacked directories) of all releases that are to be supported, or, with
some of them, ``--onto tests/golden/vllm_api.json`` to keep what is written of others.
``ucm.integration.vllm.sources`` reads them, and says what the names are.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from ucm.integration.vllm.sources import read_api

__all__ = ["ranges", "unfold"]


def ranges(versions: list[str], known: list[str]) -> str:
    """Write versions as ranges of those that are known, such as ``1.0-1.2 1.4``."""
    spans: list[list[str]] = []
    for at, version in enumerate(known):
        if version in versions:
            if spans and spans[-1][-1] == known[at - 1]:
                spans[-1].append(version)
            else:
                spans.append([version])
    return " ".join(one[0] if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in spans)


def unfold(text: str, known: list[str]) -> list[str]:
    """Return the versions that ``ranges`` has written."""
    found: list[str] = []
    for span in text.split():
        first, _, last = span.partition("-")
        found += known[known.index(first) : known.index(last or first) + 1]
    return found


def main(wheels: list[str], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """
    Return the versions, oldest first, and what is said of which name in which.

    Args:
        wheels: Wheels, or unpacked ones.
        before: An earlier answer, to which these releases are added.
    """
    apis = _written(before) | dict(read_api(Path(wheel)) for wheel in wheels)
    known = sorted(
        apis, key=lambda version: [int(part) for part in re.findall(r"\d+", version)]
    )
    names: dict[str, dict[str, list[str]]] = {}
    for version in known:
        for name, texts in apis[version].items():
            for text in sorted(texts):
                names.setdefault(name, {}).setdefault(text, []).append(version)
    return {
        "versions": known,
        "names": {
            name: {text: ranges(has, known) for text, has in texts.items()}
            for name, texts in sorted(names.items())
        },
    }


def _written(api: dict[str, Any] | None) -> dict[str, dict[str, set[str]]]:
    """Return what an earlier answer says of each version."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, texts in api["names"].items() if api else ():
        for text, spans in texts.items():
            for version in unfold(spans, api["versions"] if api else []):
                found.setdefault(version, {}).setdefault(name, set()).add(text)
    return found


def dumps(api: dict[str, Any]) -> str:
    """Return JSON with one name to a line."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(texts)}"
        for name, texts in api["names"].items()
    ]
    versions = json.dumps(api["versions"])
    return f'{{"versions": {versions},\n "names": {{\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make_vllm_api")
    parser.add_argument("--onto", type=Path, help="an earlier answer to add to")
    parser.add_argument("wheels", nargs="+")
    given = parser.parse_args()
    earlier = json.loads(given.onto.read_text(encoding="utf-8")) if given.onto else None
    sys.stdout.write(dumps(main(given.wheels, earlier)))
