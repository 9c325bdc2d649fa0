# SPDX-License-Identifier: Apache-2.0
"""A load that publishes before it scatters is no chain."""

from ucm.devices.abc import Device
from ucm.pipeline.load import Fetch, Publish
from ucm.pipeline.save import EventWait
from ucm.pipeline.stage import Chain
from ucm.stores.abc import Store


def load(store: Store, device: Device) -> None:
    """Publish too early."""
    fetched = Chain.start(EventWait()).then(Fetch(store))
    fetched.then(Publish(store, device))  # error: arg-type
