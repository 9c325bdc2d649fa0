# SPDX-License-Identifier: Apache-2.0
"""The chat server as a process, its clients, and a browser that looks at its page."""

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp
import attrs

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


@attrs.define
class Server:
    """
    One server at a time over one store.

    Args:
        store: Directory of the slab.
        process: None while none runs.
        url: Where it listens.
    """

    store: Path
    process: subprocess.Popen[str] | None = None
    url: str = ""

    def start(self) -> None:
        """Start one, unless one runs; return when it serves."""
        if self.process is not None:
            return
        command = (sys.executable, "-m", "examples.chat_server", "--port", "0")
        with (self.store.parent / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--store", str(self.store), "--capacity", "64MiB"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.url = found(self.process.stdout, "listening on (http://.*)")

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()


def found(output: IO[str], pattern: str) -> str:
    """Return what a process says in a line of its output."""
    for line in output:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"it ended without saying {pattern}")


@attrs.define
class Said:
    """What a client was told."""

    text: str = ""
    finish: str | None = None
    loaded: int = 0
    begun: asyncio.Event = attrs.Factory(asyncio.Event)
    ended: asyncio.Event = attrs.Factory(asyncio.Event)


async def ask(
    session: aiohttp.ClientSession, url: str, content: str, num_tokens: int, said: Said
) -> None:
    """Ask with streaming, and keep what came also if no more comes."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert 200 == response.status, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _note(json.loads(line.removeprefix(b"data: ")), said)
    except aiohttp.ClientError:
        pass  # the server is gone
    finally:
        said.ended.set()


def _note(told: dict[str, Any], said: Said) -> None:
    said.text += told["choices"][0]["delta"]["content"]
    said.finish = told["choices"][0]["finish_reason"]
    if said.finish:
        said.loaded = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    said.begun.set()


async def counted(session: aiohttp.ClientSession, url: str, sample: str) -> float:
    """Return one sample of the server's metrics."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    values = re.findall(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(values[0]) if values else 0.0


class Page:
    """
    A page in a browser, driven through its own protocol.

    Args:
        socket: To the page.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; note what the console says meanwhile."""
        self._asked += 1
        await self._socket.send_json(
            {"id": self._asked, "method": method, "params": params}
        )
        while True:
            told = await self._socket.receive_json()
            if told.get("id") == self._asked:
                return told["result"]
            if told.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.problems.append(json.dumps(told["params"]))

    async def evaluate(self, expression: str) -> Any:
        """Return what an expression of JavaScript comes to."""
        told = await self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true, as the page changes."""
        return await self.evaluate(
            "new Promise((resolve) => { const look = () => { const value = "
            f"{expression}; if (value) resolve(value); else requestAnimationFrame(look)"
            "}; look(); })"
        )

    async def picture(self) -> bytes:
        """Return what is seen."""
        told = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(told["data"])


@contextlib.contextmanager
def browser(chromium: str, directory: Path) -> Iterator[str]:
    """Yield the address of a browser that reaches nothing but this machine."""
    process = subprocess.Popen(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--remote-debugging-port=0", f"--user-data-dir={directory}"),
            *("--proxy-server=127.0.0.1:1", "--proxy-bypass-list=127.0.0.1"),
            *("--window-size=900,1000", "about:blank"),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield found(process.stderr, r"DevTools listening on ws://([^/]*)/")
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def page_at(address: str, url: str) -> AsyncIterator[Page]:
    """Yield a page of a browser that has come from an address."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{address}/json/new?about:blank") as response:
            target = json.loads(await response.text())
        async with session.ws_connect(
            target["webSocketDebuggerUrl"], max_msg_size=1 << 26
        ) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            await page.call("Page.navigate", url=url)
            await page.until(
                f"location.href.startsWith({json.dumps(url)}) && "
                "document.readyState === 'complete'"
            )
            yield page


def run(main: Any) -> Any:
    """Run a coroutine, not for ever."""
    return asyncio.run(asyncio.wait_for(main, LIMIT_S))
