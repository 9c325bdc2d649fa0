# SPDX-License-Identifier: Apache-2.0
"""Numbers over all lines, exact where they can be and bounded everywhere."""

import json

import pytest

from tests.story.logs import ended, missed, run_of, settled
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lines import parse
from ucm.story.totals import Durations, Tally, totals_of


def totals(*lines):
    """Return what lines amount to."""
    return totals_of(parse(json.dumps(each).encode()) for each in lines)


class TestTotals:
    def test_a_run_is_added_up(self, tmp_path):
        """Outcomes, tokens, bytes and reasons of all processes are in one sum."""
        files = find_logs(run_of(tmp_path / "run"))
        told = totals_of(read_logs(files, Reading())).to_dict()
        assert {"finished": 2, "aborted": 1, "preempted": 1} == told["requests"]
        assert {"load": {"failed": 1}, "save": {"committed": 1, "refused": 1}} == told[
            "tickets"
        ]
        assert {"evicted": 1} == told["misses"]
        assert {"evicted": 64} == told["missing_tokens"]
        assert {"deadline": 1} == told["failed_loads"]

    def test_a_hit_ratio_says_of_what(self):
        """X-10: a ratio stands beside its numerator and its denominator."""
        told = totals(ended(), ended("r2", loaded_tokens=0)).to_dict()["hit_ratio"]
        assert {"loaded_tokens": 64, "prompt_tokens": 200, "ratio": 0.32} == told

    def test_what_was_preempted_is_no_hit(self):
        """X-10: it loads again what it computed, and more than its prompt had."""
        lines = ended(), ended("r2", loaded_tokens=1408, preemptions=4)
        told = totals(*lines).to_dict()
        assert {"loaded_tokens": 64, "prompt_tokens": 100, "ratio": 0.64} == (
            told["hit_ratio"]
        )
        assert 1472 == told["tokens"]["loaded"]

    def test_what_never_ran_is_no_miss(self):
        """X-10: of clients that went away while they waited nothing was loaded or computed; they
        made each hit ratio less."""
        gone = ended("r2", loaded_tokens=0, life=0, outcome="aborted")
        amid = gone | {"request_id": "r3", "life": 1, "matched_tokens": 64}
        told = totals(ended(), gone, amid).to_dict()
        assert 0.64 == told["hit_ratio"]["ratio"]
        assert 300 == told["tokens"]["prompt"]

    def test_bytes_are_those_that_arrived(self):
        """Of a ticket that was half committed half of the bytes count."""
        told = totals(settled(committed=1)).to_dict()["bytes"]
        assert {"save": {"asked for": 4096, "committed": 1024}} == told

    def test_reasons_of_what_did_not_arrive_are_counted(self):
        """Refused, failed and given up: each reason has its tickets and its lost blocks; a
        save of which a part arrived has lost the rest, and what was stored is no loss."""
        gone = {"committed": 0}
        told = totals(
            settled(outcome="refused", reason="queue_bytes", **gone),
            settled(outcome="refused", reason="queue_bytes", **gone),
            settled(outcome="failed", reason="store_full", committed=1, skipped=1),
            settled(outcome="cancelled", **gone),
            settled(outcome="skipped", reason="stored", committed=0, skipped=4),
            settled(direction="load", outcome="failed", reason="corrupt", **gone),
            settled(),
        )
        assert [
            ("load", "failed", "corrupt", 1, 4),
            ("save", "cancelled", "unknown", 1, 4),
            ("save", "failed", "store_full", 1, 2),
            ("save", "refused", "queue_bytes", 2, 8),
        ] == [tuple(end.values()) for end in told.to_dict()["ends"]]
        assert 2 == dict(told.numbers())["save refused: queue_bytes"]

    def test_stages_are_told_apart_by_direction(self):
        """Each stage has its own durations, besides those of the whole ticket."""
        durations = totals(settled(begin=0.0, end=0.2, released_s=0.1)).durations
        assert pytest.approx(0.1) == durations["save: gather"].mean_s
        assert pytest.approx(0.1) == durations["save: released"].mean_s
        assert pytest.approx(0.2) == durations["save: settled"].mean_s

    def test_a_request_without_a_load_waited_for_none(self):
        """Requests that loaded nothing do not make those look quick that did."""
        told = totals(ended(load_s=0.0), ended("r2", load_s=0.5)).durations
        assert 1 == told["request: its load"].count

    def test_two_runs_have_the_same_names(self):
        """What is compared has the same name in both."""
        names = [name for name, _ in totals(ended(), missed(), settled()).numbers()]
        assert len(names) == len(set(names))
        assert {"hit ratio in percent", "misses: evicted", "save bytes: committed"} <= {
            *names
        }

    def test_what_the_engine_had_is_not_told_as_computed(self):
        """A log's key says what had been computed before; people read what had to be."""
        told = dict(totals(ended(computed_tokens=64)).numbers())
        assert 64 == told["tokens: in the engine's own cache"]
        assert "tokens: computed" not in told


class TestDurations:
    def test_a_quantile_is_at_most_a_fifth_too_much(self):
        """Buckets are narrow enough for an operator, whatever is counted."""
        took = Durations()
        for number in range(1, 1001):
            took.add(number / 1000)
        for share in (0.1, 0.3, 0.5, 0.6, 0.95):
            assert share <= took.quantile(share) <= share * 1.2
        assert (1.0, pytest.approx(0.5005)) == (took.greatest_s, took.mean_s)

    def test_a_histogram_has_its_gaps(self):
        """Bars stand one doubling apart, also where there is nothing between."""
        took = Durations()
        took.add(1e-6)
        took.add(8e-6)
        assert [1, 0, 0, 1] == [count for _, count in took.histogram()]

    def test_of_nothing_there_is_nothing_to_tell(self):
        """No lines are no error."""
        assert (0.0, 0.0, []) == (
            Durations().mean_s,
            Durations().quantile(0.5),
            Durations().histogram(),
        )


class TestTally:
    def test_words_beyond_a_bound_share_one(self):
        """A hostile log has as many words as it likes; memory has not."""
        tally = Tally()
        for number in range(1000):
            tally.add(f"word {number}")
        assert 65 == len(tally.items())
        assert ("(others)", 936) == tally.items()[0]
