# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/metrics.md: every metric, from ``ucm.metric_names``."""

from scripts.settings_table import ROOT, put_between
from ucm.metric_names import METRICS

__all__ = ["PAGE", "render", "rewrite"]

PAGE = ROOT / "docs" / "metrics.md"


def render() -> str:
    """Return the table: one line for each metric, in the order of their table."""
    lines = ["| metric | kind | labels | says |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"
        )
    return "\n".join(lines)


def rewrite(text: str) -> str:
    """
    Return *text* with the table between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "metrics", render())


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
