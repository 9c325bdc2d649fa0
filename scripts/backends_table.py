# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/backends.md, from the settings of each backend."""

from scripts.settings_table import ROOT, put_between, table_of
from ucm.backends._redis_settings import RedisSettings
from ucm.backends.disk import DiskSettings
from ucm.backends.files import FilesSettings
from ucm.backends.memory import MemorySettings
from ucm.backends.mooncake import MooncakeSettings
from ucm.backends.object import ObjectSettings
from ucm.backends.yuanrong import YuanrongSettings

__all__ = ["PAGE", "SECTIONS", "rewrite"]

PAGE = ROOT / "docs" / "backends.md"
SECTIONS = {
    "disk": DiskSettings(),
    "files": FilesSettings(),
    "memory": MemorySettings(),
    "mooncake": MooncakeSettings(),
    "object": ObjectSettings(),
    "redis": RedisSettings(),
    "yuanrong": YuanrongSettings(),
}
"""By the type that a tier is given."""


def rewrite(text: str) -> str:
    """
    Return *text* with each table between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    for name, section in SECTIONS.items():
        text = put_between(text, name, table_of(section))
    return text


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
