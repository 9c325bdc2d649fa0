# SPDX-License-Identifier: Apache-2.0
"""
Kill -9 of a real engine, its agent or a tier's server, again and again, under load.

An engine with a tiny model answers prompts with and without reuse, over a slab and two tiers,
a disk and Valkey, each too small for what is asked. At random moments one of the three is
killed and started anew: the engine and the server by us, the agent by the engine.

What must hold: each answer is what the model alone says, and comes in time; after each kill
prompts hit again; and in the end nothing is left, neither in the engine (holds, lives, wants)
nor of the agent (flights, its socket), nor in the slab (reserved slots), nor any process.

Run ``python -m benchmarks.kills --kills 200``; exits with 1 if anything of that did not.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import psutil
from rich.console import Console
from rich.progress import track

from benchmarks.harness import run_of
from benchmarks.kills_side import STOP, answers, serve
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.backends.servers import Server, redis_server
from tests.e2e.engine import ROOT, run_function
from tests.e2e.forked import Forked, forked
from tests.e2e.models import LLAMA, make_model
from ucm.agent.protocol import SOCKET_NAME
from ucm.stores.slab import SlabStore

__all__ = ["Told", "listeners", "problems_of", "run", "searching", "users"]

_WEIGHTS = {"engine": 2, "agent": 5, "server": 5}
"""How often each is killed: an engine takes seconds to start."""
LATE_S = 60.0
"""An answer may take so long: far beyond our deadlines, as the machine may be busy."""
_PATIENCE_S = 180.0
_MOMENT_S = 1.0
_LOOK_S = 0.02


@attrs.define
class Told:
    """What came of it."""

    kills: Counter[str] = attrs.Factory(Counter)
    answers: int = 0
    wrong: int = 0
    late: int = 0
    slowest_s: float = 0.0
    slowest_hit_s: float = 0.0
    """From a restart to the end of the first prompts asked behind it that hit."""
    hit_tokens: Counter[str] = attrs.Factory(Counter)
    """By tier."""
    left: list[str] = attrs.Factory(list)
    """Of what was to be gone in the end."""

    @property
    def problems(self) -> list[str]:
        """What did not hold."""
        counts = {"wrong answers": self.wrong, "late answers": self.late}
        return [f"{n} {what}" for what, n in counts.items() if n] + self.left


class _Scene:
    """Engine, agent and server of one run."""

    def __init__(
        self,
        place: Path,
        model: Path,
        expected: Sequence[Sequence[int]],
        chance: random.Random,
        server: Server,
        url: str,
        told: Told,
    ) -> None:
        self._place, self._model, self._url = place, model, url
        self._expected, self._chance, self._told = expected, chance, told
        self._server = server
        self.up = contextlib.ExitStack()
        self._engine: Forked | None = None
        self._seen = 0
        """Lines of the engine that were looked at."""
        self._hits: Mapping[str, int] = {}
        self.end_said: Mapping[str, int] | None = None
        """What the engine says is left of it."""

    def start(self) -> None:
        """Start an engine."""
        self._seen, self._hits = 0, {}
        self._engine = self.up.enter_context(
            forked(
                serve,
                model=str(self._model),
                place=str(self._place),
                url=self._url,
                seed=self._chance.randrange(1 << 30),
            )
        )

    def kill(self, who: str) -> float:
        """Kill one of them at a moment at random; return when it was there again."""
        self.listen(self._chance.uniform(0.0, _MOMENT_S))
        if who == "engine":
            self.end_engine()
            self.start()
        elif who == "agent":
            killed = self.agent_pid()
            os.kill(killed, signal.SIGKILL)
            self.until(lambda: killed not in (now := [*self._peer()]) and bool(now))
        else:
            self._server.kill()
            self.listen(self._chance.uniform(0.0, _MOMENT_S))
            self._server.start()
        return time.monotonic()

    def end_engine(self) -> None:
        """Kill the engine, and take what it has still said."""
        engine = self._engine
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait(_PATIENCE_S)
        self._take()
        self._told.hit_tokens.update(self._hits)
        self.up.close()

    def stop_engine(self) -> None:
        """Have the engine end by itself."""
        (self._place / STOP).touch()
        assert self._engine is not None
        self._engine.wait(_PATIENCE_S)
        self._take()
        self._told.hit_tokens.update(self._hits)
        self.up.close()

    def agent_pid(self) -> int:
        """Return who listens at the agent's socket, once somebody does."""
        found: list[int] = []
        self.until(lambda: bool(found) or found.extend(self._peer()) is not None)
        return found[0]

    def _peer(self) -> Iterator[int]:
        return listeners(self._place / "slab")

    def await_hit(self, since: float) -> None:
        """Listen until a prompt that was asked later has hit; an engine has to start, too."""
        self.until(lambda: any(at > since and hit for at, hit in self._take()))
        spent = time.monotonic() - since
        self._told.slowest_hit_s = max(self._told.slowest_hit_s, spent)

    def listen(self, seconds: float) -> None:
        """Take answers for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._take()
            time.sleep(_LOOK_S)

    def until(self, is_so: Callable[[], bool]) -> None:
        """
        Wait until something is so.

        Raises:
            TimeoutError: It does not come about.
        """
        until = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > until:
                said = self._engine.stderr.read_text() if self._engine else ""
                raise TimeoutError(f"not within {_PATIENCE_S} s\n{said[-6000:]}")
            time.sleep(_LOOK_S)

    def _take(self) -> list[tuple[float, int]]:
        """Look at what the engine said since; return when it was asked, and its hits."""
        assert self._engine is not None
        lines = self._engine.stdout.read_text(errors="replace").splitlines(
            keepends=True
        )
        found = []
        for line in lines[self._seen :]:
            if not line.endswith("\n"):
                break
            self._seen += 1
            if line.startswith('{"left"'):
                self.end_said = json.loads(line)["left"]
            elif line.startswith('{"began"'):
                found.append(self._judge(json.loads(line)))
        return found

    def _judge(self, answer: dict[str, object]) -> tuple[float, int]:
        told, numbers = self._told, answer["numbers"]
        assert isinstance(numbers, list)
        said, seconds = answer["said"], float(str(answer["seconds"]))
        assert isinstance(said, list)
        told.answers += len(numbers)
        told.wrong += sum(
            list(self._expected[number]) != each
            for number, each in zip(numbers, said, strict=True)
        )
        told.late += seconds > LATE_S
        told.slowest_s = max(told.slowest_s, seconds)
        assert isinstance(answer["hits"], dict)
        self._hits = answer["hits"]
        return float(str(answer["began"])), int(str(answer["hit"]))


def run(
    kills: Sequence[str],
    seed: int,
    expected: Sequence[Sequence[int]] | None = None,
    each: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> Told:
    """
    Kill *kills* one after the other.

    Args:
        kills: ``engine``, ``agent`` or ``server`` each.
        seed: Of moments and prompts.
        expected: What the model alone says; None: ask it.
        each: Goes through *kills*, and may show how far it is.

    Raises:
        TimeoutError: Nobody answers, or hits, any more.
    """
    told, model = Told(), make_model(LLAMA)
    if expected is None:
        expected = run_function(answers, model=str(model))
    # A socket's path may not be long.
    with (
        tempfile.TemporaryDirectory(prefix="ucm-kills-", dir="/dev/shm") as directory,
        searching(),
    ):
        place = Path(directory)
        (place / "server").mkdir()
        with redis_server(place / "server") as (server, port):
            url, chance = f"redis://127.0.0.1:{port}/0", random.Random(seed)
            scene = _Scene(place, model, expected, chance, server, url, told)
            with scene.up:
                scene.start()
                scene.await_hit(time.monotonic())
                for who in each(kills):
                    told.kills[who] += 1
                    scene.await_hit(scene.kill(who))
                _end(scene, place, told)
    return told


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """Let agents find the code that we run."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _end(scene: _Scene, place: Path, told: Told) -> None:
    """End all of them, and see what is left."""
    agent = scene.agent_pid()
    scene.stop_engine()
    if scene.end_said is None:
        told.left.append("the engine did not end by itself")
    elif scene.end_said:
        told.left.append(f"the engine keeps {dict(scene.end_said)}")
    os.kill(agent, signal.SIGTERM)
    scene.until(lambda: not _lives(agent))
    told.left += [f"process {pid} still uses the slab" for pid in users(place)]
    told.left += [
        f"{path.name} is left"
        for path in (place / "slab").iterdir()
        if path.is_socket()
    ]
    told.left += problems_of(place / "slab")


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def listeners(slab: Path) -> Iterator[int]:
    """Yield who listens at the socket of a slab's agent, if somebody does."""
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            peer.connect(str(slab / SOCKET_NAME))
        except OSError:
            return
        said = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        yield struct.unpack("3i", said)[0]


def users(place: Path) -> Iterator[int]:
    """Yield who has files of the slab open, or mapped."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if f"{place}/slab" in maps:
                yield process.pid


def problems_of(slab: Path) -> list[str]:
    """Return what is not in order in a slab that nobody uses."""
    problems = []
    for index in sorted(slab.glob("index-*")):
        nbytes = int(index.name.split("-")[1].split(".")[0])
        with SlabStore.join(slab, block_bytes=nbytes, index_only=False) as store:
            problems += store.audit()
            if reserved := store.stats().reserved_blocks:
                problems.append(f"{reserved} slots are reserved")
    return problems


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    given, made = parser.parse_args(), run_of(parser)
    chance = random.Random(given.seed)
    kills = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=given.kills)
    console, began = Console(stderr=True), time.monotonic()
    told = run(
        kills,
        given.seed,
        each=lambda all_of: iter(track(all_of, "kills", console=console)),
    )
    result = {
        **made,
        "seconds": round(time.monotonic() - began, 1),
        **attrs.asdict(told),
    }
    text = json.dumps(result, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    print(text)
    for problem in told.problems:
        console.print(problem, style="red", markup=False)
    return 1 if told.problems else 0


if __name__ == "__main__":
    sys.exit(main())
