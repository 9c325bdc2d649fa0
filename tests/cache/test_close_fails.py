# SPDX-License-Identifier: Apache-2.0
"""A cache whose store or device cannot be closed, such as a slab whose lock somebody keeps."""

import pytest

from tests.cache.kit import Host, keys_of, our_threads
from ucm.cache.sync import Cache
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceError, StoreUnavailableError
from ucm.testing.faults import Fault, FaultPlan, Gate


@pytest.mark.parametrize("failing", ["store", "device"])
def test_close_that_fails_tells_everybody_and_closes_the_rest(failing: str) -> None:
    """Who waits for a save hears of its end, and not of a deadline minutes away."""
    gate, device = Gate(), CPUDevice()
    host = Host(FaultPlan(Fault("commit", gate)), make_device=lambda: device)
    cache = Cache(*host.open_core())
    save = cache.save(keys_of(2), range(2))
    gate.wait_reached()
    host.core.fetches.close = gate.open  # so that it ends amid the close
    parts = {"store": host.store, "device": device}
    told = []

    def close() -> None:
        told.append(save.is_over)  # also while it is waited for
        raise StoreUnavailableError("held too long")

    parts.pop(failing).close = close
    with pytest.raises(StoreUnavailableError, match="held too long"):
        cache.close()
    assert [True] == told
    assert set() == our_threads()
    uses = {"store": host.store.stats, "device": device.lease}
    for rest in parts:
        with pytest.raises((DeviceError, StoreUnavailableError), match="closed"):
            uses[rest]()
