# SPDX-License-Identifier: Apache-2.0
"""What pages have of the code is what the code says; the engine's page is held in ``test_compat``."""

import pytest

from scripts.pages import PAGES, read, rewrite


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"engines.md"}))
def test_page_is_what_the_code_says(page: str) -> None:
    """S4-32: tables are written by the script, not by hand: all settings with their
    defaults, metrics, events, modes, features and commands that there are, and no other."""
    text = read(page)
    assert rewrite(page, text) == text, "Run: python -m scripts.pages"
