# SPDX-License-Identifier: Apache-2.0
"""
What yuanrong's client does of which we know, over a directory; for processes of the backend.

The directory is named as the worker's host. While it has a file ``wait`` a get does not end, and a
client's own end leaves a file ``ended``. While it has a file ``slow`` no client can be imported.
"""

import enum
import time
from pathlib import Path

__all__ = ["ExistenceOpt", "KVClient", "WriteMode", "await_import", "package"]


class WriteMode(enum.Enum):
    """As of the client."""

    NONE_L2_CACHE_EVICT = 1


class ExistenceOpt(enum.Enum):
    """As of the client."""

    NX = 1


class KVClient:
    """
    Keeps each value in a file.

    Args:
        host: The directory.
        port: Any.
    """

    def __init__(self, host, port, **_):
        self._place, self._port = Path(host), port

    def init(self):
        """Join."""

    def __del__(self):
        (self._place / "ended").touch()

    def exist(self, names):
        """Tell of each."""
        return [(self._place / name).exists() for name in names]

    def get_buffers(self, names):
        """Values."""
        while (self._place / "wait").exists():
            time.sleep(0.01)
        if not any(self.exist(names)):
            raise RuntimeError("code: [Key not found], msg: [Cannot get objects]")
        found = [self._place / name for name in names]
        return [one.read_bytes() if one.exists() else None for one in found]

    def msettx(self, names, values, **_):
        """Write what is not there."""
        for name, value in zip(names, values, strict=True):
            (self._place / name).write_bytes(value)


def await_import(place):
    """Load as long as it takes."""
    while Path(place, "slow").exists():
        time.sleep(0.01)


def package(directory):
    """Make a path entry with the client's package, which is this; return it."""
    place = Path(directory, "yr", "datasystem")
    place.mkdir(parents=True)
    for each in (
        place.parent,
        place,
    ):  # or an installed one, which has these, goes first
        (each / "__init__.py").touch()
    (place / "kv_client.py").write_text(
        "import sys, tests.backends.yuanrong_fake as fake\n"
        "fake.await_import(sys.argv[2])\n"
        "from tests.backends.yuanrong_fake import *\n"
    )
    return directory
