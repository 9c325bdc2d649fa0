# SPDX-License-Identifier: Apache-2.0
"""What is put into a Mooncake Store while another writes it, or had begun to as it died."""

from typing import ClassVar

import pytest

from tests.backends.test_mooncake import KEYS, FakeClient, fake_native, settings
from ucm.backends.abc import Verdict
from ucm.backends.mooncake import MooncakeBackend
from ucm.testing.backend_contract import fetch, seal

pytestmark = pytest.mark.asyncio


class TestBegun:
    async def test_block_that_another_has_begun_is_not_called_done(self):
        """R-51, R-57: who had begun it may have died, and the client says of it that it is done: it was
        counted, told to routers, and never put again. Its tier is not blamed."""
        asked = []

        class Begun(FakeClient):
            def get_size(self, name):
                asked.append(name)
                return -703 if name == "ucm/" + KEYS[1].hex() else -704

            def batch_put_from_multi_buffers(self, names, *_):
                return [-800 if name == "ucm/" + KEYS[2].hex() else 0 for name in names]

        backend = MooncakeBackend(fake_native({}, Begun), settings())
        put = await backend.put([seal(key) for key in KEYS])
        assert [Verdict.DONE, Verdict.AWAY, Verdict.UNAVAILABLE] == put
        assert 3 == len(asked)
        backend._doubt_until = 0.0
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
        assert 3 == len(asked)
        await backend.put([seal(KEYS[2])])
        assert [Verdict.AWAY] == await backend.put([seal(KEYS[1])])
        await backend.aclose()

    async def test_silent_master_is_asked_once_what_another_has_begun(self):
        """R-52: a put that nobody can end would wait for it with each block."""
        asked = []

        class Silent(FakeClient):
            def get_size(self, name):
                asked.append(name)
                return -900

        backend = MooncakeBackend(fake_native({}, Silent), settings())
        await backend.put([seal(key) for key in KEYS])
        assert 1 == len(asked)
        await backend.aclose()

    async def test_block_that_another_has_begun_is_a_miss(self):
        """R-51: it is not there, as the store itself says when it is asked; the tier was taken for silent."""

        class Begun(FakeClient):
            codes: ClassVar = {"ucm/" + KEYS[1].hex(): -703}

        backend = MooncakeBackend(fake_native({}, Begun), settings())
        await backend.put([seal(key) for key in KEYS])
        told = [one.verdict for one, _ in await fetch(backend, KEYS)]
        assert [Verdict.DONE, Verdict.ABSENT, Verdict.DONE] == told
        await backend.aclose()
