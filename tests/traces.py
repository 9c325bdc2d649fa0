# SPDX-License-Identifier: Apache-2.0
"""Traces that engines and halves of the connector leave in a directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from ucm import tracing
from ucm.config import LogConfig


def traces_of(store: Path) -> Path:
    """Return where engines over this slab leave their traces."""
    return store.with_name("traces")


@contextlib.contextmanager
def logs_closed() -> Iterator[None]:
    """Close the logs that this process opens; elsewhere its end does."""
    with contextlib.ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        inner = tracing._stream

        def stream(config: LogConfig, role: str) -> TextIO:
            log = inner(config, role)
            if config.directory:
                opened.callback(log.close)
            return log

        patch.setattr(tracing, "_stream", stream)
        yield
