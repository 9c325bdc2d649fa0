# SPDX-License-Identifier: Apache-2.0
"""What the example server has only so much of, and what it says when that is used up."""

import copy
import functools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import transformers
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from examples.chat_server.__main__ import main as serve
from examples.chat_server.app import make_app
from examples.chat_server.chat import Chat, Limits, Piece, Refusal
from examples.chat_server.tiny import make_tiny
from tests.cache.kit import LIMIT_S, run
from ucm.errors import PipelineClosedError
from ucm.integration.transformers import PromptCache
from ucm.stores.slab import is_in_memory

WORDS = [{"role": "user", "content": "There is only so much of everything."}]


@functools.cache
def tiny(directory: Path) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    transformers.logging.disable_progress_bar()
    path = make_tiny(directory)
    return (
        transformers.AutoModelForCausalLM.from_pretrained(path),
        transformers.AutoTokenizer.from_pretrained(path),
    )


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is, once for all tests."""
    return tmp_path_factory.getbasetemp() / "tiny"


def config_of(tmp_path: Path, **more: object) -> dict[str, object]:
    """Return settings of a store of the test's own."""
    return {
        "store": {"path": str(tmp_path / "slab"), "capacity": "16MiB"},
        "log": {"level": "off"},
        **more,
    }


class Asking:
    """
    A chat, and what it says.

    Args:
        chat: Asked.
        registry: Where it counts.
    """

    def __init__(self, chat: Chat, registry: CollectorRegistry) -> None:
        self.chat = chat
        self.registry = registry
        self.text = ""

    async def __call__(self, num_tokens: int = 4) -> Piece | Refusal:
        """Ask, and return the last that is said."""
        out, pieces = anyio.create_memory_object_stream[Any](num_tokens + 1)
        with pieces:
            ids = await self.chat.encode(WORDS)
            await self.chat.answer(ids, num_tokens, b"", out)
            said = [each async for each in pieces]
        self.text = "".join(each.text for each in said)
        last: Piece | Refusal = said[-1]
        return last

    def counted(self, name: str, **labels: str) -> float:
        """Return a sample."""
        return self.registry.get_sample_value(name, labels) or 0.0


def chatting(
    tmp_path: Path,
    directory: Path,
    limits: Limits,
    main: Callable[[Asking], Awaitable[None]],
    **settings: object,
) -> None:
    """Have a chat while *main* runs."""
    model, tokenizer = tiny(directory)

    async def inner() -> None:
        async with (
            PromptCache(config_of(tmp_path, **settings), model) as prompts,
            anyio.create_task_group() as saves,
        ):
            registry = CollectorRegistry()
            chat = Chat(model, tokenizer, prompts, saves, limits, registry)
            await main(Asking(chat, registry))

    run("asyncio", inner)


