# SPDX-License-Identifier: Apache-2.0
"""
A process that holds yuanrong's client for the agent; run as a script by ``yuanrong.py``.

The client keeps the interpreter's lock while it waits, so that in the agent one silent worker
would stop all that the agent does. Here it stops nobody. It has nothing of ``ucm`` to import.

A message is its length (4 bytes, big endian), JSON, and then bytes of blocks as the JSON says.
Asked is ``[verb, names, nbytes of each]``, behind which come the blocks of a put. Told is a word
for each name; behind those of a get come the bytes of each that is ``done``.
"""

import importlib
import json
import os
import re
import socket
import sys
from typing import Any

__all__ = ["Client"]

_CODE = re.compile(r"code: \[([^]]*)\]")
_WORDS = {"Object already exist error": "present", "Out of memory": "full"}
_NOT_FOUND = "Key not found"


def _code(error: RuntimeError) -> str:
    """Return the client's code, which is in the text alone; the outermost comes first."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


class Client:
    """
    What the verbs say in the client's words, some blocks at a time.

    Args:
        native: The module ``yr.datasystem.kv_client``, or what behaves like it.
        host: Of the worker,
        port: and where it listens.
        timeout_ms: For joining, and for each request.
        ttl: Seconds that a block lives; 0: without end.
    """

    def __init__(
        self,
        native: Any,  # noqa: ANN401 - it has no types
        host: str,
        port: int,
        timeout_ms: int,
        ttl: int,
    ) -> None:
        self._native = native
        self._place = host, port
        self._timeout_ms = timeout_ms
        self._how = {
            "write_mode": native.WriteMode.NONE_L2_CACHE_EVICT,
            "ttl_second": ttl,
            "existence_opt": native.ExistenceOpt.NX,
        }
        self._joined: Any = None

    def answer(
        self, verb: str, names: list[str], values: list[Any]
    ) -> tuple[list[str], list[Any]]:
        """Return a word for each name, and what is there of each."""
        try:
            if self._joined is None:
                self._joined = self._join()
            if verb == "exists":
                there = self._joined.exist(names)
                return ["present" if one else "absent" for one in there], []
            if verb == "get":
                return self._get(names)
            if verb == "put":
                return self._put(names, values), []
            return self._delete(names), []
        except RuntimeError:
            return ["unavailable"] * len(names), []

    def _join(self) -> Any:  # noqa: ANN401
        client = self._native.KVClient(
            *self._place,
            connect_timeout_ms=self._timeout_ms,
            req_timeout_ms=self._timeout_ms,
        )
        client.init()
        return client

    def _get(self, names: list[str]) -> tuple[list[str], list[Any]]:
        try:
            values = self._joined.get_buffers(names)
        except RuntimeError as exc:
            if _code(exc) != _NOT_FOUND:
                raise
            values = [None] * len(names)  # so it says where it has none of them
        told = ["absent" if value is None else "done" for value in values]
        missing = [at for at, value in enumerate(values) if value is None]
        if (
            missing
        ):  # what another worker holds that is away does not come, but is known
            known = self._joined.exist([names[at] for at in missing])
            for at, is_known in zip(missing, known, strict=True):
                told[at] = "unavailable" if is_known else "absent"
        return told, values

    def _put(self, names: list[str], values: list[Any]) -> list[str]:
        """Write one by one: of several at once all would fail where one is there."""
        told = []
        for name, value in zip(names, values, strict=True):
            try:
                self._joined.msettx([name], [value], **self._how)
            except RuntimeError as exc:
                told.append(_WORDS.get(_code(exc), "unavailable"))
                if told[-1] != "present":  # each further one would take a time-out
                    return told + told[-1:] * (len(names) - len(told))
            else:
                told.append("done")
        return told

    def _delete(self, names: list[str]) -> list[str]:
        """Ask first: of what is not there the client says that it is deleted."""
        there = self._joined.exist(names)
        some = [name for name, is_there in zip(names, there, strict=True) if is_there]
        failed = set(self._joined.delete(some)) if some else set()
        told = dict.fromkeys(names, "absent") | dict.fromkeys(some, "done")
        return list((told | dict.fromkeys(failed, "unavailable")).values())


def _serve(line: socket.socket, client: Client) -> None:
    """Answer until the other side has gone."""
    with line.makefile("rwb") as stream:
        while len(length := stream.read(4)) == 4:
            verb, names, sizes = json.loads(stream.read(int.from_bytes(length)))
            values: list[Any] = []
            if verb == "put":
                values = [memoryview(stream.read(nbytes)) for nbytes in sizes]
            told, found = client.answer(verb, names, values)
            if verb == "get" and found:
                for at, nbytes in enumerate(sizes):
                    if told[at] == "done" and memoryview(found[at]).nbytes != nbytes:
                        told[at] = "garbage"
            _tell(stream, told)
            for word, value in zip(told, found, strict=False):
                if word == "done":
                    stream.write(value)
            stream.flush()


def _tell(stream: Any, told: list[str]) -> None:  # noqa: ANN401 - any file
    """Write a message without what may come behind."""
    text = json.dumps(told).encode()
    stream.write(len(text).to_bytes(4) + text)


def _main(descriptor: str, *given: str) -> None:
    """Say whether the client can be imported, and serve."""
    with socket.socket(fileno=int(descriptor)) as line:
        try:
            kv_client = importlib.import_module("yr.datasystem.kv_client")
        except ImportError as exc:
            with line.makefile("wb") as stream:
                _tell(stream, [str(exc)])
            return
        with line.makefile("wb") as stream:
            _tell(stream, [])
        host, port, timeout_ms, ttl = given
        client = Client(kv_client, host, int(port), int(timeout_ms), int(ttl))
        try:
            _serve(line, client)
        finally:  # the client's own end would wait for a worker that has gone
            os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
