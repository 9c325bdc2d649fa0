# SPDX-License-Identifier: Apache-2.0
"""Where slabs of these tests lie."""

from tests.stores.conftest import memory_path

__all__ = ["memory_path"]
