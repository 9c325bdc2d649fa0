# SPDX-License-Identifier: Apache-2.0
"""Lines of all processes come together by request and life, in bounded memory."""

import json

from tests.story.logs import T0, ended, line, missed, settled
from ucm.story.collected import Collected, Newest, collect
from ucm.story.lines import parse
from ucm.story.lives import lives_of


def lives(*lines):
    """Return the lives that lines tell of."""
    return lives_of(collect(parse(json.dumps(each).encode(), "p-1") for each in lines))


class TestJoin:
    def test_lines_of_all_kinds_join_one_life(self):
        """A scheduler's lines and a worker's tickets are one story."""
        matched = line("prefix.matched", 0.02, request_id="r1", external_tokens=64)
        (life,) = lives(settled("r1"), matched, missed("r1"), ended("r1"))
        assert life.ended is not None
        assert [64] == [each.external_tokens for each in life.matched]
        assert [3] == [each.block for each in life.missed]
        assert [1] == [ticket.number for ticket in life.tickets]

    def test_a_ticket_goes_to_the_life_that_had_begun(self):
        """Ids come again after a restart; a later life did not own an earlier ticket."""
        first, second = lives(
            ended("r1", 0.0, 1.0),
            ended("r1", 10.0, 11.0, life=2),
            settled("r1", 1, 0.5, 0.6),
            settled("r1", 2, 10.5, 10.6),
        )
        assert ([1], [2]) == tuple(
            [ticket.number for ticket in life.tickets] for life in (first, second)
        )

    def test_what_is_told_goes_to_the_life_that_is_not_over(self):
        """A request's count of lives and an engine's numbers of them begin anew: they led to
        what had ended long before, as that had been preempted, or had not."""
        first, second = lives(
            ended("r1", 0.0, 1.0),
            ended("r1", 10.0, 12.0, life=2, preemptions=1),
            missed("r1", 10.1, life=1),
            settled("r1", 1, 10.2, 10.3, generation=1),
        )
        assert (0, 0) == (len(first.missed), len(first.tickets))
        assert (1, 1) == (len(second.missed), len(second.tickets))

    def test_what_runs_on_is_not_told_of_what_has_ended(self):
        """A request hangs whose id had been there an hour before: it was told to have ended then."""
        first, second = lives(
            ended("r1", 0.0, 1.0),
            missed("r1", 3600.0),
            settled("r1", 1, 3600.1, 3600.2),
        )
        assert (0, 0) == (len(first.missed), len(first.tickets))
        assert ("open", 1, 1) == (
            second.outcome,
            len(second.missed),
            len(second.tickets),
        )

    def test_a_ticket_of_a_clock_that_differs_is_not_lost(self):
        """A worker on another machine may be a minute late, or early."""
        for late in (-60.0, 60.0):
            (life,) = lives(ended("r1"), settled("r1", 1, late, late + 0.1))
            assert [1] == [ticket.number for ticket in life.tickets]

    def test_an_id_that_comes_again_at_once_is_told_apart(self):
        """A script counts its requests from nought each time; a look-up went to the next one."""
        first, second = lives(
            ended("r1", 0.0, 0.4),
            ended("r1", 0.5, 0.9),
            missed("r1", 0.1),
            settled("r1", 1, 0.2, 0.3),
            missed("r1", 0.6),
        )
        assert (1, 1) == (len(first.missed), len(first.tickets))
        assert (1, 0) == (len(second.missed), len(second.tickets))

    def test_a_number_of_an_engine_is_no_count_of_a_request(self):
        """A request that runs on was told to have been in memory 4711 times."""
        (life,) = lives(settled("r1", generation=4711))
        assert 0 == life.number

    def test_a_request_that_was_preempted_is_one_story(self):
        """It is looked up and saved again under the next number, and ends once."""
        (life,) = lives(
            missed("r1", 0.1, life=1),
            settled("r1", 1, 0.2, 0.3, generation=1),
            missed("r1", 0.5, life=2, reason="not_committed"),
            settled("r1", 2, 0.6, 0.7, generation=2),
            ended("r1", 0.0, 1.0, life=2, preemptions=1),
        )
        assert ["evicted", "not_committed"] == [each.reason for each in life.missed]
        assert [1, 2] == [ticket.number for ticket in life.tickets]

    def test_a_miss_is_of_the_engine_that_told_of_it(self):
        """One engine computes a prompt, and another one that has the request by the same name loads it."""
        told = [
            (missed("r1", 0.45), "scheduler-1"),
            (ended("r1", 0.0, 0.5), "scheduler-1"),
            (line("prefix.matched", 0.41, request_id="r1"), "scheduler-2"),
            (ended("r1", 0.4, 0.9), "scheduler-2"),
        ]
        first, second = lives_of(
            collect(parse(json.dumps(each).encode(), who) for each, who in told)
        )
        assert [(1, 0), (0, 1)] == [
            (len(each.missed), len(each.matched)) for each in (first, second)
        ]

    def test_a_miss_is_of_the_engine_that_died_behind_it(self):
        """Nobody tells of its end; another engine with that request, be it over or not, has none of it."""
        told = [
            (missed("r1", 0.01), "scheduler-1"),
            (line("prefix.matched", 0.41, request_id="r1"), "scheduler-2"),
        ]
        for more in ([], [(ended("r1", 0.02, 0.9), "scheduler-2")]):
            both = lives_of(
                collect(
                    parse(json.dumps(each).encode(), who)
                    for each, who in [*told, *more]
                )
            )
            assert [("scheduler-1", 1, 0), ("scheduler-2", 0, 1)] == [
                (each.process, len(each.missed), len(each.matched)) for each in both
            ]

    def test_a_shared_ticket_is_in_each_life(self):
        """Short prompts are saved together."""
        both = lives(ended("r1"), ended("r2"), settled("r1", requests=["r1", "r2"]))
        assert [1, 1] == [len(life.tickets) for life in both]

    def test_a_request_without_an_end_is_open(self):
        """An engine that died tells of no end."""
        (life,) = lives(settled("r1", begin=0.1, end=0.2))
        assert "open" == life.outcome
        assert (T0 + 0.1, T0 + 0.2) == (life.begin_s, life.end_s)

    def test_what_befell_a_life_is_told_apart(self):
        """Preempted, failed and refused are marks besides finished and aborted."""
        marks = {
            life.request_id: (life.outcome, *life.marks)
            for life in lives(
                ended("a", outcome="aborted"),
                ended("b", preemptions=1),
                ended("c", load_failure="deadline"),
                ended("d"),
                settled("d", outcome="refused"),
                ended("e"),
            )
        }
        assert {
            "a": ("aborted",),
            "b": ("finished", "preempted"),
            "c": ("finished", "failed"),
            "d": ("finished", "refused"),
            "e": ("finished",),
        } == marks


class TestBounds:
    def test_the_newest_are_kept_in_whatever_order_they_come(self):
        """Files of several processes are read one after the other."""
        newest = Newest(2)
        for moment in (5.0, 1.0, 9.0, 3.0):
            newest.add(parse(json.dumps(line("x", moment)).encode()))
        assert [T0 + 5.0, T0 + 9.0] == [each.timestamp_s for each in newest.lines()]
        assert 2 == newest.left_out

    def test_long_lines_count_for_more(self):
        """Memory is bounded whatever a line brings, such as stages or names."""
        newest = Newest(4)
        edges = [["gather", 0, 1]] * 200
        for number in range(4):
            ticket = settled(number=number, edges=edges)
            newest.add(parse(json.dumps(ticket).encode()))
        assert 2 == newest.left_out

    def test_what_is_left_out_is_said(self):
        """A story that is not whole says so."""
        lines = [parse(json.dumps(ended(f"r{number}")).encode()) for number in range(3)]
        told = collect(lines, into=Collected.upto(lives=1)).notes()
        assert ["2 older request(s) were left out"] == told
