# SPDX-License-Identifier: Apache-2.0
"""
``python -m ucm.agent``: serve a slab's tiers.

Reads the settings that an engine has, one JSON object, from a file or standard input: at
least ``store`` and ``tiers``. Exit codes: 0 it ended as it should, or there was an agent
already; 1 it failed, which the log tells; 2 a setting cannot be used, in one line on standard error.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import anyio
import msgspec

from ucm.affinity import AffinityPlan, bind_thread, parse_cpulist
from ucm.agent.launch import REFUSED
from ucm.agent.node import AgentLock, Node
from ucm.config import KVEvents, UCMConfig
from ucm.errors import ConfigError
from ucm.tracing import RUNTIME_FAILED, close_log, open_log

_MOST_TEXT = 1 << 20
_MOST_PROBLEM = 2048
_LINGER_S = 10.0
_LOOK_S = 0.25


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
    parser.add_argument("--problem-fd", type=int, help="told what cannot be used")
    parser.add_argument(
        "--cpus",
        type=parse_cpulist,
        default=frozenset(),
        help="that it may use, such as 8-15,24; else those that it was started on",
    )
    arguments = parser.parse_args()
    bind_thread(AffinityPlan(arguments.cpus, "of the engine"))
    try:
        config = _read(arguments.config)
        directory = Path(config.store.path)
        if not _await_slab(directory, arguments.linger):
            return 0
        lock = AgentLock(directory)
    except BlockingIOError:
        return 0
    except (ConfigError, OSError, msgspec.DecodeError) as exc:
        return _refuse(exc, arguments.problem_fd)
    log = open_log(config.log, "agent")
    linger_s = arguments.linger if arguments.linger >= 0 else None
    try:
        anyio.run(Node(config, log, linger_s).run)
    except ConfigError as exc:
        return _refuse(exc, arguments.problem_fd)
    except Exception as exc:  # noqa: BLE001 - a bug, of a backend maybe
        log.error(RUNTIME_FAILED, error=repr(exc))  # noqa: TRY400 - a line, no traceback
        return 1
    finally:
        close_log(log)
        lock.close()
    return 0


def _refuse(problem: Exception, problem_fd: int | None) -> int:
    """Say why this agent cannot be used, also to the engine that started it."""
    sys.stderr.write(f"ucm agent: {problem}\n")
    if problem_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # the engine is gone
            os.write(problem_fd, str(problem).encode()[:_MOST_PROBLEM])
    return REFUSED


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
    config = UCMConfig.from_mapping(msgspec.json.decode(text, type=dict[str, object]))
    if not config.tiers and config.kv_events is KVEvents.OFF:
        raise ConfigError("tiers", [], "no tier", "Give one, such as type disk.")
    return config


if __name__ == "__main__":
    sys.exit(main())
