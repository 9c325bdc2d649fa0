# SPDX-License-Identifier: Apache-2.0
"""Write docs/config.schema.json, the JSON schema of all settings."""

import json

from scripts.settings_table import ROOT
from ucm.configuration.schema import schema

__all__ = ["PATH", "render"]

PATH = ROOT / "docs" / "config.schema.json"


def render() -> str:
    """Return the file's text."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
