# SPDX-License-Identifier: Apache-2.0
"""The connector passes what every door passes."""

from tests.e2e.vllm_door import VLLMDoor
from ucm.testing.door_contract import Door, DoorContract


class TestDirect(DoorContract):
    """R-81, S2-05: a full store keeps what was used last; loads go beside the steps."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the engine of the small Llama."""
        return VLLMDoor()
