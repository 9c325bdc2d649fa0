# SPDX-License-Identifier: Apache-2.0
"""One life as text: all that matters, in the order of time."""

import json

import pytest

from tests.story.logs import ended, line, missed, settled
from ucm.integration.vllm import adapters
from ucm.reasons import MissReason
from ucm.scheduler import misses, unsaved
from ucm.scheduler.matches import MatchReason
from ucm.settings import seconds_text, size_text
from ucm.story.collected import collect
from ucm.story.lines import parse
from ucm.story.lives import lives_of
from ucm.story.misses import (
    DETAILS,
    ENDS,
    MISSES,
    explain_failure,
    explain_miss,
    explain_missed,
)
from ucm.story.told import happenings_of, summary_of


def life_of(*lines):
    """Return the one life of which lines tell."""
    return lives_of(collect(parse(json.dumps(each).encode(), "p-1") for each in lines))[
        0
    ]


class TestHappenings:
    def test_all_processes_are_in_one_order_of_time(self):
        """A ticket's stages stand between what the scheduler tells."""
        life = life_of(
            settled("r1", 7, 0.1, 0.3, released_s=0.15), missed("r1"), ended("r1")
        )
        assert [
            "began",
            "missed",
            "save 7 asked for",
            "save 7 gather",
            "save 7 commit",
            "save 7 released its blocks",
            "save 7 committed",
            "finished",
        ] == [each.what for each in happenings_of(life)]

    def test_a_miss_says_where_and_why(self):
        """R-71: block, group, reason and detail are in the text."""
        life = life_of(missed(detail={"age_s": 12}))
        (told,) = happenings_of(life)
        for part in ("block 3", "group 0", "evicted", "36 of 100", "12.00 s before"):
            assert part in told.text

    def test_other_lines_that_name_the_request_are_told(self):
        """A refusal or a failure has a line of its own, with what it says."""
        other = parse(json.dumps(line("save.passed", 0.5, rank=1)).encode(), "w-1")
        told = happenings_of(life_of(ended()), [other])
        assert ("w-1", "save.passed", "rank 1") in [
            (each.process, each.what, each.text) for each in told
        ]


class TestSummary:
    def test_tokens_add_up(self):
        """Prompt tokens were in the engine's cache, loaded or computed."""
        told = summary_of(life_of(ended(computed_tokens=16)))
        assert [
            "100 prompt tokens: 16 in the engine's own cache, 64 loaded, 20 computed."
        ] == told

    def test_a_hit_says_from_where_it_came(self):
        """The slab and each tier by its name, the most first, as soon as a load is ordered."""
        places = {"slab": 16, "disk": 48}
        match = line("prefix.matched", 0.02, request_id="r1", external_tokens=64)
        running = life_of(match | {"hit_tokens": places})
        found = "48 tokens in disk, 16 tokens in slab"
        assert f"Found: {found}." == summary_of(running)[1]
        (told,) = happenings_of(running)
        assert told.text.endswith(f"; found: {found}")
        over = summary_of(life_of(match, ended(hit_tokens=places)))
        assert [f"Found: {found}."] == over[1:]

    def test_each_time_in_memory_has_its_hit(self):
        """Who was preempted is looked up again: the load that it had before is no less a part of its story."""
        hits = [
            line("prefix.matched", at, request_id="r1", external_tokens=tokens)
            | {"hit_tokens": {place: tokens}}
            for at, tokens, place in ((0.1, 16, "disk"), (0.5, 64, "slab"))
        ]
        running = life_of(*hits)
        assert "Found: 64 tokens in slab, 16 tokens in disk." == summary_of(running)[1]
        told = happenings_of(life_of(*hits, ended(preemptions=1, life=2)))
        assert ["began", "matched", "matched", "finished"] == [
            each.what for each in told
        ]

    def test_what_went_wrong_is_said(self):
        """Preemption, a failed load and a miss each have a sentence."""
        life = life_of(
            ended(
                preemptions=2, load_failure="deadline", miss="evicted", first_missing=0
            )
        )
        told = " ".join(summary_of(life))
        for part in ("preempted it 2 time(s)", "(deadline)", "block 0 (evicted)"):
            assert part in told

    def test_what_was_preempted_loads_its_own_tokens_again(self):
        """They are no share of its prompt, of which there are fewer."""
        (told, *_) = summary_of(
            life_of(ended(preemptions=4, life=5, loaded_tokens=1408))
        )
        assert (
            "100 prompt tokens: 0 in the engine's own cache at first; 1408 loaded over "
            "5 times in memory, its own among them."
        ) == told

    def test_what_never_ran_was_not_computed(self):
        """Its client went away while it waited for its turn, or for a load: all of its prompt was
        told as computed."""
        for said in ({"life": 0}, {"life": 1, "matched_tokens": 64}):
            gone = ended(outcome="aborted", loaded_tokens=0, **said)
            told, *_ = summary_of(life_of(gone))
            assert told.endswith("none was computed, its client went away before.")

    def test_what_ran_was_computed(self):
        """Its client went away behind a load that failed, or as it was computed."""
        for said in ({}, {"matched_tokens": 64, "load_failure": "corrupt"}):
            gone = ended(outcome="aborted", loaded_tokens=0, **said)
            assert "100 computed" in summary_of(life_of(gone))[0]

    def test_an_end_that_no_line_tells_is_not_made_up(self):
        """It still runs, or its engine died; nobody knows."""
        assert "No line tells of its end" in summary_of(life_of(settled()))[0]


