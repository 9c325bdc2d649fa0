# SPDX-License-Identifier: Apache-2.0
"""Both chains type-check with each stage in its place, fused or not."""

from typing import assert_type

from ucm.devices.abc import Device
from ucm.pipeline.load import Fetch, Publish, Scatter, ScatterWait
from ucm.pipeline.save import (
    Commit,
    EventWait,
    Finished,
    Gather,
    GatherWait,
    Queued,
    Transfer,
)
from ucm.pipeline.stage import Chain
from ucm.stores.abc import Store


def save(store: Store, device: Device) -> Chain[Queued, Finished]:
    """Build the save chain of an asynchronous device."""
    begun = Chain.start(EventWait()).then(Gather(store, device))
    done = begun.then(GatherWait()).then(Transfer()).then(Commit())
    assert_type(done, Chain[Queued, Finished])
    return done


def load(store: Store, device: Device) -> Chain[Queued, Finished]:
    """Build the load chain of an asynchronous device."""
    fetched = Chain.start(EventWait()).then(Fetch(store))
    scattered = fetched.then(Scatter(store, device)).then(ScatterWait())
    return scattered.then(Publish(store, device))
