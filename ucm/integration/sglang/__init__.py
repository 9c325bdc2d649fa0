# SPDX-License-Identifier: Apache-2.0
"""Doors to SGLang: a ``UnifiedCacheLinker`` and a ``HiCacheStorage``."""