@pytest.mark.slow
class TestLimits:
    def test_answer_behind_the_end_of_saves_is_counted(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """A token may outlast the server's end: its answer is not saved, and no error."""

        async def main(ask: Asking) -> None:
            async with anyio.create_task_group() as ended:
                ask.chat._saves = ended
            assert isinstance(await ask(), Piece)
            assert 1 == ask.counted("chat_unsaved_total")
            assert 0 == ask.chat._save_room.borrowed_tokens

        chatting(tmp_path, directory, Limits(), main)

    def test_line_that_is_full_refuses_at_once(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """Nobody waits for what will not be answered in time; the first one is."""

        async def main(ask: Asking) -> None:
            said = []

            async def first() -> None:
                said.append(await ask())

            holder = object()
            await ask.chat._turn.acquire_on_behalf_of(holder)
            async with anyio.create_task_group() as group:
                group.start_soon(first)
                while not ask.chat.num_asked:
                    await anyio.lowlevel.checkpoint()
                second = await ask()
                assert isinstance(second, Refusal)
                assert 503 == second.status
                ask.chat._turn.release_on_behalf_of(holder)
            assert isinstance(said[0], Piece)
            assert ("length", 4) == (said[0].finish, said[0].numbers.said)
            assert 0 == ask.chat.num_asked
            assert 1 == ask.counted("chat_answers_total", end="refused")

        chatting(tmp_path, directory, Limits(line=1), main)

    def test_request_that_waits_too_long_is_told(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """Its deadline counts from when it was asked, not from its turn."""

        async def main(ask: Asking) -> None:
            await ask.chat._turn.acquire_on_behalf_of(ask)
            late = await ask()
            assert isinstance(late, Refusal)
            assert 504 == late.status
            assert 0 == ask.chat.num_asked

        chatting(tmp_path, directory, Limits(deadline=0.01), main)

    def test_prompt_that_the_model_cannot_see_is_refused(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """Before its turn, with how much it is too long."""

        async def main(ask: Asking) -> None:
            long = await ask(4096)
            assert isinstance(long, Refusal)
            assert 400 == long.status
            assert long.text.split()[0] == str((await ask.chat.encode(WORDS)).shape[1])

        chatting(tmp_path, directory, Limits(), main)

    def test_answer_without_room_to_save_is_right_and_counted(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """Saves that pile up are left out; nobody waits for them."""

        async def main(ask: Asking) -> None:
            ask.chat._save_room.acquire_on_behalf_of_nowait(ask)
            first = await ask()
            ask.chat._save_room.release_on_behalf_of(ask)
            second = await ask()
            assert isinstance(first, Piece)
            assert isinstance(second, Piece)
            assert 0 == second.numbers.loaded
            assert 1 == ask.counted("chat_unsaved_total")

        chatting(tmp_path, directory, Limits(saves=1), main)

    @pytest.mark.parametrize(
        "error", [PipelineClosedError("the cache is closed"), RuntimeError("no memory")]
    )
    def test_save_that_is_refused_ends_no_other(
        self,
        tmp_path: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
    ) -> None:
        """Saves go on beside each other; one that fails is counted."""

        async def refuse(*_: Any, **__: Any) -> int:
            raise error

        async def main(ask: Asking) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(PromptCache, "save", refuse)
                await ask()
                while not ask.counted("chat_unsaved_total"):
                    await anyio.lowlevel.checkpoint()
            last = None
            while not (isinstance(last, Piece) and last.numbers.loaded):
                last = await ask()

        chatting(tmp_path, directory, Limits(), main)


async def stay() -> None:
    """Stay connected."""
    await anyio.sleep_forever()


async def fetch(
    app: Starlette,
    method: str,
    path: str,
    body: bytes = b"",
    until: Callable[[], Awaitable[object]] = stay,
    *,
    is_whole: bool = True,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Ask an application without a socket, and go away at some time."""
    status, headers, said = 0, {}, b""
    given = [{"type": "http.request", "body": body, "more_body": not is_whole}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await until()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, headers, said
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            said += message["body"]

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    return status, headers, said


@pytest.mark.slow
def test_requests_are_answered_or_refused_by_name(
    tmp_path: Path, directory: Path
) -> None:
    """As a whole without streaming; what is not understood is said in words."""
    model, tokenizer = tiny(directory)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'nobody' %}{{ raise_exception('who is nobody') }}"
        "{% endif %}" + tokenizer.chat_template
    )
    app = make_app(model, tokenizer, config_of(tmp_path), Limits(tokens=8))
    ask = functools.partial(fetch, app, "POST", "/v1/chat/completions")

    async def main() -> None:
        async with app.router.lifespan_context(app):
            good = b'{"messages":[{"role":"user","content":"So"}],"max_tokens":3}'
            status, _, said = await ask(good)
            assert 200 == status
            assert b'"completion_tokens":3' in said
            assert b'"finish_reason":"length"' in said
            for body, code, words in (
                (b"{", 400, b"truncated"),
                (b'{"messages":[]}', 400, b"length >= 1"),
                (good.replace(b"3}", b"9}"), 400, b"above 8"),
                (good.replace(b"3}", b'3,"temperature":1}'), 400, b"temperature"),
                (b" " * (1 << 20) + good, 413, b"bytes"),
                (good.replace(b"So", b"\xff"), 400, b"utf-8"),
                (b'{"x":' + b"[" * 100_000, 400, b"recursion"),
                (good.replace(b"user", b"nobody"), 400, b"who is nobody"),
            ):
                status, _, said = await ask(body)
                assert code == status
                assert words in said
            status, _, said = await fetch(app, "GET", "/health")
            assert (200, b'{"ok":true,"store":true,"asked":0}') == (status, said)
            status, _, said = await fetch(app, "GET", "/metrics")
            assert b"ucm_healthy 1.0" in said
            for path in ("/", "/page.css", "/page.js"):
                status, headers, _ = await fetch(app, "GET", path)
                assert 200 == status
                assert b"default-src 'none'" in headers[b"content-security-policy"]

    run("asyncio", main)


@pytest.mark.slow
def test_request_that_does_not_come_to_its_end_is_not_waited_for(
    tmp_path: Path, directory: Path
) -> None:
    """It is told after its deadline, and who goes away amid it leaves no error."""
    model, tokenizer = tiny(directory)
    app = make_app(model, tokenizer, config_of(tmp_path), Limits(deadline=0.01))
    ask = functools.partial(
        fetch, app, "POST", "/v1/chat/completions", b"{", is_whole=False
    )

    async def main() -> None:
        async with app.router.lifespan_context(app):
            status, headers, _ = await ask()
            assert (408, b"close") == (status, headers[b"connection"])
            status, _, _ = await ask(until=anyio.lowlevel.checkpoint)
            assert 400 == status

    run("asyncio", main)


@pytest.mark.slow
def test_store_lies_in_memory_unless_told_otherwise() -> None:
    """X-12: who starts it as the page says has a store where one can be."""
    (store,) = (each.default for each in serve.params if each.name == "store")
    assert is_in_memory(Path(store))


def test_model_without_a_template_for_chats_is_refused_at_the_start(
    tmp_path: Path, directory: Path
) -> None:
    """Or each request would end in an error of the server's."""
    _, tokenizer = tiny(directory)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    done = CliRunner().invoke(serve, [str(tmp_path)])
    assert 2 == done.exit_code
    assert "no template for chats" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["true", "false"])
def test_who_goes_away_amid_a_token_leaves_no_error(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """The token is computed to its end, and then it is nobody's."""
    model, tokenizer = tiny(directory)
    app = make_app(model, tokenizer, config_of(tmp_path), Limits(tokens=8))
    computing, goes_on, step = threading.Event(), threading.Event(), Chat._step

    def stepped(chat: Chat, tokens: Any, past: Any, num_prompt: int) -> Any:
        if past.get_seq_length():
            computing.set()
            assert goes_on.wait(LIMIT_S)
        return step(chat, tokens, past, num_prompt)

    async def begun() -> None:
        await anyio.to_thread.run_sync(computing.wait)

    body = f'{{"messages":[{{"role":"user","content":"So"}}],"max_tokens":8,"stream":{stream}}}'
    ask = functools.partial(fetch, until=begun)

    async def main() -> None:
        async with app.router.lifespan_context(app):
            async with anyio.create_task_group() as group:
                group.start_soon(
                    ask, app, "POST", "/v1/chat/completions", body.encode()
                )
                await begun()
                for _ in range(50):  # until it is known that nobody listens
                    await anyio.lowlevel.checkpoint()
                goes_on.set()
            assert 0 == app.state.chat.num_asked
            ended = app.state.registry.get_sample_value
            assert 1 == ended("chat_answers_total", {"end": "lost"})

    monkeypatch.setattr(Chat, "_step", stepped)
    run("asyncio", main)
