# SPDX-License-Identifier: Apache-2.0
"""
Blocks on drives of this machine, in slots of preallocated files.

``_stamp`` says what is on a drive and why a death at any point is harmless; ``_slots`` is the
index, of what ``_extent`` has, which ``_keeping`` makes and writes down, as ``_index`` says;
``_drive`` moves bytes; ``_backend`` has the verbs, ``_settings`` what they are set to.
"""

from ucm.backends.disk._backend import DiskBackend
from ucm.backends.disk._settings import DiskSettings

__all__ = ["DiskBackend", "DiskSettings"]
