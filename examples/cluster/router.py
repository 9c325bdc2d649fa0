# SPDX-License-Identifier: Apache-2.0
"""
A router that sends each prompt to the engine that holds most of it, by its KV events.

It knows no engine's inside: what an engine holds is what it publishes, mirrored by
``examples.kv_mirror``. Prompts are token ids, or text, which an engine makes tokens of. An
engine that does not take a request, or says nothing for minutes, is passed over for a while.

Run as ``python -m examples.cluster.router --engine NAME URL EVENTS REPLAY ...``, such as
``--engine a http://a:8000 tcp://a:5557 tcp://a:5558``; it needs aiohttp, starlette, uvicorn.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import anyio.to_thread
import attrs
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.kv_mirror import Subscription

__all__ = ["Engine", "Router"]

_PAUSE_S = 5.0
"""For how long at least an engine is not asked that has not answered."""
_CONNECT_S = 5.0
_SILENT_S = 300.0
"""Who has said nothing for so long, be it amid an answer, is not waited for."""
_SHARED = "STORAGE"
"""What engines have in common says nothing of which to ask."""


@attrs.define(eq=False)
class Engine:
    """
    One engine, and what it has told.

    Args:
        name: For people.
        url: Of its server.
        subscription: To its events.
    """

    name: str
    url: str
    subscription: Subscription
    num_asked: int = 0
    in_flight: int = 0
    silent_until: float = 0.0
    lock: threading.Lock = attrs.Factory(threading.Lock)
    _is_closing: threading.Event = attrs.Factory(threading.Event)
    _thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(
            target=self._follow, name=f"events of {self.name}"
        )
        self._thread.start()

    def holds(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt it has by itself."""
        with self.lock:
            found = self.subscription.mirror.reusable(tokens)
        return max(
            (n for place, n in found.items() if place.medium != _SHARED), default=0
        )

    def shares(self) -> int:
        """Return how many blocks it has given to what all engines share."""
        with self.lock:
            counts = self.subscription.mirror.count()
        return sum(n for place, n in counts.items() if place.medium == _SHARED)

    def close(self) -> None:
        """Hear no more."""
        self._is_closing.set()
        self._thread.join()
        self.subscription.close()

    def _follow(self) -> None:
        with self.lock:
            self.subscription.catch_up()
        while not self._is_closing.is_set():
            with self.lock:
                self.subscription.follow(0.02)
            self._is_closing.wait(0.01)  # for whoever asks


class Router:
    """
    Sends requests on.

    Args:
        engines: To choose from.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._client: aiohttp.ClientSession

    def ranked(self, tokens: Sequence[int]) -> list[Engine]:
        """Return engines, the one to ask first at first."""
        now = time.monotonic()
        return sorted(
            self.engines,
            key=lambda engine: (
                engine.silent_until > now,
                -engine.holds(tokens),
                engine.in_flight,
                engine.num_asked,
            ),
        )

    def app(self) -> Starlette:
        """Return the router as a server."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/health", self._health),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # Requests at an engine that stands still keep no connection from the others.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._client:
            yield

    async def _rank(self, tokens: Sequence[int]) -> list[Engine]:
        """Rank beside the loop: a mirror may just be taking a batch."""
        return await anyio.to_thread.run_sync(self.ranked, tokens)

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", [])
        if isinstance(prompt, list):
            return prompt
        asked = {"model": body["model"], "prompt": prompt}
        for engine in await self._rank([]):
            with contextlib.suppress(aiohttp.ClientError):
                async with await self._post(
                    engine, "/tokenize", asked, _CONNECT_S
                ) as told:
                    told.raise_for_status()
                    return list((await told.json())["tokens"])
        return []

    async def _post(
        self, engine: Engine, path: str, body: dict[str, Any], silent_s: float
    ) -> aiohttp.ClientResponse:
        """Ask an engine; who says nothing is asked by nobody for as long as it was waited for."""
        began = time.monotonic()
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=silent_s
        )
        try:
            return await self._client.post(engine.url + path, json=body, timeout=limit)
        except aiohttp.ClientError:
            now = time.monotonic()
            engine.silent_until = now + max(_PAUSE_S, now - began)
            raise

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        for engine in await self._rank(await self._tokens(body)):
            engine.in_flight += 1
            answer = None
            try:
                answer = await self._post(engine, "/v1/completions", body, _SILENT_S)
            except aiohttp.ClientError:
                continue
            finally:  # however it ended, as where nobody waits for it any more
                engine.in_flight -= answer is None
            engine.num_asked += 1
            return StreamingResponse(
                self._body(engine, answer),
                answer.status,
                {"x-engine": engine.name},
                answer.content_type,
            )
        return JSONResponse({"error": "no engine answers"}, 503)

    async def _body(
        self, engine: Engine, answer: aiohttp.ClientResponse
    ) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.content.iter_any():
                yield piece
        finally:
            engine.in_flight -= 1
            answer.close()

    async def _health(self, _: Request) -> Response:
        engines = {
            engine.name: {"asked": engine.num_asked, "in_flight": engine.in_flight}
            for engine in self.engines
        }
        return JSONResponse(engines)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.cluster.router")
    names = ("NAME", "URL", "EVENTS", "REPLAY")
    parser.add_argument(
        "--engine", nargs=4, action="append", required=True, metavar=names
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        engines = []
        for name, url, events, replay in asked.engine:
            engine = Engine(name, url, Subscription(events, replay))
            stack.callback(engine.close)
            engines.append(engine)
        uvicorn.run(Router(engines).app(), host=asked.host, port=asked.port)


if __name__ == "__main__":
    main()
