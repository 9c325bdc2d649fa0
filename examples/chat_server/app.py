# SPDX-License-Identifier: Apache-2.0
"""The server's face: chat completions with streaming, a page, metrics and health."""

import contextlib
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import attrs
import msgspec
import torch
from anyio.streams.memory import MemoryObjectReceiveStream
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.chat_server.chat import Chat, Limits, Piece, Refusal
from ucm.exporter import Exporter
from ucm.integration.transformers import PromptCache

__all__ = ["make_app"]

_HERE = Path(__file__).parent
_MAX_BODY_BYTES = 1 << 20
_POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
}
_FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}


class Message(msgspec.Struct):
    """What somebody said."""

    role: str
    content: str


class Asked(msgspec.Struct):
    """
    A request for a completion, as far as it is understood here.

    Of each next token the likeliest is taken: ``temperature`` may be 0 or left out.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 128
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    user: str = ""
    model: str = ""


_decode = msgspec.json.Decoder(Asked).decode


def make_app(
    model: Any, tokenizer: Any, config: Mapping[str, object], limits: Limits
) -> Starlette:
    """Return a server for a model, with a store as settings say."""
    return Starlette(
        routes=[
            *(
                Route(path, functools.partial(_file, name))
                for path, name in _FILES.items()
            ),
            Route("/v1/chat/completions", _complete, methods=["POST"]),
            Route("/metrics", _metrics),
            Route("/health", _health),
        ],
        exception_handlers={Refusal: _refuse},
        lifespan=functools.partial(_serve, model, tokenizer, config, limits),
    )


@contextlib.asynccontextmanager
async def _serve(
    model: Any,
    tokenizer: Any,
    config: Mapping[str, object],
    limits: Limits,
    app: Starlette,
) -> AsyncIterator[None]:
    """Serve; saves that are under way at the end come to theirs."""
    async with (
        PromptCache(config, model) as prompts,
        anyio.create_task_group() as saves,
    ):
        registry = CollectorRegistry()
        registry.register(Exporter(prompts.cache.measure))
        app.state.prompts, app.state.registry = prompts, registry
        app.state.chat = Chat(model, tokenizer, prompts, saves, limits, registry)
        yield


async def _file(name: str, _: Request) -> Response:
    return FileResponse(_HERE / name, headers=_POLICY)


async def _metrics(request: Request) -> Response:
    told = await anyio.to_thread.run_sync(generate_latest, request.app.state.registry)
    return Response(told, media_type=CONTENT_TYPE_LATEST)


async def _health(request: Request) -> Response:
    """Tell that this answers; without its store it is slower, and as right."""
    prompts: PromptCache = request.app.state.prompts
    seen = await anyio.to_thread.run_sync(prompts.cache.measure)
    is_stored = bool(seen.gauges.get("ucm_healthy"))
    chat: Chat = request.app.state.chat
    return JSONResponse({"ok": True, "store": is_stored, "asked": chat.num_asked})


async def _refuse(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    error = {"message": refusal.text, "code": refusal.status}
    # Of a request that was not read nobody reads the rest.
    headers = {"connection": "close"} if refusal.status in (408, 413) else None
    return JSONResponse({"error": error}, status_code=refusal.status, headers=headers)


async def _complete(request: Request) -> "_Completion":
    chat: Chat = request.app.state.chat
    body = await _read(request, chat.limits.deadline)
    try:
        asked = _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise Refusal(400, str(exc)) from exc
    if asked.max_tokens > chat.limits.tokens:
        raise Refusal(400, f"max_tokens is above {chat.limits.tokens}")
    messages = [{"role": each.role, "content": each.content} for each in asked.messages]
    return _Completion(chat, asked, await chat.encode(messages))


async def _read(request: Request, seconds: float) -> bytes:
    """Return what a client sends, if all of it comes in time."""
    body = bytearray()
    try:
        with anyio.fail_after(seconds):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise Refusal(413, f"more than {_MAX_BODY_BYTES} bytes")
    except TimeoutError as exc:
        raise Refusal(408, "not all of the request came in time") from exc
    except ClientDisconnect as exc:
        raise Refusal(400, "the client went away") from exc  # nobody hears it
    return bytes(body)


@attrs.frozen
class _Completion:
    """One answer on its way: as it comes, or as a whole."""

    chat: Chat
    asked: Asked
    ids: torch.Tensor
    name: str = attrs.Factory(lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = attrs.Factory(lambda: int(time.time()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; once the client is gone, or reads nothing, for nobody any more."""
        out, pieces = anyio.create_memory_object_stream[Piece | Refusal](
            self.asked.max_tokens + 1
        )
        salt = self.asked.user.encode()
        with anyio.move_on_after(2 * self.chat.limits.deadline):
            async with anyio.create_task_group() as group, pieces:
                group.start_soon(self._watch, receive, group.cancel_scope)
                group.start_soon(
                    self.chat.answer, self.ids, self.asked.max_tokens, salt, out
                )
                first = await pieces.receive()
                if isinstance(first, Refusal):
                    refused = await _refuse(Request(scope), first)
                    await refused(scope, receive, send)
                elif self.asked.stream:
                    await self._stream(first, pieces, send)
                else:
                    whole = await self._whole(first, pieces)
                    await whole(scope, receive, send)
                group.cancel_scope.cancel()

    async def _watch(self, receive: Receive, answering: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering.cancel()

    async def _stream(
        self,
        piece: Piece | Refusal,
        pieces: MemoryObjectReceiveStream[Piece | Refusal],
        send: Send,
    ) -> None:
        kind = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        while True:
            if isinstance(piece, Refusal):
                told = {"error": {"message": piece.text, "code": piece.status}}
            else:
                told = self._told("delta", piece.text, piece)
            event = f"data: {json.dumps(told)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if isinstance(piece, Refusal) or piece.finish:
                break
            piece = await pieces.receive()
        done = b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": done})

    async def _whole(
        self, piece: Piece | Refusal, pieces: MemoryObjectReceiveStream[Piece | Refusal]
    ) -> Response:
        text = ""
        while not isinstance(piece, Refusal):
            text += piece.text
            if piece.finish:
                return JSONResponse(self._told("message", text, piece))
            piece = await pieces.receive()
        error = {"message": piece.text, "code": piece.status}
        return JSONResponse({"error": error}, status_code=piece.status)

    def _told(self, part: str, text: str, piece: Piece) -> dict[str, Any]:
        """Return a piece, or all of them, as others tell of completions."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, part: message, "finish_reason": piece.finish}
        told = {
            "id": self.name,
            "object": f"chat.completion{'.chunk' if part == 'delta' else ''}",
            "created": self.created,
            "model": self.asked.model,
            "choices": [choice],
        }
        if piece.finish:
            numbers = piece.numbers
            told["usage"] = {
                "prompt_tokens": numbers.prompt,
                "completion_tokens": numbers.said,
                "total_tokens": numbers.prompt + numbers.said,
                "prompt_tokens_details": {"cached_tokens": numbers.loaded},
            }
            told["first_token_s"] = round(numbers.first_token_s, 6)
        return told
