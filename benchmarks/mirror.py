# SPDX-License-Identifier: Apache-2.0
"""
Soak the mirror of a subscriber to KV events, with eviction from slab and disk all the time.

A real engine with a tiny model is asked at random more than slab and disk hold, its own cache is
emptied and its agent killed now and then. Behind each round what the subscriber of
``examples/kv_mirror.py`` takes to be in slab and disk is compared with what is there.

Run ``python -m benchmarks.mirror --rounds 40``; exits with 1 if they were not equal.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.harness import run_of
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function
from tests.e2e.mirrored import soaked
from tests.e2e.models import LLAMA, make_model


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--acts", type=int, default=40, help="of each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    given, made = parser.parse_args(), run_of(parser)
    began, problem, done = time.monotonic(), "", {}
    try:
        done = run_function(
            soaked,
            timeout=36_000.0,
            model=str(make_model(LLAMA)),
            seed=given.seed,
            rounds=given.rounds,
            acts=given.acts,
        )
    except AssertionError as exc:
        problem = str(exc)
    result = {
        **made,
        "seconds": round(time.monotonic() - began, 1),
        "done": done,
        "problem": problem,
    }
    text = json.dumps(result, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    print(text)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
