# SPDX-License-Identifier: Apache-2.0
"""
Write the table of ``docs/features.md``: features of the engine, and what ucm makes of them.

A row without a proof says "not run" or "read only"; a test sees that every proof exists.
"""

import enum
from collections.abc import Iterable

import attrs

from scripts.settings_table import ROOT, put_between

__all__ = ["FEATURES", "PAGE", "Feature", "Verdict", "rewrite"]

PAGE = ROOT / "docs" / "features.md"


class Verdict(enum.Enum):
    """What ucm makes of a feature of the engine."""

    HANDLED = "handled"
    FALLS_BACK = "falls back"
    """Blocks move in a simpler way than was asked for."""
    REFUSED = "refused by name"
    NOT_RUN = "not run"
    """Nothing in it is known to be wrong, and nothing is proven on an engine."""


@attrs.frozen
class Feature:
    """
    One feature of the engine.

    Args:
        name: In the engine's words.
        verdict: What ucm makes of it.
        says: What a user has to know; a sentence or two.
        proofs: Tests, as ``file::Class::test`` below ``tests``; a file alone stands for
            all of it.
    """

    name: str
    verdict: Verdict
    says: str
    proofs: tuple[str, ...] = ()


FEATURES: tuple[Feature, ...] = ()
"""In the order of the page."""


def rewrite(text: str) -> str:
    """
    Return *text* with its table made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "features", "\n".join(_table()))


def _table() -> Iterable[str]:
    yield "| feature | ucm | what it means | proven by |"
    yield "|---|---|---|---|"
    for one in FEATURES:
        proofs = ", ".join(f"`{proof}`" for proof in one.proofs) or "nothing"
        yield f"| {one.name} | {one.verdict.value} | {one.says} | {proofs} |"


def main() -> None:
    """Bring the page up to date."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(rewrite(text), encoding="utf-8")


if __name__ == "__main__":
    main()
