# SPDX-License-Identifier: Apache-2.0
"""Traces are read and made up, and the command and its page say what was found."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks.report import ROOT
from benchmarks.workloads import WORKLOADS, generate, write
from ucm.replay.policies import Ours
from ucm.replay.replaying import play
from ucm.replay.traces import Request, Trace, TraceError, read

STEP = 4
SECOND = 10**9


class TestTrace:
    def test_file_is_read_and_requests_of_a_millisecond_lie_apart(
        self, tmp_path: Path
    ) -> None:
        """Lives have moments of their own, as in an engine."""
        path = tmp_path / "some.jsonl"
        path.write_text(
            '{"timestamp": 0, "input_length": 900, "hash_ids": [0, 1]}\n'
            '{"timestamp": 0, "input_length": 512, "hash_ids": [0]}\n'
            '{"timestamp": 3000, "hash_ids": [0, 2]}\n'
        )
        assert Trace(
            "some",
            512,
            (
                Request(0, 900, (0, 1)),
                Request(1_500_000_000, 512, (0,)),
                Request(3_000_000_000, 1024, (0, 2)),
            ),
        ) == read(path, 512)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (b"", "no request with a block"),
            (b'{"timestamp": 0, "hash_ids": []}\n', "no request with a block"),
            (b"\x80\x02", "this is no text"),
            (b'{"timestamp": 0, "hash_i', "line 1: no JSON object; was the file cut"),
            (b"[" * 100_000, "line 1: no request"),
            (b"[]", "line 1: no request"),
            (b'{"block": 1}', "line 1: no request"),
            (b'{"timestamp": 0, "hash_ids": [0.5]}', "has to be a list of whole"),
            (
                b'{"timestamp": 0, "hash_ids": [' + b"9" * 30 + b"]}",
                "has to be a list of whole",
            ),
            (
                b'{"timestamp": 0, "hash_ids": [' + b"9" * 5000 + b"]}",
                "line 1: Exceeds the limit",
            ),
            (b'{"timestamp": NaN, "hash_ids": [0]}', "has to be milliseconds"),
            (b'{"timestamp": -1, "hash_ids": [0]}', "has to be milliseconds"),
            (b'{"timestamp": 1e400, "hash_ids": [0]}', "has to be milliseconds"),
            (
                b'{"timestamp": 0, "hash_ids": [0], "input_length": 9000}',
                "9000 tokens are not 1 blocks of 512",
            ),
            (
                b'{"timestamp": 5, "hash_ids": [0]}\n{"timestamp": 4, "hash_ids": [0]}',
                "line 2: arrives before",
            ),
            (
                b'{"timestamp": 0, "hash_ids": [0, 1]}\n{"timestamp": 1, "hash_ids": [1]}',
                "line 2: block 1 stands behind two",
            ),
            (b'{"timestamp": 0, "hash_ids": [7, 7]}', "block 7 stands behind two"),
        ],
    )
    def test_what_is_no_trace_is_told_in_one_line(
        self, text: bytes, told: str, tmp_path: Path
    ) -> None:
        """Cut off, foreign or empty: the file, the line and the reason."""
        path = tmp_path / "trace"
        path.write_bytes(text)
        with pytest.raises(TraceError, match=re.escape(told)) as caught:
            read(path, 512)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_made_up_trace_is_one_and_the_same_each_time(
        self, name: str, tmp_path: Path
    ) -> None:
        """What is written is what a file has to be, and a seed is all it takes."""
        made = generate(name, minutes=3, rate=1.0, seed=5, block_tokens=16)
        assert made == generate(name, minutes=3, rate=1.0, seed=5, block_tokens=16)
        assert made != generate(name, minutes=3, rate=1.0, seed=6, block_tokens=16)
        write(tmp_path / "trace", made)
        again = read(tmp_path / "trace", 16)
        assert [(each.num_tokens, each.blocks) for each in made.requests] == [
            (each.num_tokens, each.blocks) for each in again.requests
        ]

    def test_pair_workload_has_each_prompt_twice(self) -> None:
        """It is the worst case of those who wait for a second use."""
        made = generate("pair", minutes=30, rate=0.2, seed=1)
        early = [
            each.blocks for each in made.requests if each.moment < 10 * 60 * SECOND
        ]
        counts = [
            sum(other.blocks == blocks for other in made.requests) for blocks in early
        ]
        assert {2} == set(counts)

    def test_trace_without_requests_is_refused(self) -> None:
        """A rate that brings nobody is a mistake and no result."""
        with pytest.raises(TraceError, match="no session"):
            generate("chat", minutes=0.001, rate=0.001, seed=1)


class TestCommand:
    def test_what_is_made_up_is_replayed_and_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A row for each capacity and policy, a table, a plot, and the trace again."""
        words = "--generate chat --minutes 2 --policy ours --policy optimal --scenarios"
        files = (tmp_path / "a.json", tmp_path / "plots", tmp_path / "trace")
        options = zip(("--json", "--plots", "--write"), map(str, files), strict=True)
        replay.main([*words.split(), *itertools.chain.from_iterable(options)])
        (found,) = json.loads(files[0].read_text())
        assert 20 == len(found["rows"])
        assert {"ours", "optimal"} == {row["policy"] for row in found["rows"]}
        ours, optimal = found["rows"][10:12]
        assert 0 < ours["ratio"] < optimal["ratio"] < 1
        assert {"engines", "retention", "parts"} == {
            each["scenario"] for each in found["scenarios"]
        }
        assert replay.table(found) in capsys.readouterr().out
        assert ["generated_chat.svg"] == [path.name for path in files[1].iterdir()]
        assert found["requests"] == len(read(files[2], 512).requests)

    def test_ratio_is_of_tokens_and_of_prefixes(self) -> None:
        """Half a block counts as half a block, and one behind a gap not at all."""
        trace = Trace(
            "one",
            STEP,
            (
                Request(1, 6, (1, 2)),
                Request(2, 6, (1, 2)),
                Request(3, 8, (1, 3)),
            ),
        )
        score = play(trace, Ours(10, STEP))
        assert (20, 6 + 4) == (score.asked, score.hit)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("", "no trace"),
            ("/nowhere/trace", "No such file"),
            *(
                (f"--generate chat --minutes 1 --policy lru {name} /dev/null/x", "/x")
                for name in ("--write", "--json", "--plots")
            ),
        ],
    )
    def test_what_cannot_be_read_or_written_is_told(
        self, words: str, told: str
    ) -> None:
        """What is wrong, in one line, rather than a result of something else."""
        with pytest.raises(SystemExit, match=told):
            replay.main(words.split())

    @pytest.mark.parametrize(
        "words",
        ["--minutes nan", "--minutes inf", "--rate 0", "--block-tokens 0", "--rate x"],
    )
    def test_numbers_that_are_none_are_refused(self, words: str) -> None:
        """Traces without an end, or without a session, are made up by nobody."""
        with pytest.raises(SystemExit, match="2"):
            replay.main(["--generate", "chat", *words.split()])


class TestPage:
    def test_tables_and_plots_are_those_of_the_committed_results(self) -> None:
        """Nobody edits them by hand, and no new results lie about without them."""
        text = (ROOT / "benchmarks/results/replay.json").read_text(encoding="utf-8")
        results = json.loads(text)
        page = (ROOT / "docs/replay.md").read_text(encoding="utf-8")
        for found in results:
            assert replay.table(found) in page
        committed = {
            path.name: path.read_text(encoding="utf-8")
            for path in (ROOT / "docs/replay").iterdir()
        }
        assert committed == replay.plots(results)

    def test_ours_is_at_least_lru_everywhere(self) -> None:
        """In all results that are committed, at each capacity."""
        text = (ROOT / "benchmarks/results/replay.json").read_text(encoding="utf-8")
        for found in json.loads(text):
            ratios = {
                (row["capacity_blocks"], row["policy"]): row["ratio"]
                for row in found["rows"]
            }
            for capacity, policy in ratios:
                if policy == "lru":
                    assert ratios[capacity, "lru"] <= ratios[capacity, "ours"]
