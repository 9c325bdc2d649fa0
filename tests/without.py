# SPDX-License-Identifier: Apache-2.0
"""
Skips test modules whose imports a Python cannot have, by name: ``-p tests.without``.

``scripts/pythons`` says so where there is no torch for one. Everywhere else a module that
cannot be imported is an error.
"""

import importlib.util
from collections.abc import Generator

import pytest

_LACKING = [
    name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None
]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Say which package a module needs, if that is why it cannot be imported."""
    report = yield
    told = str(report.longrepr)
    for name in _LACKING:
        if report.failed and f"No module named '{name}'" in told:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: there is no {name}")
    return report
