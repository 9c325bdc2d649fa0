# SPDX-License-Identifier: Apache-2.0
"""The examples run, say what they promise, and fail where they should."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.cluster import __main__ as cluster
from examples.prefill_decode import judge
from tests.backends.mooncake_kit import why_not
from tests.e2e.engine import ROOT

BLOCKS = 4


def run_example(*arguments: str) -> str:
    """Run a module of the examples and return what it printed, if it went well."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert 0 == done.returncode, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_offline_inference_loads_for_the_second_answer() -> None:
    """S4-34: one long prompt twice: the second run loads, and says the same."""
    output = run_example("examples.offline_inference")
    assert "loaded: 8 blocks of 128 tokens" in output


class TestPrefillDecode:
    def test_decode_engine_loads_what_the_prefill_engine_has_computed(
        self, tmp_path: Path
    ) -> None:
        """Two engines over one slab: the producer saves and never loads, the consumer
        loads and never saves, and what it says is what it would compute itself."""
        result = tmp_path / "result.json"
        run_example(
            *("examples.prefill_decode", "--tokens", str(BLOCKS * 128)),
            *("--json", str(result), "--tiny"),
        )
        told = json.loads(result.read_text())
        assert told["ok"]
        assert [
            ("decode alone", "kv_consumer", 0, 0),
            ("prefill", "kv_producer", BLOCKS, 0),
            ("decode", "kv_consumer", 0, BLOCKS),
            ("prefill again", "kv_producer", 0, 0),
        ] == [
            tuple(row[name] for name in ("row", "role", "saved", "loaded"))
            for row in told["rows"]
        ]

    @pytest.mark.parametrize(
        ("name", "change", "problem"),
        [
            ("decode alone", {"loaded": 1}, "decode alone: something was loaded"),
            ("prefill", {"saved": 3}, "prefill: too few blocks were saved"),
            ("prefill again", {"loaded": 1}, "prefill: the producer has loaded"),
            ("decode", {"saved": 1}, "decode: the consumer has saved"),
            ("decode", {"loaded": 3}, "decode: too few blocks were loaded"),
            ("decode", {"token_ids": [2]}, "decode: other tokens than alone"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_whatever_is_wrong_is_named(
        self, name: str, change: dict[str, Any], problem: str
    ) -> None:
        """The verdict depends on each number that the table shows."""
        rows: dict[str, dict[str, Any]] = {
            "decode alone": {"saved": 0, "loaded": 0},
            "prefill": {"saved": BLOCKS, "loaded": 0},
            "decode": {"saved": 0, "loaded": BLOCKS},
            "prefill again": {"saved": 0, "loaded": 0},
        }
        for row in rows.values():
            row["token_ids"] = [1]
        assert [] == judge(rows, BLOCKS)
        rows[name] |= change
        assert [problem] == judge(rows, BLOCKS)


class TestCluster:
    def test_mooncake_that_cannot_run_is_told_of_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who lacks its libraries reads which at once, and what does without; not minutes later."""
        monkeypatch.setattr(cluster, "LIMIT_S", math.inf)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        for name in ("python", "mooncake_master"):
            (tmp_path / name).write_text("#!/bin/sh\necho libibverbs; exit 127\n")
            (tmp_path / name).chmod(0o755)
        with pytest.raises(SystemExit, match=r"--share[^$]*libibverbs"):
            cluster._mooncake(tmp_path).__enter__()

    def test_prompt_of_a_killed_engine_comes_from_what_engines_share(
        self, tmp_path: Path
    ) -> None:
        """A router follows KV events to the engine that holds a prompt; once that one is
        killed, another gets it from a Mooncake Store, and says the same."""
        reason, environment = why_not(tmp_path)
        share = ["--share", str(tmp_path / "share")] if reason else []
        result = tmp_path / "result.json"
        command = ["-m", "examples.cluster", "--json", str(result), *share]
        if not reason:
            command[:1] = ["-m", "tests.own_network"]
        done = subprocess.run(
            [*([] if reason else ["unshare", "-rn"]), sys.executable, *command],
            cwd=ROOT,
            env=(environment or os.environ) | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert 0 == done.returncode, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        told = json.loads(result.read_text())
        assert [0, 512, 512, 512, 0] == [row["cached"] for row in told["rows"]]
