# SPDX-License-Identifier: Apache-2.0
"""The default store: one slab of slots, shared by all processes of a node."""

from ucm.stores.slab._explain import Explanation, explain
from ucm.stores.slab._store import SlabStore

__all__ = ["Explanation", "SlabStore", "explain"]
