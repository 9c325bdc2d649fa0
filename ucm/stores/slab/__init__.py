# SPDX-License-Identifier: Apache-2.0
"""The default store: one slab of slots, shared by all processes of a node."""

from ucm.stores.slab._look import SlabLook, look
from ucm.stores.slab._room import Room
from ucm.stores.slab._store import SlabStore

__all__ = ["Room", "SlabLook", "SlabStore", "look"]
