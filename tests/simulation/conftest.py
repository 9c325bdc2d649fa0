# SPDX-License-Identifier: Apache-2.0
"""The tests here import the engine's modules."""

import tests.engine_imports  # noqa: F401 - its import is what counts
