# SPDX-License-Identifier: Apache-2.0
"""The page of backends tells what the code says."""

import re
import tomllib
from importlib import metadata

from scripts.pages import BACKENDS, ROOT, read


class TestPage:
    def test_every_type_is_registered_and_described(self):
        """What can be configured has a section, and what has one can be configured."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        points = project["entry-points"]["ucm.backends"]
        text = read("backends.md")
        types = set(re.findall(r"(?m)^## (\w+)$", text)) - {"Measured"}
        assert set(points) == set(BACKENDS) == types
        for name, value in points.items():
            point = metadata.EntryPoint(name, value, "ucm.backends")
            assert callable(point.load().open_configured)

    def test_every_client_is_an_extra(self):
        """What a missing package tells to install can be installed."""
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        text = read("backends.md")
        clients = {"mooncake", "object", "redis", "yuanrong"}
        assert clients <= set(extras)
        assert clients == set(re.findall(r"'\.\[(\w+)\]'", text))
