# SPDX-License-Identifier: Apache-2.0
"""SGLang behind one of our doors, as the contract of doors drives it."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from tests.cache.test_tiers import until
from tests.e2e import models
from tests.sglang.environment import ROOT, environment
from ucm.testing.door import POOL, ROOM, Ability, Door, Prompts, Setting

__all__ = ["Forks", "SGLangDoor", "shared_forks"]

_LIMIT_S = 240
_CPUS = "SGLANG_CPU_OMP_THREADS_BIND"
"""Each rank's; without it SGLang wants a NUMA node for each. A CPU without AMX ignores it."""
_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""Ranks that find different memory free end the engine; here they share it with all else."""
_ENGINE = {
    "attention_backend": "torch_native",
    "device": "cpu",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "grammar_backend": "none",
    "log_level": "warning",
    "max_running_requests": 64,
    "mem_fraction_static": 0.1,
    "page_size": 16,
    "random_seed": 0,
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,
    "skip_tokenizer_init": True,
}


class Forks:
    """The process off which engines fork, for as long as tests need it."""

    def __init__(self) -> None:
        site = environment()
        self.root = Path(tempfile.mkdtemp(prefix="ucm-sglang-", dir="/dev/shm"))
        self._log = (self.root / "forks.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.child"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
        )

    def start(self, args: dict[str, Any], environment: dict[str, str]) -> "Engine":
        """Fork an engine; returns when it serves."""
        return Engine(self, args, environment)

    def ask(self, wanted: dict[str, Any]) -> None:
        """Have an engine forked."""
        assert self._process.stdin is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)

    def told(self) -> str:
        """Return the end of what was logged."""
        return "\n".join(path.read_text()[-4000:] for path in self.root.glob("*.log"))

    def close(self) -> None:
        """End it; engines end by themselves, as nobody asks them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._log.close()
            shutil.rmtree(self.root, ignore_errors=True)


