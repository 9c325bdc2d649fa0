# SPDX-License-Identifier: Apache-2.0
"""
What mkdocs does not do with our pages by itself; it calls these by their names.

Pages are read on their own as well, and then lead to files beside ``docs``. A site has
none of these: there, the file's name stands as it is.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["on_page_markdown", "without_ways_out"]

_ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def without_ways_out(markdown: str, page: str) -> str:
    """
    Return a page whose links to files of the repository are their names.

    Args:
        markdown: The page.
        page: Its place below ``docs``.

    Raises:
        FileNotFoundError: A link leads to a file that is not there.
    """

    def name(match: re.Match[str]) -> str:
        target = posixpath.join("docs", posixpath.dirname(page), match[2])
        target = posixpath.normpath(target)
        if target.startswith("docs/"):
            return match[0]  # mkdocs looks after these
        if not (_ROOT / target).exists():
            raise FileNotFoundError(f"docs/{page} leads to {target}")
        return f"{match[1]} (`{target}`)" if target not in match[1] else match[1]

    return _LINK.sub(name, markdown)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs'
    """Change a page before it is rendered."""
    return without_ways_out(markdown, page.file.src_uri)
