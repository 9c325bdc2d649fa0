# SPDX-License-Identifier: Apache-2.0
"""What the CUDA driver asks of torch, and what it makes of events and devices."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.devices.cuda_kit import RELAXED, FakeCuda, make_driver
from ucm.devices import cuda
from ucm.devices.cuda import CudaDriver, read_numa_node
from ucm.errors import ConfigError


class TestNumaNode:
    @pytest.mark.parametrize(
        ("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)]
    )
    def test_numa_node_is_what_the_kernel_says(
        self, tmp_path: Path, text: str | None, node: int | None
    ) -> None:
        """A node, or None where the kernel names none or has no such device."""
        if text is not None:
            (tmp_path / "0000:3b:00.0").mkdir()
            (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
        assert node == read_numa_node(tmp_path, "0000:3b:00.0")

    def test_device_that_the_kernel_does_not_list_has_no_node(self) -> None:
        """The fake's device is on no bus of this machine, or on one with a node."""
        node = make_driver(FakeCuda()).numa_node()
        assert node is None or node >= 0


class TestEvents:
    """The handle of somebody's event, as the selection of events asks for it."""

    driver = make_driver(FakeCuda())

    @pytest.mark.parametrize("name", ["cuda_event", "event_id"])
    @pytest.mark.parametrize("handle", [0, 0xE7])
    def test_handle_of_either_kind_of_torch_event(self, name: str, handle: int) -> None:
        """S0-18, S0-19: torch's CUDA events and its device-neutral ones have a handle."""
        event = SimpleNamespace(**{name: handle}, device=torch.device("cuda", 3))
        assert handle == self.driver.handle(event)
        assert 3 == self.driver.device_index(event)

    def test_unrecorded_event_has_no_device_yet(self) -> None:
        """S0-24: torch says None until CUDA has made the event."""
        event = SimpleNamespace(cuda_event=0, device=None)
        assert 0 == self.driver.handle(event)
        assert self.driver.device_index(event) is None

    def test_event_of_another_runtime_is_refused(self) -> None:
        """S0-26: its handle is a number too, and means nothing here."""
        event = SimpleNamespace(event_id=7, device=torch.device("cpu"))
        with pytest.raises(TypeError, match="cpu"):
            self.driver.handle(event)

    def test_what_is_no_event_is_refused(self) -> None:
        """S0-20: one of the three errors that callers expect."""
        with pytest.raises(AttributeError):
            self.driver.handle(object())


class TestTorch:
    """What is asked of torch."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """Put a torch that has two GPUs in place and note what it is asked."""
        asked: list[object] = []

        class Stream(SimpleNamespace):
            def __init__(self, index: int, priority: int) -> None:
                asked.append(("stream", index, priority))

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return 0, -5

            def wait_event(self, event: object) -> None:
                asked.append(("wait", event))

        class Event(SimpleNamespace):
            def __init__(self, blocking: bool) -> None:
                asked.append(("event", blocking))

            def record(self, stream: object) -> None:
                asked.append(("record", stream))

            def query(self) -> bool:
                asked.append("query")
                return False

        fake = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            init=lambda: asked.append("init"),
            set_device=lambda index: asked.append(("device", index)),
            current_device=lambda: 0,
            _maybe_exchange_device=lambda index: asked.append(("again", index)),
            synchronize=lambda index: asked.append(("synchronize", index)),
            is_current_stream_capturing=lambda: True,
            current_stream=lambda index: ("current", index),
            get_device_name=lambda index: f"GPU {index}",
            is_available=lambda: True,
            device_count=lambda: 2,
        )
        monkeypatch.setattr(cuda, "_cuda", fake)
        return asked

    def test_streams_yield_and_events_do_not_spin(self, asked: list[object]) -> None:
        """Streams have the lowest priority there is; whoever waits for an event sleeps."""
        driver = make_driver(FakeCuda())
        driver.make_stream()
        driver.make_event()
        assert [("stream", 1, 0), ("event", True)] == asked

    def test_events_are_recorded_and_asked_apart_from_graphs(
        self, asked: list[object]
    ) -> None:
        """A thread that asks for an event must not break what another records."""
        fake = FakeCuda()
        driver = make_driver(fake)
        event, own = driver.make_event(), driver.make_stream()
        driver.record(event, own)
        assert not driver.is_done(event)
        assert [RELAXED, 0, RELAXED, 0] == fake.modes
        driver.wait(own, event)
        assert [("record", own), "query", ("wait", event)] == asked[2:]

    def test_memory_is_pinned_apart_from_graphs(self, asked: list[object]) -> None:
        """A store grows, and is pinned piece by piece, while an engine records its graphs."""
        fake = FakeCuda()
        driver = make_driver(fake)
        driver.pin(4096, 8192)
        driver.unpin(4096)
        assert ([RELAXED, 0] * 2, {}) == (fake.modes, fake.registered)

    def test_thread_is_bound_in_torch_and_in_cuda(self, asked: list[object]) -> None:
        """Torch alone leaves a new thread without a context on device 0."""
        fake = FakeCuda()
        make_driver(fake).bind_thread()
        assert ["init", ("device", 1)] == asked
        assert [0xC0 + 101] == fake.contexts

    def test_thread_has_its_own_device_again(self, asked: list[object]) -> None:
        """It is torch's, which knows what its tensors are made on; and it is not selected, which
        would give every rank some hundred MB of the first GPU, as threads begin there."""
        driver = make_driver(FakeCuda())
        assert 0 == driver.current_index()
        driver.make_current(0)
        assert [("again", 0)] == asked
        assert callable(torch.cuda._maybe_exchange_device)

    def test_device_is_the_one_asked_for(self, asked: list[object]) -> None:
        """Index 1 stays index 1."""
        driver = make_driver(FakeCuda())
        driver.synchronize()
        assert [("synchronize", 1)] == asked
        assert ("current", 1) == driver.current_stream()
        assert driver.is_capturing() is True
        facts = driver.describe()
        assert ("GPU 1", "13.0") == (facts["model"], facts["driver_cuda"])
        assert "batched" == facts["copies"]
        alone = make_driver(FakeCuda(), is_batched=False)
        assert "one by one" == alone.describe()["copies"]

    @pytest.mark.parametrize("index", [2, -1])
    def test_device_that_is_not_there_is_refused_with_those_that_are(
        self, index: int, asked: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The message counts them; libcuda is not even looked for."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        with pytest.raises(ConfigError, match=f"cuda:{index}'.*counts 2.*Use 0 to 1"):
            CudaDriver(index)

    def test_torch_without_a_gpu_is_refused_with_what_to_look_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GPU that a container does not see is told apart from a wrong torch."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cuda, "_cuda", SimpleNamespace(is_available=lambda: False))
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
            CudaDriver(0)

    def test_torch_without_cuda_is_refused_with_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A CPU build of torch is named with its version."""
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(
            ConfigError, match=r"without CUDA.*Install a torch for CUDA"
        ):
            CudaDriver(0)
