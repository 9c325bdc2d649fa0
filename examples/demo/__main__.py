# SPDX-License-Identifier: Apache-2.0
"""
Show on the real engine that a prefix which was computed once is loaded, not computed.

Three engine processes follow each other over one store: the first computes a prefix
of 4096 tokens (cold), forgets it and asks again (warm); the second is a restart;
before the third the bytes of the store are damaged (corrupted), and it has to notice
and compute. The exit status is 0 only if the tokens are equal in all of them and the
connector's own counters say that blocks were loaded where they should have been, and
only there.

It ends with a timeline of what all of them did: an HTML file, drawn from their logs.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.demo.phases import BLOCK_TOKENS, PREFIX_BLOCKS, PROMPT
from tests.e2e.engine import ROOT, process_group
from ucm.cli.main import main as ucm_command

HOME = Path("/dev/shm")
NEEDED_BYTES = 2 << 30
STRIPE = 64 << 10
Row = dict[str, Any]


def main() -> int:
    """Run the phases, print the table, and say what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument(
        "--timeline",
        type=Path,
        default=ROOT / ".demo" / "timeline.html",
        help="where to draw what happened",
    )
    options = parser.parse_args()
    require_room(HOME)
    started = time.monotonic()
    store = Path(tempfile.mkdtemp(prefix=f"ucm-demo-{os.getpid()}-", dir=HOME))
    logs = Path(tempfile.mkdtemp(prefix="ucm-demo-logs-"))
    try:
        progress(started, f"store in {store}")
        rows = run_engine("cold,warm", store, logs, started)
        rows += run_engine("restarted", store, logs, started)
        damaged = corrupt(store)
        progress(started, f"damaged {damaged} places of the store")
        rows += run_engine("corrupted", store, logs, started)
        timeline = draw_timeline(logs, options.timeline)
    finally:
        for directory in (store, logs):
            shutil.rmtree(directory, ignore_errors=True)
    for row in rows:
        row["exact"] = row["token_ids"] == rows[0]["token_ids"]
        row["speedup"] = rows[0]["ttft_s"] / row["ttft_s"]
    problems = judge({row["row"]: row for row in rows})
    print_table(rows)
    if options.json:
        result = {"ok": not problems, "problems": problems, "phases": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"What happened, to open in a browser: {timeline}")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"demo {'failed' if problems else 'passed'} in ", end="")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if problems else 0


def require_room(home: Path) -> None:
    """
    Make sure that the store fits where it is to be.

    Raises:
        SystemExit: It does not; says what to do.
    """
    left = shutil.disk_usage(home).free if home.is_dir() else 0
    if left < NEEDED_BYTES:
        raise SystemExit(
            f"The demo's store is memory: {NEEDED_BYTES >> 20} MiB in {home}, of which "
            f"{left >> 20} MiB are left. Make that mount larger, such as by docker run "
            "--shm-size=4g, or mount -o remount,size=4g."
        )


def progress(started: float, text: str) -> None:
    """Print one line of progress."""
    print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)


def run_engine(phases: str, store: Path, logs: Path, started: float) -> list[Row]:
    """
    Run one engine process and return its rows.

    Raises:
        SystemExit: It failed; the end of its log was printed.
    """
    command = [sys.executable, "-m", "examples.demo.phases", phases, str(store)]
    command.append(str(logs))
    rows = []
    with (
        tempfile.TemporaryFile("w+") as log,
        process_group(
            command,
            env={"VLLM_LOGGING_LEVEL": "WARNING"},
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            if "say" in event:
                progress(started, event["say"])
            else:
                rows.append(event)
        status = process.wait()
        if status or len(rows) != len(phases.split(",")):
            log.seek(0)
            print(log.read()[-8000:], file=sys.stderr)
            raise SystemExit(f"the engine of {phases} ended with status {status}")
    return rows


def draw_timeline(logs: Path, wanted: Path) -> Path:
    """
    Draw the timeline as an operator would, and return where it is.

    Raises:
        SystemExit: The logs tell of nothing; the command has said so.
    """
    wanted.parent.mkdir(parents=True, exist_ok=True)
    command = ["trace", "timeline", "-o", str(wanted), "--log", str(logs), "--json"]
    with contextlib.redirect_stdout(io.StringIO()):
        code = ucm_command(command)
    if code:
        raise SystemExit(code)
    return wanted.absolute()


def corrupt(store: Path) -> int:
    """Write garbage into every stretch of the slab that holds something."""
    garbage = random.Random(1).randbytes(64)
    places = 0
    for path in store.rglob("data"):
        with path.open("r+b") as data:
            for offset in range(0, path.stat().st_size, STRIPE):
                data.seek(offset)
                stretch = data.read(STRIPE)
                if stretch.count(0) < len(stretch):
                    data.seek(offset + STRIPE // 2)
                    data.write(garbage)
                    places += 1
    return places


def judge(rows: dict[str, Row]) -> list[str]:
    """Return what is not as it must be; nothing if all is well."""
    warm, restarted = rows["warm"], rows["restarted"]
    cold, corrupted = rows["cold"], rows["corrupted"]
    checks = {
        "cold: too few blocks were saved": cold["saved"] >= PREFIX_BLOCKS,
        "cold: blocks were loaded that nobody saved": cold["loaded"] == 0,
        "warm: too few blocks were loaded": warm["loaded"] >= PREFIX_BLOCKS,
        "restarted: too few blocks were loaded": restarted["loaded"] >= PREFIX_BLOCKS,
        "corrupted: damaged blocks were loaded": corrupted["loaded"] == 0,
        "corrupted: the damage went unnoticed": corrupted["load_failures"] > 0,
    }
    checks |= {
        f"{name}: other tokens than cold": row["exact"] for name, row in rows.items()
    }
    return [problem for problem, holds in checks.items() if not holds]


def print_table(rows: list[Row]) -> None:
    """Print one line per phase."""
    print(f"\nFirst token of a prompt of {len(PROMPT)} tokens\n")
    print(
        f"{'phase':<10} {'TTFT s':>7} {'speed-up':>9} {'tokens loaded':>14}"
        f" {'blocks saved':>13} {'blocks loaded':>14} {'failures':>9} {'exact':>6}"
    )
    for row in rows:
        print(
            f"{row['row']:<10} {row['ttft_s']:>7.2f} {row['speedup']:>8.1f}x"
            f" {row['loaded'] * BLOCK_TOKENS:>14} {row['saved']:>13}"
            f" {row['loaded']:>14} {row['load_failures']:>9}"
            f" {'yes' if row['exact'] else 'NO':>6}"
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
