# SPDX-License-Identifier: Apache-2.0
"""What the accelerator's world is made of: hardware that stands still, and its device."""

from collections.abc import Callable

import attrs

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_digests import SimDigester
from tests.kit.accelerator_streams import SimHardware
from tests.kit.simulation import Simulation
from tests.kit.unreliable import SeededFaults
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Digester
from ucm.layerwise import RowSaves
from ucm.runtime import Runtime
from ucm.testing.faults import FaultDevice

__all__ = ["Parts", "WatchedDevice", "WorldDriver"]

_QUERIES_OF_A_HANG = 200


class WorldDriver(SimulatedDriver):
    """
    A driver of hardware that stands still now and then.

    Args:
        hardware: All devices.
        simulation: Its clock and dice.
        faults: Its odds say how often and how long.
        pins: What host memory can be pinned: ``all``, ``staging`` or ``none``.
        digests: The device computes checksums.
    """

    def __init__(
        self,
        hardware: SimHardware,
        simulation: Simulation,
        faults: SeededFaults,
        *,
        pins: str,
        digests: bool = False,
    ) -> None:
        super().__init__(0, hardware, can_pin=pins != "none")
        self._has_digests = digests
        self._pins = pins
        self._simulation = simulation
        self._troubles = faults
        self._stands_until = 0.0
        self._pace = hardware.pace

    def make_digester(self) -> Digester | None:
        """Return one, if the device has it."""
        return SimDigester(self) if self._has_digests else None

    @property
    def stands_still(self) -> bool:
        """Whether nothing runs, whoever asks."""
        return self._simulation.now < self._stands_until

    def pin(self, address: int, nbytes: int) -> None:
        """Refuse the store's memory, which comes second, where only staging is pinned."""
        if self._pins == "staging" and self.calls["pin"]:
            self.calls["pin"] += 1
            raise OSError("memory of a store cannot be pinned here")
        super().pin(address, nbytes)

    def is_done(self, event: SimEvent) -> bool:
        """Ask the hardware, which may stand still from now on for a while."""
        simulation, odds = self._simulation, self._troubles.odds
        if not self.stands_still and simulation.dice.random() < odds.hang / 20:
            self._troubles.done["hang device"] += 1
            self._stands_until = simulation.now + simulation.dice.choice(odds.hangs)
        if self.stands_still:
            left = self._stands_until - simulation.now
            simulation.sleep(max(left, 1.0) / _QUERIES_OF_A_HANG)
        self.hardware.pace = (0,) if self.stands_still else self._pace
        return super().is_done(event)

    def synchronize(self) -> None:
        """Wait until the hardware goes on, and for all there is."""
        self._simulation.sleep(max(0.0, self._stands_until - self._simulation.now))
        super().synchronize()


class WatchedDevice(FaultDevice):
    """
    A device behind faults, whose driver is gone once the device has let go of it.

    Args:
        inner: The device.
        faults: Met before a copy is taken on.
        driver: The device's.
    """

    def __init__(
        self, inner: AcceleratorDevice, faults: SeededFaults, driver: SimulatedDriver
    ) -> None:
        super().__init__(inner, faults)
        self._accelerator = inner
        self._driver = driver

    def stage(self, nbytes: int, slot_bytes: int) -> str:
        """Forward."""
        return self._accelerator.stage(nbytes, slot_bytes)

    def close(self) -> None:
        """Forward; whatever uses the driver afterwards is a misuse."""
        super().close()
        if self._accelerator._relay is None:
            self._driver.close()


@attrs.frozen(kw_only=True)
class Parts:
    """
    What a world is made of; sabotage replaces one.

    Args:
        driver: Of the device.
        device: On that driver.
        row_saves: Submits the rows of a pass.
        tamper: Called with the runtime before it starts.
    """

    driver: type[WorldDriver] = WorldDriver
    device: type[AcceleratorDevice] = AcceleratorDevice
    row_saves: type[RowSaves] = RowSaves
    tamper: Callable[[Runtime], None] = lambda _: None
