# SPDX-License-Identifier: Apache-2.0
"""What the simulated accelerator finds out, and how it fails."""

import attrs
import numpy as np
import pytest

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_kit import (
    OLD,
    PAGE_BYTES,
    Pages,
    kinds,
    make_driver,
    on_a_thread,
)
from tests.kit.accelerator_ops import Misuse, MisuseError
from ucm.devices.driver import Direction


class TestMisuses:
    @pytest.mark.parametrize("side", ["device", "host"])
    def test_dead_memory_is_not_touched(self, side):
        """A copy from or into memory that was given up moves nothing and is noted."""
        driver = make_driver()
        pages, stream = Pages(driver), driver.current_stream()
        dead = pages.device[:PAGE_BYTES] if side == "device" else pages.host[0]
        pages.gather(stream)
        driver.poison(dead)
        assert {0xDB} == set(dead.tolist())
        driver.synchronize()
        assert {Misuse.DEAD_MEMORY} == kinds(driver)
        assert 1 == len(driver.hardware.violations)
        assert {OLD} == set(pages.host[1:].ravel().tolist())
        assert {0xDB if side == "host" else 0} == set(pages.host[0].tolist())

    def test_memory_can_come_back(self):
        """What was forbidden may be allowed again."""
        driver = make_driver()
        pages = Pages(driver)
        driver.forbid(pages.device)
        driver.allow(pages.device)
        pages.gather(driver.current_stream())
        driver.synchronize()
        assert ({OLD}, set()) == (pages.found(), kinds(driver))

    def test_only_contiguous_memory_is_given_up(self):
        """Memory with holes has no one range, and is refused."""
        with pytest.raises(ValueError, match="contiguous"):
            make_driver().forbid(np.zeros((4, 4), np.uint8)[:, :2])

    def test_memory_is_not_unpinned_under_a_copy(self):
        """Unpinning is a misuse until the last copy is over."""
        driver = make_driver()
        pages = Pages(driver)
        pages.gather(driver.current_stream())
        with pytest.raises(MisuseError, match="under a copy"):
            driver.unpin(pages.host.ctypes.data)
        other = make_driver()
        pages = Pages(other)
        pages.gather(other.current_stream())
        other.synchronize()
        other.unpin(pages.host.ctypes.data)
        assert ({Misuse.UNPIN_IN_USE}, set()) == (kinds(driver), kinds(other))

    def test_unpinned_memory_is_not_taken_for_pinned(self):
        """Claiming that memory is pinned, or unpinning what is not, is found."""
        driver = make_driver()
        pages = Pages(driver)
        driver.unpin(pages.host.ctypes.data)
        with pytest.raises(MisuseError, match="pinned"):
            pages.gather(driver.current_stream())
        with pytest.raises(MisuseError, match="pinned"):
            driver.unpin(pages.host.ctypes.data)
        assert {Misuse.NOT_PINNED} == kinds(driver)

    def test_copy_the_wrong_way_is_found(self):
        """Host memory is not copied as if it were the device's."""
        driver = make_driver()
        pages = Pages(driver)
        batch, back = pages.batch(), pages.batch(Direction.TO_DEVICE)
        for wrong, way in (
            (batch, Direction.TO_DEVICE),
            (back, Direction.TO_HOST),
            (attrs.evolve(batch, sources=batch.targets), Direction.TO_HOST),
            (attrs.evolve(batch, targets=batch.sources), Direction.TO_HOST),
        ):
            with pytest.raises(MisuseError, match="wrong way"):
                driver.copy(wrong, way, driver.current_stream(), is_pinned=True)

    def test_nothing_is_used_after_close(self):
        """Each verb and each kernel after close is found."""
        driver = make_driver()
        driver.close()
        for use in (driver.current_stream, driver.make_event, driver.synchronize):
            with pytest.raises(MisuseError, match="after close"):
                use()
        with pytest.raises(MisuseError, match="after close"):
            driver.launch(driver.hardware.default_stream(0), lambda: None)
        assert {Misuse.AFTER_CLOSE} == kinds(driver)

    def test_close_under_a_copy_is_found(self):
        """Closing while bytes may still move is a misuse; on a failed device it is not."""
        driver, failed = make_driver(), make_driver()
        for each in (driver, failed):
            Pages(each).gather(each.current_stream())
        failed.fail("gone")
        failed.close()
        with pytest.raises(MisuseError, match="under a copy"):
            driver.close()

    def test_thread_that_is_not_bound_is_found(self):
        """A verb on a thread that did not bind itself is a misuse there."""
        driver = make_driver()
        driver.make_event()
        with pytest.raises(MisuseError, match="current device"):
            on_a_thread(driver.make_event)
        assert {Misuse.UNBOUND_THREAD} == kinds(driver)

    def test_verbs_that_break_a_capture_raise(self):
        """Under capture the thread may ask, and submit nothing; other threads may."""
        driver = make_driver()
        pages, event = Pages(driver), driver.make_event()
        stream = driver.current_stream()
        driver.record(event, stream)
        breaking = {
            "is_done": lambda: driver.is_done(event),
            "synchronize": driver.synchronize,
            "record": lambda: driver.record(event, stream),
            "wait": lambda: driver.wait(stream, event),
            "copy": lambda: pages.gather(stream),
            "pin": lambda: driver.pin(1, 1),
            "unpin": lambda: driver.unpin(pages.host.ctypes.data),
        }
        assert not driver.is_capturing()
        with driver.capturing():
            assert driver.is_capturing()
            assert not on_a_thread(
                lambda: (driver.bind_thread(), driver.is_capturing())[1]
            )
            for use in breaking.values():
                with pytest.raises(RuntimeError, match="captured"):
                    use()
        assert not driver.is_capturing()
        assert list(breaking) == [each.detail for each in driver.hardware.violations]
        assert {Misuse.CAPTURE} == kinds(driver)


