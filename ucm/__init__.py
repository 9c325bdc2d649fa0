# SPDX-License-Identifier: Apache-2.0
"""
Saves and loads the KV cache of LLM inference servers.

Importing this package imports values only: no torch, no engine, no event loop.
"""

from ucm.blocks import BlockKey, BlockSpan, KeySpace
from ucm.errors import UCMError

__all__ = ["BlockKey", "BlockSpan", "KeySpace", "UCMError", "__version__"]

__version__ = "0.1.0"
