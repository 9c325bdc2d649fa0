# SPDX-License-Identifier: Apache-2.0
"""The default store: one slab of slots, shared by all processes of a node."""

from ucm.stores.slab._compact import Compacted, compact
from ucm.stores.slab._explain import Explanation, explain
from ucm.stores.slab._facts import ClassFacts, SlabFacts, facts_of
from ucm.stores.slab._look import SlabLook, look
from ucm.stores.slab._memory import Mount, is_in_memory, mount_of
from ucm.stores.slab._room import Room
from ucm.stores.slab._store import SlabStore
from ucm.stores.slab._survey import Blocks, ClassSurvey, SlabSurvey
from ucm.stores.slab._verify import Seen, verify

__all__ = [
    "Blocks",
    "ClassFacts",
    "ClassSurvey",
    "Compacted",
    "Explanation",
    "Mount",
    "Room",
    "Seen",
    "SlabFacts",
    "SlabLook",
    "SlabStore",
    "SlabSurvey",
    "compact",
    "explain",
    "facts_of",
    "is_in_memory",
    "look",
    "mount_of",
    "verify",
]