class TestReasons:
    def test_each_reason_of_a_miss_has_its_words(self):
        """R-71: the list is closed, and each reason says what to do."""
        assert set(MissReason) == set(MISSES)
        assert all(each.meaning and each.remedy for each in MISSES.values())

    def test_each_code_of_a_detail_has_its_words(self):
        """R-71: what a log says in a code, people read as a sentence with a remedy."""
        codes = [str(why.detail) for why in unsaved._WHYS if why.detail]
        codes += [
            f"its adapter: {word}"
            for word in (adapters.LATE, adapters._CROWDED, *adapters._REMEDIES)
        ]
        codes += [fate.value for fate in misses._GONE]
        codes += [text for _, text in misses.SHORTFALLS.values()]
        codes += [misses._UNTOLD[1]]
        some = MatchReason.LOAD_FAILED, MatchReason.ELSEWHERE
        codes += [misses._DECLINED[each][1] for each in some]
        assert [] == [
            code for code in codes if not (DETAILS.get(code) or ENDS.get(code))
        ]
        known = {**DETAILS, **ENDS}.values()
        assert all(each.meaning and each.remedy for each in known)

    @pytest.mark.parametrize("reason", ["queue_tickets", "queue_bytes", "store_behind"])
    def test_bound_of_a_setting_has_the_setting_in_its_remedy(self, reason):
        """R-71: what waits for the store is bounded by the same settings as what waits for its copy."""
        assert "Raise queue." in ENDS[reason].remedy

    @pytest.mark.parametrize(
        ("reason", "detail", "words", "remedy"),
        [
            (
                "evicted",
                {"text": "forgotten", "age_s": 2},
                "Somebody had it deleted. That was 2.00 s before.",
                DETAILS["forgotten"].remedy,
            ),
            ("evicted", {"text": "evicted"}, "", MISSES["evicted"].remedy),
            (
                "failed",
                {"text": "store_full"},
                "The store had no slot.",
                "Raise store.capacity.",
            ),
            (
                "other_key_space",
                {"kv_dtype": ["a", "b"]},
                "kv_dtype is 'a' here, and 'b' where it is stored.",
                MISSES["other_key_space"].remedy,
            ),
            (
                "not_committed",
                {"text": "this engine is saving it"},
                "This engine is saving it.",
                MISSES["not_committed"].remedy,
            ),
            (
                "unavailable",
                {"text": "a tier could not be asked", "slab": "evicted"},
                "A tier, or the node's agent, could not be asked. slab: evicted.",
                DETAILS["a tier could not be asked"].remedy,
            ),
            (
                "unknown",
                {"text": "the store keeps no such things"},
                "The store does not tell what became of its blocks; one of type null has none.",
                "Leave store.type out, or set it to slab.",
            ),
            ("new", "a text", "a text", explain_miss("new").remedy),
        ],
    )
    def test_a_detail_is_told_in_words(self, reason, detail, words, remedy):
        """R-71: nothing of a log's own language is left, and the remedy is the one that
        fits best."""
        told = parse(json.dumps(missed(reason=reason, detail=detail)).encode(), "p-1")
        explained, text = explain_missed(told)
        assert (words, remedy) == (text, explained.remedy)

    def test_a_word_of_a_later_release_is_no_error(self):
        """A newer engine's log is read as far as it can be."""
        assert explain_miss("new").meaning
        assert explain_failure("new").remedy


@pytest.mark.parametrize(
    ("told", "seconds"), [("12 us", 12e-6), ("1.5 ms", 0.0015), ("2.50 s", 2.5)]
)
def test_durations_have_the_unit_that_fits(told, seconds):
    """People read micro-, milliseconds and seconds."""
    assert told == seconds_text(seconds)


@pytest.mark.parametrize(
    ("told", "nbytes"), [("12 B", 12), ("1.5 KiB", 1536), ("2 TiB", 2 << 40)]
)
def test_bytes_have_the_unit_that_fits(told, nbytes):
    """People read powers of 1024."""
    assert told == size_text(nbytes)
