# SPDX-License-Identifier: Apache-2.0
"""
The code of the documentation runs: each Python block, and each command of ours.

A page speaks of a machine: a slab, logs, a model, a trace. Here is one like it, and what
the page calls by its path lies in a directory of the test's instead.
"""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

from tests.cli.call import call
from tests.cli.store_kit import CHAT, CODE, keys_of
from tests.doctor.test_sizing import LLAMA
from tests.story.logs import run_of
from tests.test_docs import DOCS, ROOT, Block, blocks
from ucm.cli.main import NOT_WELL, cli
from ucm.exporter import Exporter
from ucm.status import StatusServer
from ucm.stores.slab import SlabStore
from ucm.testing.store_blocks import save

PROMPT = list(range(16))
"""Of the blocks in the slab."""
OTHERS = {
    "pip": "changes what is installed",
    "python3": "downloads packages",
    "make": "runs all tests, or the demo; its targets are looked up",
    "python": "minutes each: the smallest case of each benchmark runs in "
    "tests/test_benchmarks.py, each example in tests/e2e/test_examples.py",
    "vllm": "needs a model, a GPU or an NPU; its settings are read in "
    "tests/test_docs.py, and tests/e2e/test_serve.py serves with the same",
    "curl": "asks a server; tests/e2e/test_serve.py asks the same",
    "benchmarks/gpu_all.sh": "needs a GPU",
    "source": "needs Ascend's toolkit",
}
"""What a page tells to run that does not run here, by its first word, and why."""
AROUND = {"export", "echo", "ask", "$ask", "mkdir", "mv", "for", "done"}
"""Words of the shell, and of the commands above, which do nothing by themselves."""


def commands_in(block: Block) -> Iterator[str]:
    """Yield each command of a block as one text, also if it goes over several lines."""
    held = ""
    for line in block.text.splitlines():
        if block.language == "console" and not held and not line.startswith("$ "):
            continue
        held += line if held else line.removeprefix("$ ")
        try:
            is_whole = not held.endswith("\\") and shlex.split(held, comments=True)
        except ValueError:  # a quote is open
            is_whole = False
        if is_whole:
            yield held
        held = "" if is_whole or not held.strip() else f"{held}\n"


def first_word(command: str) -> str:
    """Return what is run, behind what is set for it."""
    words = shlex.split(command, comments=True)
    named = next((word for word in words if not re.match(r"[A-Z_]+=", word)), "")
    return named.partition("=")[0]


def all_commands() -> list[str]:
    """Return each command of every page that is no help text."""
    shells = blocks("console", "bash", "shell", "sh")
    return [command for block in shells for command in commands_in(block)]


def all_examples(command: click.Command = cli) -> Iterator[str]:
    """Yield the examples that each command's help ends with, as on its page."""
    lines = (command.epilog or "").splitlines()[2:]
    yield from (line.strip() for line in lines)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from all_examples(found)


OURS = sorted({each for each in all_commands() if first_word(each) == "ucm"})
EXAMPLES = sorted(set(all_examples()))


