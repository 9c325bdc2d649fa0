# SPDX-License-Identifier: Apache-2.0
"""What the redis backend hands to its client, which may send it behind the end of a call."""

import pytest

from ucm.backends.abc import Verdict
from ucm.backends.redis import RedisBackend, RedisSettings
from ucm.settings import read_section
from ucm.testing.backend_contract import seal
from ucm.testing.store_blocks import make_keys

LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""


class Recorder(RedisBackend):
    """Keeps what it would send, and has everything answered well."""

    def __init__(self):
        super().__init__(None, read_section(RedisSettings, {}, "tiers.0."))
        self.sent = []

    async def _call(self, commands):
        self.sent += commands
        return [0 if command[0] == "EXISTS" else b"OK" for command in commands]


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [4096, LARGE])
async def test_bytes_are_copied_before_they_are_sent(nbytes):
    """R-52: from Python 3.12 on a transport keeps views and sends them when it can, also of a
    call that was cancelled, and of a slot that is another block's by then."""
    backend = Recorder()
    verdicts = await backend.put([seal(make_keys(1)[0], nbytes)])
    values = [command[2] for command in backend.sent if command[0] == "SET"]
    assert [Verdict.DONE] == verdicts
    assert nbytes <= sum(map(len, values))
    assert {bytes} == set(map(type, values))
