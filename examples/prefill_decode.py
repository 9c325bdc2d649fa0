# SPDX-License-Identifier: Apache-2.0
"""
Show prefill and decode as two engines over one store.

Two engine processes run side by side over one slab: one only saves (``kv_producer``),
the other only loads (``kv_consumer``). The decode engine first answers a long prompt by
itself, which is what it must say later and how long it takes unaided. Then the prefill
engine computes the prompt, and the decode engine, which has forgotten it, is asked once
more: it loads what the other has computed. The exit status is 0 only if the tokens are
equal and the connector's counters say that each engine did its own part and no more.

Run as ``python -m examples.prefill_decode``.
"""

import argparse
import contextlib
import faulthandler
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from examples.demo.phases import BLOCK_TOKENS, LOADED, SAVED
from tests.e2e.engine import (
    await_counter,
    connector_config,
    counter,
    generate,
    in_process_engine,
    process_group,
    reset_prefix_cache,
)
from tests.e2e.models import LLAMA, LLAMA_DEMO, Recipe, make_model

PREFILL, DECODE = "kv_producer", "kv_consumer"
CONTINUATION = 16
QUESTION = 9
"""Tokens of the prompt behind the whole blocks of its prefix."""
TIMEOUT = 300.0
Row = dict[str, Any]


