# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/comparison.md: rows of docs/benchmarks.md that name a peer."""

from scripts.settings_table import ROOT, put_between

__all__ = ["PAGE", "render", "rewrite"]

PAGE = ROOT / "docs" / "comparison.md"
_BENCHMARKS = ROOT / "docs" / "benchmarks.md"
_PEERS = (
    "LMCache",
    "vLLM",
    "FlexKV",
    "ExampleConnector",
    "file per block",
    "own cache",
)


def render() -> str:
    """Return every target that was set against a peer, those that were missed first."""
    lines = ["| case | what | median | range | target | |", "|---|---|---|---|---|---|"]
    end = ""
    for line in _BENCHMARKS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            end = line.split(":")[0].removeprefix("## Targets ")
        elif end in ("missed", "met") and any(peer in line for peer in _PEERS):
            _, case, what, median, spread, target = line.strip("| ").split(" | ")
            cells = (case, what, median, spread, target, end)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewrite(text: str) -> str:
    """
    Return *text* with the table between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "speed", render())


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
