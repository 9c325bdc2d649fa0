# SPDX-License-Identifier: Apache-2.0
"""Write the table of ``docs/engines.md`` from ``ucm.integration.vllm.compat``."""

from collections.abc import Iterable

from scripts.settings_table import ROOT, put_between
from ucm.integration.vllm.compat import FEATURES, SUPPORTED

__all__ = ["PAGE", "rewrite"]

PAGE = ROOT / "docs" / "engines.md"


def rewrite(text: str) -> str:
    """
    Return *text* with the range and the table between their markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    first, last = (f"{major}.{minor}" for major, minor in SUPPORTED)
    text = put_between(text, "range", f"**vLLM {first} to {last}.**")
    return put_between(text, "differences", "\n".join(_differences()))


def _differences() -> Iterable[str]:
    yield "| since | vLLM has | in older releases ucm |"
    yield "|---|---|---|"
    for feature in sorted(FEATURES.values(), key=lambda one: one.since):
        major, minor = feature.since
        yield f"| {major}.{minor} | {feature.what} | {feature.without} |"


def main() -> None:
    """Bring the page up to date."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(rewrite(text), encoding="utf-8")


if __name__ == "__main__":
    main()
