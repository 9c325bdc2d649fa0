# SPDX-License-Identifier: Apache-2.0
"""
Saves and loads the KV cache of LLM inference servers.

Importing this package imports values only: no torch, no engine, no event loop. How a
server embeds it is told by ``docs/embedding.md``.
"""

from ucm import blocking
from ucm.awaiting import open  # noqa: A004 - as ``gzip.open`` is
from ucm.blocks import BlockKey, BlockSpan, KeySpace
from ucm.errors import UCMError
from ucm.layout import KVLayout
from ucm.prefixes import (
    Place,
    PrefixHasher,
    keyspace_of,
    paged_layout,
    tenant_of,
)

__all__ = [
    "BlockKey",
    "BlockSpan",
    "KVLayout",
    "KeySpace",
    "Place",
    "PrefixHasher",
    "UCMError",
    "__version__",
    "blocking",
    "keyspace_of",
    "open",
    "paged_layout",
    "tenant_of",
]

__version__ = "0.1.0"