class Machine:
    """What the pages speak of, below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        slab = root / "slab"
        keys = keys_of(CHAT, PROMPT)
        with SlabStore(
            path=str(slab), capacity_bytes=4 << 20, block_bytes=8192
        ) as store:
            store.describe(CHAT)
            store.describe(CODE)
            save(store, keys)
        log = run_of(root / "log")
        (root / "ids.json").write_text(json.dumps(PROMPT))
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(LLAMA))
        requests = [
            {"timestamp": at, "input_length": 512, "hash_ids": [at % 2]}
            for at in range(4)
        ]
        trace = "".join(f"{json.dumps(each)}\n" for each in requests)
        (root / "requests.jsonl").write_text(trace)
        serve = (ROOT / "examples" / "serve.yaml").read_text()
        serve = serve.replace("/dev/shm/ucm", str(root / "new"))
        (root / "serve.yaml").write_text(serve.replace("32GiB", "8MiB"))
        (root / "examples").symlink_to(ROOT / "examples")
        (root / "ucm.yaml").write_text("queue: {window: 7}\n")
        (root / "a").mkdir()
        (root / "b").mkdir()
        self.names = {
            "/dev/shm/ucm-1000": str(slab),
            "/dev/shm/ucm": str(slab),
            "ucm bench /dev/shm /mnt/nvme": f"ucm bench {root / 'a'} {root / 'b'}",
            "/var/log/ucm-old": str(log),
            "/var/log/ucm-new": str(log),
            "/var/log/ucm": str(log),
            "/var/lib/ucm/chat.ucmx": str(root / "chat.ucmx"),
            "/models/Qwen3-8B": str(root / "model"),
            "/etc/ucm.yaml": str(root / "ucm.yaml"),
            "TRACE.jsonl": "requests.jsonl",
            "cmpl-4f2a": "r1",
            "0267c1...9a": keys[0].hex(),
            **dict.fromkeys(("3f2a81c0", "3f2a", "67c1a0", "67c1"), CHAT.digest.hex()),
            **dict.fromkeys(("8f02bb", "8f02"), CODE.digest.hex()),
        }

    def here(self, command: str) -> str:
        """Return a command of a page as it is for this machine."""
        longest = sorted(self.names, key=len, reverse=True)
        known = "|".join(map(re.escape, longest))
        told = re.sub(known, lambda found: self.names[found[0]], command)
        if "store warm" in told:
            told = told.replace("100GiB", "4MiB")
        if first_word(told) == "ucm" and "ucm bench" in told:
            told += " --size 1MiB --seconds 0.01"
        return told

    def run(self, command: str) -> tuple[int, str]:
        """Run a command, while an engine is there that is well; return code and error."""
        told = self.here(command)
        words = shlex.split(told, comments=True)
        tells = {"engine": "e", "gauges": {"ucm_healthy": 1}}
        server = StatusServer(self.root / "slab", "scheduler", lambda: tells)
        with contextlib.closing(server):
            if words[0] == "ucm" and not {"|", ">"} & {*words}:
                done = call(*words[1:])
                return done.code, done.err
            shell = in_a_shell(told)
            return shell.returncode, shell.stderr


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose directory is the current one."""
    made = Machine(tmp_path)
    monkeypatch.chdir(tmp_path)
    return made


def in_a_shell(text: str) -> subprocess.CompletedProcess[str]:
    """Run text in a shell that has ``ucm``, and where another machine is this one."""
    code = "import sys; from ucm.cli.main import main; sys.exit(main())"
    python = shlex.quote(sys.executable)
    prelude = (
        f'set -eo pipefail; ucm() {{ {python} -c {shlex.quote(code)} "$@"; }}; '
        'ssh() { shift; "$@"; }\n'
    )
    return subprocess.run(
        ["bash", "-c", prelude + text],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )


class TestCommands:
    @pytest.mark.parametrize("command", sorted({*OURS, *EXAMPLES}))
    @pytest.mark.slow
    def test_command_of_a_page_runs(self, machine: Machine, command: str) -> None:
        """As it stands on the page, on a machine that has what it names: an answer, and
        no complaint. What is found not to be well is an answer too."""
        if "ucmx" in command and "export" not in command:
            assert 0 == call("store", "export", "slab", "chat.ucmx").code
        code, complaint = machine.run(command)
        assert "ucm: " not in complaint
        finds = command.startswith(("ucm doctor", "ucm keys diff"))
        assert code in ((0, NOT_WELL) if finds else (0,)), complaint

    def test_settings_of_a_page_are_taken(self, machine: Machine) -> None:
        """A variable stands above a file, as the page of settings says; the whole block
        runs in a shell."""
        (block,) = (
            each
            for each in blocks("bash")
            if each.page.name == "configuration.md" and "config show" in each.text
        )
        done = in_a_shell(machine.here(block.text))
        assert (0, "") == (done.returncode, done.stderr)
        for told in ("UCM_STORE__CAPACITY", str(machine.root / "ucm.yaml")):
            assert told in done.stdout

    def test_every_other_command_has_a_reason_not_to_run(self) -> None:
        """The list is short, and has none that no page tells any more."""
        found = {first_word(each) for each in all_commands()} - {"ucm"}
        assert found == OTHERS.keys() | AROUND & found
        assert OURS
        assert EXAMPLES


