# SPDX-License-Identifier: Apache-2.0
"""The real engine as a server: ``vllm serve`` on a loopback port."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import attrs

from tests.e2e.engine import process_group
from tests.e2e.forked import Forked, forked
from tests.ports import free_ports

__all__ = ["Server", "follow", "serve"]

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@attrs.frozen(kw_only=True)
class Server:
    """A running ``vllm serve``."""

    url: str
    model: str
    pid: int
    log: Path

    def post(self, path: str, rank: int | None = None, **body: object) -> Any:
        """
        Send JSON and return the JSON of the answer, or none if it is empty.

        Args:
            path: Of the API.
            rank: Of several engines, the one that is to answer.
            body: What is sent.
        """
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            text = response.read()
        return json.loads(text) if text else None

    def complete(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> Any:
        """Return the greedy completion of token ids, as the API gives it; see ``post``."""
        return self.post(
            "/v1/completions",
            model=self.model,
            prompt=list(prompt),
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            **more,
        )

    def counter(self, name: str) -> int:
        """Return a counter from ``/metrics``, summed over its labels."""
        name = name.removesuffix("_total") + "_total"
        return sum(int(value) for value in self.samples(name))

    def samples(self, name: str) -> list[float]:
        """Return a metric's values from ``/metrics``, for all its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=300) as response:
            text = response.read().decode()
        return [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]


@contextmanager
def serve(
    model: Path,
    *options: str,
    log: Path,
    kv_transfer_config: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    ready_timeout: float = 600.0,
    grace: float = 300.0,
    is_forked: bool = False,
) -> Iterator[Server]:
    """
    Run ``vllm serve`` on a free loopback port for the length of the block.

    With *is_forked* its processes fork off one that has imported the engine, which saves
    as many times the ten seconds that this takes; what they run is the same.

    Args:
        model: Directory made by ``tests.e2e.models.make_model``.
        options: Further command line options.
        log: Takes stdout and stderr of the server.
        kv_transfer_config: As for ``--kv-transfer-config``; none: no connector.
        env: Added to the environment.
        ready_timeout: Seconds until the server must answer.
        grace: Seconds between SIGTERM and SIGKILL at the end.
        is_forked: Whether not to run the command itself.

    Raises:
        AssertionError: The server ended early; carries the end of its log.
        TimeoutError: It did not get ready in time; likewise.
    """
    (port,) = free_ports(1)
    command = _command(
        *(model, "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-prompt-tokens-details", *options),
        kv_transfer_config=kv_transfer_config,
    )
    start = _forked if is_forked else _run
    with start(command, _SETTINGS | dict(env or {}), log) as process:
        server = Server(
            url=f"http://127.0.0.1:{port}",
            model=str(model),
            pid=process.pid,
            log=log,
        )
        _await_ready(server, process, ready_timeout)
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            process.wait(grace)  # then the group is killed


@contextmanager
def follow(
    model: Path,
    *options: str,
    log: Path,
    kv_transfer_config: Mapping[str, object] | None = None,
) -> Iterator[None]:
    """
    Run the ranks of another machine than the server's, and kill them: nothing ends them.

    They fork off a process that has imported the engine.
    """
    command = _command(
        *(model, "--headless", *options), kv_transfer_config=kv_transfer_config
    )
    with _forked(command, _SETTINGS, log):
        yield


def _command(
    model: Path, *options: str, kv_transfer_config: Mapping[str, object] | None
) -> list[str]:
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
        *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "16"),
        *options,
    ]
    if kv_transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(dict(kv_transfer_config))]
    return command


class _Process(Protocol):
    """What is known of a server's first process."""

    pid: int

    def has_ended(self) -> bool:
        """Return whether it runs no more."""

    def wait(self, timeout: float) -> None:
        """Wait for its end, for so long."""


@attrs.frozen
class _Command:
    """One that was started by its name."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)


@attrs.frozen
class _Fork:
    """One that calls what the command does."""

    process: Forked

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_ended(self) -> bool:
        return self.process.has_ended

    def wait(self, timeout: float) -> None:
        with suppress(TimeoutError):
            self.process.wait(timeout)


@contextmanager
def _run(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[_Process]:
    with (
        log.open("w") as output,
        process_group(
            command, env=env, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        yield _Command(process)


@contextmanager
def _forked(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[_Process]:
    with forked(_main, env=env, log=log, arguments=command) as process:
        yield _Fork(process)


def _main(arguments: Sequence[str]) -> None:
    """Do what the command does."""
    sys.argv = list(arguments)
    from vllm.entrypoints.cli.main import main

    main()


def _await_ready(server: Server, process: _Process, timeout: float) -> None:
    """Ask for the server's health until it answers, it ends, or time is over."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=30):
                return
        except (urllib.error.URLError, TimeoutError):
            tail = server.log.read_text(errors="replace")[-6000:]
            assert not process.has_ended(), f"the server ended:\n{tail}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {timeout} s:\n{tail}") from None
            process.wait(0.2)
