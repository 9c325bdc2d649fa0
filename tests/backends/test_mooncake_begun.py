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
        """R-51, R-57: who had begun it, at any time, may have died, and the client says of it that it is
        done: it was counted, told to routers, and never put again. Its tier is not blamed."""

        class Begun(FakeClient):
            codes: ClassVar = {"ucm/" + KEYS[2].hex(): -800}

            def batch_put_from_multi_buffers(self, names, addresses, sizes, more):
                told = super().batch_put_from_multi_buffers(
                    names, addresses, sizes, more
                )
                self.objects.pop("ucm/" + KEYS[1].hex(), None)
                return told

            def batch_is_exist(self, names):
                return [int(name in self.objects) for name in names]

        backend = MooncakeBackend(fake_native({}, Begun), settings())
        put = await backend.put([seal(key) for key in KEYS])
        assert [Verdict.DONE, Verdict.AWAY, Verdict.UNAVAILABLE] == put
        await backend.aclose()

    async def test_block_of_which_a_master_does_not_say_that_it_is_there_is_not_called_done(
        self,
    ):
        """R-51: it has gone silent behind the put, and is asked once for all of them."""
        asked = []

        class Silent(FakeClient):
            def batch_is_exist(self, names):
                asked.append(len(names))
                return [-900 if self.objects else 0] * len(names)

        backend = MooncakeBackend(fake_native({}, Silent), settings())
        put = await backend.put([seal(key) for key in KEYS])
        assert [Verdict.UNAVAILABLE] * 3 == put
        assert [3, 3] == asked
        await backend.aclose()

    @pytest.mark.parametrize("code", [-703, -800])
    async def test_block_that_another_has_begun_is_a_miss(self, code):
        """R-51: it is not there, as the store itself says when it is asked; the tier was taken for silent."""

        class Begun(FakeClient):
            codes: ClassVar = dict.fromkeys(
                ["ucm/" + key.hex() for key in KEYS[1:]], code
            )

            def get_size(self, name):
                return -703

        backend = MooncakeBackend(fake_native({}, Begun), settings())
        await backend.put([seal(key) for key in KEYS])
        told = [one.verdict for one, _ in await fetch(backend, KEYS)]
        assert [Verdict.DONE, Verdict.ABSENT, Verdict.ABSENT] == told
        await backend.aclose()
