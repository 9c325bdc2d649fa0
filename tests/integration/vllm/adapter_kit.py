# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on disk, requests that have one, and a thread that runs when told."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from ucm.threads import Queue, Thread, Threads

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def write_adapter(path: Path, content: bytes) -> Path:
    """Write an adapter's files; over what is there, they change for sure."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    file = path / "adapter_model.safetensors"
    before = file.stat().st_ctime_ns if file.exists() else 0
    while not file.exists() or file.stat().st_ctime_ns == before:
        file.write_bytes(content)
    return path


def changed_ns(path: Path) -> int:
    """Return when the last of an adapter's files was changed."""
    return max(one.stat().st_ctime_ns for one in (path, *path.iterdir()))


def request(
    name: str, path: Path | str | None = None, blocks: int = 3, **adapter: object
) -> SimpleNamespace:
    """Return a request of whole blocks; the engine's hashes are of its tokens alone."""
    one = SimpleNamespace(
        request_id=name,
        num_tokens=16 * blocks,
        num_prompt_tokens=16 * blocks,
        num_computed_tokens=16 * blocks,
        block_hashes=HASHES[:blocks],
        lora_request=None,
    )
    if path is not None:
        one.lora_request = SimpleNamespace(
            lora_name="a", lora_int_id=1, lora_path=str(path), **adapter
        )
    return one


class _OwnThread:
    """A thread that runs in nobody's time but its user's."""

    def start(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """Return False."""
        return False


class StillThreads(Threads):
    """A clock that stands, and one thread that runs in ``work``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monotonic = lambda: self.now
        self.started = 0
        self._target: Callable[[], None] = lambda: None
        self._queues: list[Queue] = []

    def queue(self) -> Queue:
        """Return a queue that ``work`` empties."""
        self._queues.append(super().queue())
        return self._queues[-1]

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Take note of what the thread does."""
        self._target = target
        self.started += 1
        return _OwnThread()

    def work(self) -> None:
        """Let the thread do all that waits."""
        self._queues[-1].put(None)
        self._target()


class SlowThreads(Threads):
    """A clock on which a second takes hours, for waits that must not end by themselves."""

    @staticmethod
    def monotonic() -> float:
        """Return next to no time."""
        return Threads.monotonic() / 1e4
