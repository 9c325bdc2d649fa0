# SPDX-License-Identifier: Apache-2.0
"""The default store: one slab of slots, shared by all processes of a node."""

from ucm.stores.slab._explain import Explanation, explain
from ucm.stores.slab._look import SlabLook, look
from ucm.stores.slab._room import Room
from ucm.stores.slab._store import SlabStore

__all__ = ["Explanation", "Room", "SlabLook", "SlabStore", "explain", "look"]
