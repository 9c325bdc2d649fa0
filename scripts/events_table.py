# SPDX-License-Identifier: Apache-2.0
"""Write the tables of ``docs/events.md``: what the structured log says, and its keys."""

from scripts.settings_table import ROOT, put_between
from ucm.events import page

__all__ = ["PAGE", "rewrite"]

PAGE = ROOT / "docs" / "events.md"


def rewrite(text: str) -> str:
    """
    Return *text* with its tables made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "events", page())


def main() -> None:
    """Bring the page up to date."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(rewrite(text), encoding="utf-8")


if __name__ == "__main__":
    main()
