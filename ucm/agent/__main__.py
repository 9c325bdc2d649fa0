# SPDX-License-Identifier: Apache-2.0
"""
``python -m ucm.agent``: serve a slab's tiers.

Reads the settings that an engine has, one JSON object, from a file or standard input: at
least ``store`` and ``tiers``. Exit codes: 0 it ended as it should; 1 it failed, which the log
tells; 2 a setting cannot be used, in one line on standard error; 3 the slab has an agent, in a line
that says which process. For an engine that started one, as others did at the same time, that is 0.
"""

import os
import signal

if __name__ == "__main__":
    # The first process of a container is not ended by a signal that it does not handle. Nothing is
    # to be drained before it serves; then it handles this itself. What follows takes a second.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import argparse
import contextlib
import gc
import sys
import threading
import time
from functools import partial
from pathlib import Path

import anyio
import msgspec

from ucm.affinity import AffinityPlan, bind_thread, parse_cpulist
from ucm.agent.launch import REFUSED, TAKEN
from ucm.agent.node import AgentLock, Node
from ucm.config import KVEvents, TimeoutConfig, UCMConfig
from ucm.decoding import DECODE_ERRORS
from ucm.errors import ConfigError, ConfigFileError
from ucm.streams import open_streams
from ucm.tracing import RUNTIME_FAILED, Log, close_log, open_log

_MOST_TEXT = 1 << 20
_COLLECTIONS = 50_000, 20, 50
"""New objects that hold others between two looks for cycles among them, and looks between those at older ones."""
_MOST_PROBLEM = 2048
_STDERR = 2
_ESCAPED = "backslashreplace"
_LINGER_S = 10.0
_LOOK_S = 0.25
_BEYOND_S = 5.0
"""Behind the drain and the calls under way: for all else that an end takes."""


class _TakenError(Exception):
    """Another process is the agent."""

    code = TAKEN


class _NoSlabError(_TakenError):
    """Nobody has made the slab in time: there is nothing to serve."""

    code = 0


def main() -> int:
    """Serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ucm.agent", description=__doc__)
    parser.add_argument(
        "--config", type=Path, help="file with the settings; else stdin"
    )
    parser.add_argument(
        "--linger",
        type=float,
        default=_LINGER_S,
        help="seconds to stay without engines; below 0: until SIGTERM",
    )
    parser.add_argument(
        "--engine-fd",
        type=int,
        help="pipe to who started it: open as long as it lives, told how it ends",
    )
    parser.add_argument(
        "--cpus",
        type=parse_cpulist,
        default=frozenset(),
        help="that it may use, such as 8-15,24; else those that it was started on",
    )
    open_streams()
    arguments = parser.parse_args()
    collect_rarely()
    bind_thread(AffinityPlan(arguments.cpus, "of the engine"))
    if arguments.engine_fd is not None:  # what we start may outlive us
        os.set_inheritable(arguments.engine_fd, False)
    try:
        code, problem = _serve(arguments.config, arguments.linger), ""
    except _TakenError as exc:
        code, problem = exc.code, str(exc)
        if arguments.engine_fd is not None:  # an engine's own has met another engine's
            code, problem = 0, ""
    except (ConfigError, OSError) as exc:
        code, problem = REFUSED, str(exc)
    if arguments.engine_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # the engine is gone
            told = f"{code}\n{problem}".encode("utf-8", _ESCAPED)[:_MOST_PROBLEM]
            os.write(arguments.engine_fd, told)
    if problem:
        with contextlib.suppress(OSError):  # its terminal is gone, or its disk full
            os.write(_STDERR, f"ucm agent: {problem}\n".encode("utf-8", _ESCAPED))
    return code


def collect_rarely() -> None:
    """
    Have Python look for cycles of objects less often than it does by itself, in this process.

    A block that moves makes dozens of objects and no cycle; looks are a sixth of a fetch of small ones.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)


def _serve(path: Path | None, linger: float) -> int:
    """
    Serve as a file says; return the exit code.

    Raises:
        ConfigError: A setting cannot be used.
        ConfigFileError: What it says is no JSON object.
        OSError: Likewise.
        _NoSlabError: Nobody has made the slab.
        _TakenError: The slab has an agent.
    """
    config = _read(path)
    directory = Path(config.store.path)
    if not _await_slab(directory, linger):
        told = f"{linger:g} s; --linger -1 waits for it"
        raise _NoSlabError(f"no engine has made a slab in {directory} within {told}")
    try:
        lock = AgentLock(directory)
    except BlockingIOError as exc:
        raise _TakenError(exc) from exc
    log = open_log(config.log, "agent")
    stack = contextlib.ExitStack()
    try:
        end = partial(_end_in_time, config.timeout, log, stack)
        anyio.run(Node(config, log, linger if linger >= 0 else None, end).run)
    except ConfigError:
        raise
    except Exception as exc:  # noqa: BLE001 - a bug, of a backend maybe
        log.error(RUNTIME_FAILED, error=repr(exc))  # noqa: TRY400 - a line, no traceback
        return 1
    finally:
        stack.close()
        close_log(log)
        lock.close()
    return 0


def _end_in_time(timeout: TimeoutConfig, log: Log, stack: contextlib.ExitStack) -> None:
    """
    Have the process end over calls that nobody can end, unless *stack* is closed before.

    It has the slab's lock: no other agent could serve its engines.
    """

    def give_up() -> None:
        try:
            log.error(RUNTIME_FAILED, error="a call of a tier does not end")
            close_log(log)
        finally:
            os._exit(1)

    seconds = timeout.shutdown + 2 * timeout.tier + _BEYOND_S
    timer = threading.Timer(seconds, give_up)
    timer.name, timer.daemon = "ucm-agent-end", True
    stack.callback(timer.cancel)
    timer.start()


def _await_slab(directory: Path, seconds: float) -> bool:
    """Wait until an engine has made the slab, so long or for ever; return whether it is there."""
    until = time.monotonic() + seconds
    while not (directory / "slab.json").exists():
        if seconds >= 0 and until < time.monotonic():
            return False
        time.sleep(_LOOK_S)
    return True


def _read(path: Path | None) -> UCMConfig:
    if path is None:
        text = sys.stdin.buffer.read(_MOST_TEXT)
    else:
        with path.open("rb") as file:
            text = file.read(_MOST_TEXT)
    try:
        given = msgspec.json.decode(text, type=dict[str, object])
    except DECODE_ERRORS as exc:
        name = "standard input" if path is None else str(path)
        remedy = "Give the settings that an engine has, as one JSON object."
        problem = f"no JSON object: {' '.join(str(exc).split())}"
        raise ConfigFileError("--config", name, problem, remedy) from exc
    config = UCMConfig.from_mapping(given)
    if not config.tiers and config.kv_events is KVEvents.OFF:
        raise ConfigError("tiers", [], "no tier", "Give one, such as type disk.")
    return config


if __name__ == "__main__":
    sys.exit(main())
