# SPDX-License-Identifier: Apache-2.0
"""A save that commits what was never sealed is no chain."""

from ucm.devices.abc import Device
from ucm.pipeline.save import Commit, EventWait, Gather
from ucm.pipeline.stage import Chain
from ucm.stores.abc import Store


def save(store: Store, device: Device) -> None:
    """Leave out ``Transfer``."""
    gathered = Chain.start(EventWait()).then(Gather(store, device))
    gathered.then(Commit())  # error: arg-type
