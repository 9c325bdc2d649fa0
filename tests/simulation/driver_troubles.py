# SPDX-License-Identifier: Apache-2.0
"""A driver of a simulated accelerator, one call of which fails."""

import enum
from collections.abc import Callable
from typing import Any

import torch

from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_digests import SimDigester
from tests.kit.accelerator_streams import SimHardware
from tests.simulation.contents import BLOCK_BYTES, NUM_BLOCKS
from ucm.devices.driver import Digester

__all__ = ["HANG_S", "Trouble", "TroubledDriver"]

HANG_S = 4.0
"""Longer than a copy is waited for; see ``driver_world``."""
_VERBS = (
    *(
        "bind_thread",
        "copy",
        "current_index",
        "current_stream",
        "device_index",
        "handle",
    ),
    *("is_capturing", "is_done", "make_digester", "make_event", "make_stream", "pin"),
    *("record", "synchronize", "unpin", "wait"),
)
"""All but ``make_current``: who cannot be given its own device back has another one."""


class Trouble(enum.Enum):
    """How a call fails."""

    ERROR = "it does nothing, and says so; every second one, that there is no memory"
    LATE = "it does what it is to, and tells of an error"
    STICKY = "the device fails"
    HANG = "it stands still"


class TroubledDriver(SimulatedDriver):
    """
    A driver that notes its calls, one of which fails.

    Args:
        hardware: All devices.
        pins: What host memory can be pinned: ``all``, with which it computes digests, or
            ``staging``.
        nth: Which call fails, from 1; none if 0.
        trouble: How.
        sleep: Lets seconds pass.
    """

    def __init__(
        self,
        hardware: SimHardware,
        pins: str,
        nth: int,
        trouble: Trouble,
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(0, hardware)
        self.verbs: list[str] = []
        self._pins, self._nth, self._trouble, self._sleep = pins, nth, trouble, sleep

    @property
    def failing(self) -> str:
        """The call that failed; empty before."""
        return "".join(self.verbs[self._nth - 1 : self._nth])

    def make_digester(self) -> Digester | None:
        """Return one where memory is pinned."""
        return SimDigester(self) if self._pins == "all" else None

    def pin(self, address: int, nbytes: int) -> None:
        """Refuse the store's memory, which is no staging memory."""
        if self._pins == "staging" and nbytes == NUM_BLOCKS * BLOCK_BYTES:
            raise OSError("memory of a store cannot be pinned here")
        super().pin(address, nbytes)

    def meet(self, verb: str) -> bool:
        """Note a call, and fail if it is the one; return whether to fail behind it."""
        self.verbs.append(verb)
        if len(self.verbs) != self._nth:
            return False
        if self._trouble is Trouble.ERROR:
            raise (RuntimeError, torch.OutOfMemoryError)[self._nth % 2](verb)
        if self._trouble is Trouble.STICKY:
            self.fail(verb)
        elif self._trouble is Trouble.HANG:
            self._sleep(HANG_S)
        return self._trouble is Trouble.LATE


def _troubled(verb: str) -> Callable[..., Any]:
    plain = getattr(TroubledDriver, verb)

    def call(self: TroubledDriver, *args: object, **more: object) -> object:
        is_late = self.meet(verb)
        result = plain(self, *args, **more)
        if is_late:
            raise RuntimeError("an earlier launch failed")
        return result

    return call


for _verb in _VERBS:
    setattr(TroubledDriver, _verb, _troubled(_verb))