class TestPinning:
    def test_memory_is_pinned_once(self):
        """Overlapping or empty memory cannot be pinned; what was unpinned can again."""
        driver = make_driver()
        driver.pin(1000, 100)
        for address, nbytes in ((1000, 100), (1099, 1), (900, 101), (2000, 0)):
            with pytest.raises(OSError, match="pin"):
                driver.pin(address, nbytes)
        driver.pin(1100, 1)
        driver.unpin(1000)
        driver.pin(1000, 100)
        assert {1000: range(1000, 1100), 1100: range(1100, 1101)} == driver.pins

    def test_pinning_can_be_impossible(self):
        """A device that cannot pin says so as an operating system does (S2-04)."""
        driver = SimulatedDriver(0, make_driver().hardware, can_pin=False)
        with pytest.raises(OSError, match="cannot be pinned"):
            driver.pin(1000, 100)


class TestFailures:
    def test_failure_stays_and_nothing_runs_any_more(self):
        """Every verb raises the same from then on, and pending work stands still."""
        driver = make_driver()
        pages, event = Pages(driver), driver.make_event()
        stream = driver.current_stream()
        driver.launch(stream, pages.write)
        pages.gather(stream)
        driver.record(event, stream)
        driver.fail("an illegal address")
        verbs = {
            "bind_thread": driver.bind_thread,
            "is_capturing": driver.is_capturing,
            "current_stream": driver.current_stream,
            "make_stream": driver.make_stream,
            "make_event": driver.make_event,
            "record": lambda: driver.record(event, stream),
            "wait": lambda: driver.wait(stream, event),
            "is_done": lambda: driver.is_done(event),
            "synchronize": driver.synchronize,
            "copy": lambda: pages.gather(stream),
            "pin": lambda: driver.pin(1, 1),
            "unpin": lambda: driver.unpin(pages.host.ctypes.data),
            "engine's record": lambda: SimEvent(driver.hardware).record(stream),
            "engine's query": event.query,
        }
        for _ in range(2):
            for use in verbs.values():
                with pytest.raises(RuntimeError, match="an illegal address"):
                    use()
        driver.hardware.drain()
        assert [] == driver.hardware.executed
        assert {0} == pages.found()

    def test_failure_comes_at_the_call_that_was_planned(self):
        """The nth call of the verb from now raises, and so does all that follows."""
        driver = make_driver()
        driver.make_event()
        driver.fail_at("make_event", 2)
        driver.make_event()
        driver.make_stream()
        with pytest.raises(RuntimeError, match="make_event failed"):
            driver.make_event()
        with pytest.raises(RuntimeError, match="make_event failed"):
            driver.make_stream()

    def test_failure_may_pass(self):
        """A failure that is planned for once leaves the device as it was (S0-23)."""
        driver = make_driver()
        driver.fail_at("make_event", 1, stays=False)
        with pytest.raises(RuntimeError, match="make_event failed"):
            driver.make_event()
        driver.record(driver.make_event(), driver.current_stream())
        driver.synchronize()
        assert 1 == len(driver.hardware.executed)

    def test_failure_ends_who_synchronizes(self):
        """A device that fails in the middle lets nobody wait for ever."""
        driver = make_driver()
        ran, stream = [], driver.current_stream()
        driver.launch(stream, lambda: driver.fail("gone"))
        driver.launch(stream, lambda: ran.append(1))
        with pytest.raises(RuntimeError, match="gone"):
            driver.synchronize()
        assert [] == ran
