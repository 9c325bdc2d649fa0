# SPDX-License-Identifier: Apache-2.0
"""The door to transformers: what its models keep of prompts, restored by prefix."""

from ucm.integration.transformers.awaiting import PromptCache
from ucm.integration.transformers.dynamic import BlockingPromptCache, Restored

__all__ = ["BlockingPromptCache", "PromptCache", "Restored"]