@functools.cache
def shared_forks() -> Forks:
    """Return the one of this test process; SGLang takes half a minute to import."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


class Engine:
    """One engine, by the line; see ``child.Serving``."""

    def __init__(
        self, forks: Forks, args: dict[str, Any], environment: dict[str, str]
    ) -> None:
        self._forks = forks
        with socket.socket(socket.AF_UNIX) as listener:
            path = str(forks.root / f"{os.urandom(4).hex()}.sock")
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(_LIMIT_S)
            log = str(forks.root / "engine.log")
            forks.ask(
                {"socket": path, "log": log, "args": args, "environment": environment}
            )
            try:
                self._connection, _ = listener.accept()
            except TimeoutError:
                raise AssertionError(forks.told()) from None
        self._connection.settimeout(_LIMIT_S)
        self._lines = self._connection.makefile("rw")
        try:
            self._group = self._answer()
        except AssertionError:
            self._hang_up()
            raise

    def ask(self, do: str, **given: Any) -> Any:
        """Have it do something; return what it says."""
        print(json.dumps({"do": do, **given}), file=self._lines, flush=True)
        return self._answer()

    def stop(self) -> None:
        """End it in order."""
        self.ask("stop")
        self._hang_up()

    def kill(self) -> None:
        """End all its processes as they are."""
        os.killpg(self._group, signal.SIGKILL)
        self._hang_up()

    def _hang_up(self) -> None:
        self._connection.close()
        self._lines.close()

    def _answer(self) -> Any:
        line = self._lines.readline()
        answer = json.loads(line) if line else {"error": "it has died"}
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self._forks.told()}")
        return answer["said"]


class SGLangDoor(Door):
    """
    SGLang in processes of its own.

    Args:
        forks: Off which they fork.
        layout: Of HiCache's host pool; empty: the linker.
        environment: Variables of the engine.
        model: What it serves.
        args: More of SGLang's own.
        stage_bytes: A setting of ours.
        ranks: Processes that each have a part of every layer.
    """

    block_tokens = 16
    cannot = MappingProxyType(
        {
            Ability.TIERS: "two starts take half a minute; it passes without this line, "
            "and tests/integration/sglang/test_tiers.py shows it without the engine"
        }
    )

    def __init__(
        self,
        forks: Forks,
        layout: str = "",
        environment: Mapping[str, str] | None = None,
        model: models.Recipe = models.LLAMA,
        args: Mapping[str, Any] | None = None,
        stage_bytes: str = "16MiB",
        ranks: int = 1,
    ) -> None:
        self._forks = forks
        self._model = model
        self._args = {"tp_size": ranks, **(args or {})}
        self._layout = layout
        self._stage_bytes = stage_bytes
        self._environment = dict(environment or {})
        if ranks > 1:
            self._environment[_CPUS] = "|".join("0" * ranks)
            self._environment[_BALANCE] = "0"
        self._engine: Engine | None = None
        self._block_bytes = 4 * 2 * 16 * 2 * 32 * 4

    @property
    def engine(self) -> Engine:
        """The one that runs."""
        assert self._engine is not None
        return self._engine

    def start(self, slab: Path, setting: Setting) -> None:
        """Start over a slab."""
        capacity = "64MiB"
        if setting is Setting.SMALL:
            capacity = str(ROOM * self._block_bytes)
        ours = {
            "store": {"path": str(slab), "capacity": capacity},
            "log": {"level": "off"},
            "stage_bytes": self._stage_bytes,
            "tiers": list(self.tiers),
            "timeout": {"fetch": 60.0},  # of a busy machine
        }
        self._engine = self._start(setting, self._hicache(ours) or _linker(ours))
        if self.tiers:
            until(lambda: self.engine.ask("look")["are_served"])

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Ask for all at once."""
        said: Prompts = self.engine.ask(
            "generate", prompts=list(prompts), num_tokens=num_tokens
        )
        return said

    def loaded_blocks(self) -> int:
        """Ask our library in the scheduler's process."""
        return int(self.engine.ask("look")["loaded"])

    def fetched_blocks(self) -> int:
        """Ask our library in the scheduler's process."""
        return int(self.engine.ask("look")["fetched"])

    def settle(self) -> None:
        """Wait in the scheduler's process."""
        self.engine.ask("settle")

    def forget(self) -> None:
        """Flush; the engine refuses while it still ends a request."""
        tries = iter(range(1000))
        while not self.engine.ask("flush"):
            assert next(tries) < 999

    def stop(self) -> None:
        """End it in order."""
        engine, self._engine = self.engine, None
        engine.stop()

    def kill(self) -> None:
        """SIGKILL for all of its processes."""
        engine, self._engine = self.engine, None
        engine.kill()

    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Ask an engine without a cache of any kind."""
        with self.alone(setting):
            return self.generate(prompts, num_tokens)

    @contextlib.contextmanager
    def alone(self, setting: Setting = Setting.PLAIN) -> Iterator[None]:
        """Have an engine without a cache of any kind."""
        plain = Setting.PLAIN if setting is Setting.TIGHT else setting
        self._engine = self._start(plain, {"disable_radix_cache": True})
        try:
            yield
        finally:
            self.stop()

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Abort each one piece later than the one before."""
        self.engine.ask("abandon", prompts=list(prompts))

    def preemptions(self) -> int:
        """SGLang calls it a retraction."""
        return int(self.engine.ask("retractions"))

    def left(self) -> Mapping[str, int]:
        """Return what either half keeps."""
        kept = self.engine.ask("look")["left"]
        return {name: size for name, size in kept.items() if size}

    def blocks_of(self, prompt: list[int]) -> int:
        """SGLang computes the last token of a prompt in any case."""
        return (len(prompt) - 1) // self.block_tokens

    def _start(self, setting: Setting, more: Mapping[str, Any]) -> Engine:
        recipe = self._model
        if setting is Setting.FOREIGN:
            recipe = attrs.evolve(recipe, name=f"{recipe.name}-other", seed=8)
        pages = POOL if setting is Setting.TIGHT else 512
        args = {
            **_ENGINE,
            "model_path": str(models.make_model(recipe)),
            "max_total_tokens": pages * self.block_tokens,
            # Let in more than there will be room for.
            "schedule_conservativeness": 0.01,
            **more,
            **self._args,
        }
        return self._forks.start(args, self._environment)

    def _hicache(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        if not self._layout:
            return {}
        extra = {
            "backend_name": "ucm",
            "module_path": "ucm.integration.sglang.hicache",
            "class_name": "Storage",
            "interface_v1": 1,
            "prefetch_threshold": 1,
            **ours,
        }
        return {
            "enable_hierarchical_cache": True,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": self._layout,
            "hicache_ratio": 4.0,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(extra),
            "hicache_storage_prefetch_policy": "wait_complete",
        }


def _linker(ours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "Linker",
            "linker_module_path": "ucm.integration.sglang.linker",
            "linker_extra_config": {**ours, "patience": 60},
        },
    }
