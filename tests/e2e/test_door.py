# SPDX-License-Identifier: Apache-2.0
"""The connector passes what every door passes, in each way of loading."""

from tests.e2e.vllm_door import VLLMDoor
from ucm.testing.door_contract import Door, DoorContract


class TestDirect(DoorContract):
    """R-81: loads beside the engine's steps."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return VLLMDoor()