class Computed:
    """What a host on a page has, and what it computes."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {
            "array0": np.zeros((8, 16, 4), np.float32),
            "array1": np.zeros((8, 16, 4), np.float32),
            "tokens": list(range(64)),
            "blocks": [1, 2, 3, 4],
            "tenant": b"somebody",
            "compute_from": self._compute,
        }
        self.started_at: list[int] = []
        self.given["array0"][1:5] = 7.0

    def _compute(self, block: int) -> None:
        self.started_at.append(block)


async def run_blocks(texts: list[str], names: dict[str, Any]) -> None:
    """Run the blocks of a page one behind the other, with await where it stands."""
    for text in texts:
        code = compile(text, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result


def texts_of(page: str, **here: str) -> list[str]:
    """Return the Python blocks of a page, with names of its machine as they are here."""
    texts = [block.text for block in blocks("python") if block.page == DOCS / page]
    for text in here:
        assert any(text in each for each in texts), text
    known = "|".join(map(re.escape, here)) or "(?!)"
    return [re.sub(known, lambda found: here[found[0]], text) for text in texts]


class TestPython:
    @pytest.mark.slow
    def test_host_of_the_page_on_embedding_loads_what_it_saved(
        self, tmp_path: Path
    ) -> None:
        """The page from top to bottom, twice: computed, then loaded; and its metrics."""
        from prometheus_client import REGISTRY

        slab = str(tmp_path / "slab")
        here = {"/dev/shm/my-server": slab, "64GiB": "4MiB", "9100": "0"}
        texts = texts_of("embedding.md", **here)
        host = Computed()
        asyncio.run(run_blocks(texts[:2], dict(host.given)))
        host.given["array0"][:] = 0.0
        names = dict(host.given)
        before = {*REGISTRY._collector_to_names}
        try:
            asyncio.run(run_blocks(texts, names))
            port = names["server"].server_port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                told = answer.read().decode()
        finally:
            names["server"].shutdown()
            names["server"].server_close()
            names["thread"].join(60.0)
            for each in {*REGISTRY._collector_to_names} - before:
                assert isinstance(each, Exporter)
                REGISTRY.unregister(each)
        assert [0, 4] == host.started_at
        assert 7.0 == host.given["array0"][1:5].min()
        assert re.search(r'ucm_hit_parts_total\{tier="\w+"\} 4\.0', told)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
    def test_host_of_the_page_on_transformers_restores_what_it_saved(
        self, tmp_path: Path
    ) -> None:
        """The page's programs twice: nothing is found, then two blocks of the prompt, and
        the answers are the same."""
        from anyio import to_thread

        import tests.engine_imports  # noqa: F401 - warnings of others end here
        from tests.e2e.models import LLAMA
        from tests.integration.transformers.kit import loaded_blocks, model_of, prompt

        here = {"/dev/shm/prompts": str(tmp_path / "slab"), "64GiB": "64MiB"}
        texts = texts_of("transformers.md", **here)
        told = []
        for _ in range(2):
            names: dict[str, Any] = {
                "model": model_of(LLAMA),
                "tokenizer": lambda *_, **__: SimpleNamespace(input_ids=prompt(1, 40)),
                "text": "",
                "to_thread": to_thread,
            }
            asyncio.run(run_blocks(texts, names))
            said = names["done"].sequences.tolist(), names["result"].generated_tokens
            told.append((names["num_tokens"], loaded_blocks(names["below"]), said))
        assert [(0, 0, said), (32, 2, said)] == told

    def test_every_block_is_run(self) -> None:
        """By a test above, or that of the quick start (``tests/test_docs.py``). Who writes
        Python on another page gives it a test here."""
        assert {"embedding.md", "quickstart.md", "transformers.md"} == {
            block.page.name for block in blocks("python")
        }
