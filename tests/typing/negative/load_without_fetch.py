# SPDX-License-Identifier: Apache-2.0
"""A load that scatters what was never verified is no chain."""

from ucm.devices.abc import Device
from ucm.pipeline.load import Scatter
from ucm.pipeline.save import EventWait
from ucm.pipeline.stage import Chain
from ucm.stores.abc import Store


def load(store: Store, device: Device) -> None:
    """Leave out ``Fetch``."""
    Chain.start(EventWait()).then(Scatter(store, device))  # error: arg-type