def main() -> int:
    """Ask both engines in turn, print the table, and say what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m examples.prefill_decode")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix")
    parser.add_argument(
        "--tiny", action="store_true", help="a model too small to take any time"
    )
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        role, store = options.engine
        answer(role, Path(store), options.tokens, LLAMA if options.tiny else LLAMA_DEMO)
        return 0
    started = time.monotonic()
    vocabulary = 500 if options.tiny else 8000
    tokens = [3 + (7919 * i + i * i // 7) % vocabulary for i in range(options.tokens)]
    tokens += range(100, 100 + QUESTION)
    blocks = options.tokens // BLOCK_TOKENS
    with contextlib.ExitStack() as stack:
        store = Path(tempfile.mkdtemp(prefix="ucm-prefill-decode-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, store, ignore_errors=True)
        print("starting a prefill engine and a decode engine", flush=True)
        engines = {
            role: stack.enter_context(_engine(role, store, options))
            for role in (PREFILL, DECODE)
        }
        rows = [
            _ask(engines[DECODE], "decode alone", tokens),
            _ask(engines[PREFILL], "prefill", tokens, saves=blocks),
            _ask(engines[DECODE], "decode", tokens),
            _ask(engines[PREFILL], "prefill again", tokens),
        ]
    problems = judge({row["row"]: row for row in rows}, blocks)
    _print_table(rows, len(tokens))
    if options.json:
        result = {"ok": not problems, "problems": problems, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"FAILED: {problem}")
    verdict = "failed" if problems else "passed"
    print(f"prefill and decode {verdict} in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


def judge(rows: dict[str, Row], blocks: int) -> list[str]:
    """Return what is not as it must be; nothing if all is well."""
    alone, decode = rows["decode alone"], rows["decode"]
    prefill, again = rows["prefill"], rows["prefill again"]
    checks = {
        "decode alone: something was loaded": alone["loaded"] == 0,
        "prefill: too few blocks were saved": prefill["saved"] >= blocks,
        "decode: too few blocks were loaded": decode["loaded"] >= blocks,
        "decode: the consumer has saved": alone["saved"] + decode["saved"] == 0,
        "prefill: the producer has loaded": prefill["loaded"] + again["loaded"] == 0,
    }
    checks |= {
        f"{name}: other tokens than alone": row["token_ids"] == alone["token_ids"]
        for name, row in rows.items()
    }
    return [problem for problem, holds in checks.items() if not holds]


@contextlib.contextmanager
def _engine(
    role: str, store: Path, options: argparse.Namespace
) -> Iterator[subprocess.Popen[str]]:
    """Run an engine process for the length of the block; its log is shown if it dies."""
    command = [sys.executable, "-m", "examples.prefill_decode"]
    command += ["--engine", role, str(store), "--tokens", str(options.tokens)]
    command += ["--tiny"] if options.tiny else []
    with (
        tempfile.TemporaryFile("w+") as log,
        process_group(
            command,
            env={"VLLM_LOGGING_LEVEL": "WARNING"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            yield process
            _pipe(process.stdin).close()  # no more requests
            process.wait(TIMEOUT)
        finally:
            if process.poll():
                log.seek(0)
                print(log.read()[-8000:], file=sys.stderr)


def _ask(
    engine: subprocess.Popen[str], name: str, tokens: list[int], saves: int = 0
) -> Row:
    """
    Let an engine answer the prompt, and return its row of the table.

    Raises:
        SystemExit: The engine has ended.
    """
    request = {"row": name, "prompt": tokens, "saves": saves}
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is said below
        _pipe(engine.stdin).write(f"{json.dumps(request)}\n")
        _pipe(engine.stdin).flush()
    for line in _pipe(engine.stdout):
        if line.startswith("{"):
            row: Row = json.loads(line)
            print(f"{name}: first token after {row['ttft_s']:.2f} s", flush=True)
            return row
    raise SystemExit(f"the engine for '{name}' ended with status {engine.wait()}")


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _print_table(rows: list[Row], tokens: int) -> None:
    print(f"\nFirst token of a prompt of {tokens} tokens\n")
    print(
        f"{'':<14} {'role':<12} {'TTFT s':>7} {'tokens loaded':>14}"
        f" {'blocks saved':>13} {'exact':>6}"
    )
    for row in rows:
        exact = row["token_ids"] == rows[0]["token_ids"]
        print(
            f"{row['row']:<14} {row['role']:<12} {row['ttft_s']:>7.2f}"
            f" {row['loaded'] * BLOCK_TOKENS:>14} {row['saved']:>13}"
            f" {'yes' if exact else 'NO':>6}"
        )
    print()


# -- in an engine's process --------------------------------------------------------


def answer(role: str, store: Path, tokens: int, recipe: Recipe) -> None:
    """Run one engine, and answer a request per line until there are no more."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    config = connector_config(type="slab", path=str(store / "slab"), capacity="1GiB")
    with in_process_engine(
        make_model(recipe),
        kv_transfer_config=config | {"kv_role": role},
        kv_cache_memory_bytes=512 << 20,
        block_size=BLOCK_TOKENS,
        max_model_len=tokens + QUESTION + CONTINUATION + 1,
        max_num_seqs=2,
        use_tqdm_on_load=False,
    ) as llm:
        # The first pass of each shape pays for kernels that are built on demand. The
        # prompt is this engine's own, so that it is computed and not loaded.
        generate(
            llm, [[4 if role == PREFILL else 5] * (tokens + QUESTION)], max_tokens=2
        )
        if role == PREFILL:  # or the first row would count these blocks as its own
            await_counter(llm, SAVED, tokens // BLOCK_TOKENS)
        for line in sys.stdin:
            row = _row(llm, json.loads(line))
            print(json.dumps({"role": role, **row}), flush=True)


def _row(llm: Any, request: Row) -> Row:
    """Time the first token of a forgotten prompt, then decode on."""
    reset_prefix_cache(llm)
    before = {name: counter(llm, name) for name in (SAVED, LOADED)}
    first = generate(llm, [request["prompt"]], max_tokens=1)
    more = generate(llm, [request["prompt"]], max_tokens=CONTINUATION)
    if request["saves"]:
        await_counter(llm, SAVED, before[SAVED] + request["saves"])
    return {
        "row": request["row"],
        "ttft_s": first.elapsed_s,
        "token_ids": first.token_ids[0] + more.token_ids[0],
        "saved": counter(llm, SAVED) - before[SAVED],
        "loaded": counter(llm, LOADED) - before[LOADED],
    }


if __name__ == "__main__":
    sys.exit(main())
