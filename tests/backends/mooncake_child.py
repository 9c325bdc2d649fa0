# SPDX-License-Identifier: Apache-2.0
"""
An agent's part, in a process with a wall clock of its own: gets blocks, and looks who writes behind that.

Run as ``python -m tests.backends.mooncake_child MASTER``. It says when it is about to ask, and then how many
blocks came late, once it was told to go on.
"""

import sys

import anyio

from ucm.backends.abc import Verdict
from ucm.backends.mooncake import MooncakeBackend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

_KEYS = make_keys(8)
_NBYTES = 2 << 20
_MARK = b"\xa5"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _main(master: str) -> None:
    given = {"master": master, "timeout": 20.0, "threads": 1}
    backend = await MooncakeBackend.open_configured(given, "tiers.0")
    put = await backend.put([seal(key, _NBYTES) for key in _KEYS])
    assert {Verdict.DONE} == set(put)
    targets = [memoryview(bytearray(_NBYTES)) for _ in _KEYS]
    _say("asks")
    sys.stdin.readline()
    told = await backend.get(_KEYS, targets)
    for target in targets:
        target[:] = _MARK * _NBYTES
    _say(f"has {' '.join({one.verdict for one in told})}")
    sys.stdin.readline()
    # Where the connections are the same, these come behind what was given up.
    while not all(await fetch_sound(backend, _KEYS, _NBYTES)):
        pass
    _say(str(sum(target != _MARK * _NBYTES for target in targets)))
    await backend.aclose()


if __name__ == "__main__":
    anyio.run(_main, *sys.argv[1:])
