# SPDX-License-Identifier: Apache-2.0
"""Where slabs of these tests lie."""

from tests.stores.conftest import disk_path, memory_path

__all__ = ["disk_path", "memory_path"]
