# SPDX-License-Identifier: Apache-2.0
"""Traces that engines and halves of the connector leave in a directory."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ucm import line_writer


def traces_of(store: Path) -> Path:
    """Return where engines over this slab leave their traces."""
    return store.with_name("traces")


@contextlib.contextmanager
def logs_closed() -> Iterator[None]:
    """Close the logs that this process opens; elsewhere its end does."""
    before = set(line_writer._BUFFERS)
    yield
    for buffer in set(line_writer._BUFFERS) - before:
        thread = buffer.end()
        if thread is not None:
            thread.join(60.0)


class Drain:
    """
    Reads a pipe to its end on a thread of its own.

    Args:
        reader: The end that is read.
    """

    def __init__(self, reader: int) -> None:
        self._text = b""
        self._reader = reader
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while data := os.read(self._reader, 65536):
            self._text += data

    def events(self) -> list[dict[str, Any]]:
        """Return the events behind what filled the pipe, once its last writer is gone."""
        self._thread.join(60.0)
        lines = self._text.decode().lstrip("x").splitlines()
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def filled_pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe into which not one byte more can be written."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * size)
    os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)
