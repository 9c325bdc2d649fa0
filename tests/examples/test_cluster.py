# SPDX-License-Identifier: Apache-2.0
"""The example of several machines; it runs as a whole in ``tests/e2e/test_examples.py``."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from examples.cluster import router
from examples.cluster.__main__ import TIMEOUT
from examples.kv_mirror import Place
from ucm.config import UCMConfig


class Subscription:
    """To the events of an engine that tells of one place."""

    def __init__(self, num_tokens):
        place = Place("GPU", "", 0)
        self.mirror = SimpleNamespace(reusable=lambda tokens: {place: num_tokens})

    def catch_up(self):
        """Hear nothing."""

    def follow(self, seconds):
        """Hear nothing."""

    close = catch_up


def prompt():
    """Return a request for a completion."""

    async def receive():
        body = json.dumps({"model": "m", "prompt": [1, 2]}).encode()
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


hung = []


async def hang(reader, writer):
    """Take what is asked, and say nothing."""
    hung.append(writer)
    while await reader.read(1 << 16):
        pass
    writer.close()


async def answer(reader, writer):
    """Answer, in two pieces with a while between."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{")
    await writer.drain()
    writer.write(b"}")
    await writer.drain()
    writer.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_engine_that_says_nothing_is_passed_over(monkeypatch):
    """One whose machine stands still, and that holds most of a prompt, costs the requests to the
    router one wait in as long as that, and not each of them an error."""
    monkeypatch.setattr(router, "_SILENT_S", 5.0)
    monkeypatch.setattr(router, "_PAUSE_S", 0.0)
    hung.clear()
    waits = SimpleNamespace(
        monotonic=lambda: 100.0 * len(hung)
    )  # and nothing else lasts
    monkeypatch.setattr(router, "time", waits)
    servers = [await asyncio.start_server(do, "127.0.0.1") for do in (hang, answer)]
    urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
    engines = [
        router.Engine(name, url, Subscription(count))
        for name, url, count in zip(["still", "well"], urls, [9, 0], strict=True)
    ]
    sends = router.Router(engines)
    with contextlib.ExitStack() as ends:
        for one in (*engines, *servers):
            ends.callback(one.close)
        async with sends.app().router.lifespan_context(sends.app()):
            for _ in range(2):
                told = await sends._complete(prompt())
                assert "well" == told.headers["x-engine"]
                assert b"{}" == b"".join([piece async for piece in told.body_iterator])
        assert [0, 0] == [engine.in_flight for engine in engines]
        assert 1 == len(hung)


def test_settings_of_the_example_are_in_range():
    """X-09: a request waits for tiers as long as it may, and an engine that has more does not start."""
    assert (
        TIMEOUT["fetch"] == UCMConfig.from_mapping({"timeout": TIMEOUT}).timeout.fetch
    )
