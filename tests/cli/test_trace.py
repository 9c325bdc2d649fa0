# SPDX-License-Identifier: Apache-2.0
"""``ucm trace`` answers from whatever lies in a directory, or says in a line why not."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.store_kit import tell
from tests.rig import BLOCK_BYTES, keys_of
from tests.story.logs import ended, line, missed, run_of, settled, write
from ucm.cli.main import UNREADABLE, USAGE
from ucm.stores.slab import SlabStore


@pytest.fixture
def run(tmp_path):
    """Return the directory of a run of three requests."""
    return run_of(tmp_path / "run")


def call(*arguments):
    """Call ``ucm trace``; return its code, and what it printed."""
    return tell("trace", *arguments)


class TestShow:
    def test_a_story_is_told_over_all_roles(self, run):
        """R-71: scheduler and worker are in one text, with reason, stages and end."""
        code, out, _ = call("show", "r1", "--log", run)
        assert code == 0
        for part in (
            "scheduler-7",
            "worker-0-8",
            "evicted",
            "save 1 gather",
            "finished",
        ):
            assert part in out

    def test_programs_get_the_same(self, run):
        """What people read is there with moments and names that stay."""
        _, out, _ = call("show", "r1", "--log", run, "--json")
        (life,) = json.loads(out)["lives"]
        assert ("finished", []) == (life["outcome"], life["marks"])
        assert ["began", "missed", "save 1 asked for"] == [
            each["what"] for each in life["happened"][:3]
        ]

    def test_a_hit_says_which_tier_had_it(self, tmp_path):
        """Slab and tiers are told apart by name, for people and for programs."""
        places = {"slab": 16, "disk": 48}
        log = write(tmp_path / "ucm-s-1.jsonl", ended("r", hit_tokens=places))
        assert (
            "48 tokens in disk, 16 tokens in slab" in call("show", "r", "--log", log)[1]
        )
        (life,) = json.loads(call("show", "r", "--log", log, "--json")[1])["lives"]
        assert places == life["hit_tokens"]

    def test_lines_of_other_kinds_belong_to_the_life_they_fall_into(self, tmp_path):
        """A refusal of the second life is not told of the first."""
        write(
            tmp_path / "ucm-scheduler-1.jsonl",
            ended("r", 0.0, 1.0),
            ended("r", 5.0, 6.0, life=2),
            line("wish.ignored", 5.5, request_id="r", key="x"),
        )
        _, out, _ = call("show", "r", "--log", tmp_path, "--json")
        first, second = json.loads(out)["lives"]
        assert ["began", "finished"] == [each["what"] for each in first["happened"]]
        assert "wish.ignored" in [each["what"] for each in second["happened"]]

    def test_the_beginning_of_an_id_is_enough_if_it_is_one(self, tmp_path):
        """Engines add to ids; two that begin alike are named, and none is guessed."""
        log = write(tmp_path / "ucm-s-1.jsonl", ended("abc-1"), ended("abd-2"))
        assert 0 == call("show", "abc", "--log", log)[0]
        code, _, err = call("show", "ab", "--log", log)
        assert (USAGE, True) == (code, "abc-1, abd-2" in err)

    def test_an_id_that_begins_another_is_itself(self, tmp_path):
        """An exact id is never ambiguous."""
        log = write(tmp_path / "ucm-s-1.jsonl", ended("r1"), ended("r12"))
        code, out, _ = call("show", "r1", "--log", log)
        assert (0, False) == (code, "r12" in out)

    def test_a_request_that_is_not_there_is_an_error(self, run):
        """The line says which request and which log."""
        code, _, err = call("show", "nobody", "--log", run)
        assert (UNREADABLE, True) == (code, "nobody" in err)

    def test_the_id_that_a_client_knows_is_itself(self, tmp_path):
        """An engine lengthens it behind a dash; one more digit is another client's."""
        for name in ("cmpl-r1-0-ab12", "cmpl-r10-0-cd34", "cmpl-r1x"):
            write(tmp_path / f"ucm-{name}-1.jsonl", ended(name))
        code, out, _ = call("show", "cmpl-r1", "--log", tmp_path)
        assert code == 0
        assert "cmpl-r1-0-ab12" in out

    def test_samples_of_a_request_are_found_by_the_id_that_its_client_knows(
        self, tmp_path
    ):
        """An engine counts them before it: a request with ``n=2`` was told to be in no line."""
        names = ("0_cmpl-r1-ab", "1_cmpl-r1-cd", "0_cmpl-r10-ef")
        log = write(tmp_path / "ucm-s-1.jsonl", *map(ended, names))
        code, _, err = call("show", "cmpl-r1", "--log", log)
        assert (USAGE, True) == (code, "2 requests" in err)
        assert ", ".join(names[:2]) in err
        assert 0 == call("show", "1_cmpl-r1", "--log", log)[0]
        assert 0 == call("show", "cmpl-r10", "--log", log)[0]


class TestWhy:
    def test_a_miss_is_explained(self, run):
        """R-71: the first missing block, the reason in words, and what to do."""
        code, out, _ = call("why", "r1", "--log", run)
        assert code == 0
        for part in ("evicted", "block is number 3", "made room", "store.capacity"):
            assert part in out

    def test_a_failed_load_is_explained(self, run):
        """A load that failed is a reason as well."""
        _, out, _ = call("why", "r2", "--log", run, "--json")
        (reason,) = json.loads(out)["reasons"]
        assert ("failed load", "deadline") == (reason["kind"], reason["reason"])

    def test_a_request_without_a_miss_says_so(self, run):
        """No reason is made up."""
        assert "No look-up of it fell short" in call("why", "r3", "--log", run)[1]

    @pytest.mark.parametrize("request_id", [["host"], []])
    def test_a_host_of_its_own_logs_no_look_ups(self, tmp_path, request_id):
        """What was not logged is not called well, for people and for programs."""
        log = write(tmp_path / "ucm-cache-0-1.jsonl", settled("host", 1))
        arguments = ("why", *request_id, "--log", log)
        code, out, _ = call(*arguments)
        assert (0, True) == (code, "No look-up was logged" in out)
        assert "fell short" not in out
        told = json.loads(call(*arguments, "--json")[1])
        assert [] == told["reasons"]
        assert "No look-up was logged" in told["notes"][0]

    def test_a_run_without_a_miss_says_so(self, tmp_path):
        """Requests that ended without one were looked up."""
        log = write(tmp_path / "ucm-scheduler-1.jsonl", ended("r"))
        assert "No look-up fell short" in call("why", "--log", log)[1]
        assert [] == json.loads(call("why", "--log", log, "--json")[1])["notes"]

    def test_a_run_of_which_a_part_was_not_read_is_not_said_to_have_none(
        self, tmp_path
    ):
        """What was passed over may have had the miss."""
        log = write(tmp_path / "ucm-scheduler-1.jsonl", ended("r"), missed(v=9))
        _, out, err = call("why", "--log", log)
        assert "No look-up fell short" in out
        assert "1 line(s) are of another version of the schema\n" == err

    def test_a_miss_without_its_line_has_its_reason(self, tmp_path):
        """The line of the look-up may be rotated away; that of the request says why."""
        log = write(tmp_path / "l", ended("r", miss="queue", first_missing=2))
        _, out, _ = call("why", "r", "--log", log, "--json")
        (reason,) = json.loads(out)["reasons"]
        assert ("queue", True) == (reason["reason"], "number 2" in reason["where"])

    def test_the_slab_is_asked_what_it_knows_by_now(self, tmp_path):
        """A block may have been saved since, or have gone; the log cannot know."""
        key, slab = keys_of(1)[0], tmp_path / "slab"
        log = write(tmp_path / "l", missed("r", key=key.hex(), reason="not_committed"))
        arguments = ("why", "r", "--log", log, "--store", slab)
        with SlabStore(
            path=str(slab), capacity_bytes=1 << 20, block_bytes=BLOCK_BYTES
        ) as store:
            assert "in the slab by now: never" in call(*arguments)[1]
            with store.reserve([key], BLOCK_BYTES) as lease:
                lease.seal(0, 1)
                lease.commit()
            assert "in the slab by now: stored" in call(*arguments)[1]

    @pytest.mark.parametrize("key", ["", "no key", "00", "00" * 100])
    def test_a_key_that_is_none_and_a_slab_that_is_none_are_no_trouble(
        self, tmp_path, key
    ):
        """Whatever a log calls a key, the answer is in one piece; of no slab, one line."""
        log = write(tmp_path / "l", missed("r", key=key))
        code, _, err = call("why", "r", "--log", log, "--store", tmp_path / "none")
        assert (code, err.count("\n")) in ((0, 0), (USAGE, 1), (UNREADABLE, 1))

    def test_all_reasons_are_counted(self, run):
        """Without a request: how often, and how many tokens."""
        _, out, _ = call("why", "--log", run, "--json")
        assert [("miss", "evicted", 1, 64), ("failed load", "deadline", 1, None)] == [
            (each["kind"], each["reason"], each["count"], each["missing_tokens"])
            for each in json.loads(out)["reasons"]
        ]

    def test_remedies_of_a_reason_are_those_of_its_misses(self, tmp_path):
        """R-71: where two were deleted and one made room, it says so, and not that three made room."""
        gone = [
            missed(f"r{n}", detail={"text": "forgotten", "age_s": n}) for n in (1, 2)
        ]
        log = write(tmp_path / "l", missed("r0", detail={"text": "evicted"}), *gone)
        _, out, _ = call("why", "--log", log)
        assert "evicted, 2 of 3: Look who calls `ucm store rm`" in out
        assert "evicted, 1 of 3: Raise store.capacity" in out
        only = write(tmp_path / "m", *gone)
        assert "store.capacity" not in call("why", "--log", only)[1]
        (told,) = json.loads(call("why", "--log", only, "--json")[1])["reasons"]
        assert told["remedy"].startswith("Look who calls")


class TestStats:
    def test_numbers_are_told(self, run):
        """X-10: a hit ratio has its numerator and its denominator."""
        _, out, _ = call("stats", "--log", run)
        assert "128 of 200 prompt tokens (64.0%), without those of 1 preempted" in out
        assert "save: gather" in out

    def test_programs_get_the_same(self, run):
        """Outcomes by direction, durations with their histogram."""
        told = json.loads(call("stats", "--log", run, "--json")[1])
        assert {"failed": 1} == told["tickets"]["load"]
        assert 1 == told["durations"]["save: gather"]["count"]

    def test_refused_and_dropped_saves_have_their_reasons(self, tmp_path):
        """Each reason is there with its meaning and its blocks, for people and programs."""
        lost = {"outcome": "refused", "reason": "queue_bytes", "committed": 0}
        log = write(
            tmp_path / "ucm-s-1.jsonl",
            ended("r", saved_blocks=3, dropped_blocks=4),
            settled("r", **lost),
        )
        _, out, _ = call("stats", "--log", log)
        for part in ("queue_bytes", "waited as may. Raise queue.nbytes.", "dropped"):
            assert part in out
        told = json.loads(call("stats", "--log", log, "--json")[1])
        end = {"direction": "save", "outcome": "refused", "reason": "queue_bytes"}
        assert [end | {"tickets": 1, "blocks": 4}] == told["ends"]
        assert {"saved": 3, "dropped": 4} == told["blocks"]


class TestDiff:
    def test_two_runs_are_compared(self, run, tmp_path):
        """Each number stands beside that of the other run."""
        other = write(tmp_path / "ucm-s-1.jsonl", ended("r1", preemptions=1))
        told = json.loads(call("diff", run, other, "--json")[1])["numbers"]
        numbers = {each["name"]: (each["a"], each["b"]) for each in told}
        assert (2, 1) == numbers["requests: finished"]
        assert (1, None) == numbers["misses: evicted"]
        assert "-50.0%" in call("diff", run, other)[1]

    def test_a_run_without_a_line_is_an_error(self, run, tmp_path):
        """A run that is compared with nothing would look like one that did all."""
        (tmp_path / "empty").write_text("")
        for pair in ((run, tmp_path / "empty"), (tmp_path / "empty", run)):
            assert UNREADABLE == call("diff", *pair)[0]

    def test_what_was_passed_over_of_a_run_is_said(self, run, tmp_path):
        """Numbers of half a log are no others' fault; programs hear of it, too, and of which run it is."""
        other = write(tmp_path / "ucm-s-1.jsonl", ended("r1"), ended("r2", v=9))
        _, out, err = call("diff", run, other, "--json")
        note = f"{other}: 1 line(s) are of another version of the schema"
        assert ([note], "") == (json.loads(out)["notes"], err)
        assert note == " ".join(call("diff", run, other)[2].split())


class TestTimeline:
    def test_both_forms_are_written_and_named(self, run, tmp_path):
        """What was written is said."""
        page, events = tmp_path / "t.html", tmp_path / "t.json"
        code, out, _ = call(
            *("timeline", "-o", page, "--perfetto", events, "--log", run)
        )
        assert (0, 2) == (code, out.count("6 bars"))
        assert page.read_text().startswith("<!doctype html>")
        assert json.loads(events.read_text())["traceEvents"]

    def test_one_request_can_be_drawn_alone(self, run, tmp_path):
        """Bars of other requests are left out."""
        arguments = (
            "-o",
            tmp_path / "t.html",
            "--log",
            run,
            "--request",
            "r2",
            "--json",
        )
        assert 2 == json.loads(call("timeline", *arguments)[1])["bars"]

    def test_what_is_left_out_is_said(self, run, tmp_path):
        """A drawing of the newest says how much is older."""
        arguments = ("-o", tmp_path / "t.html", "--log", run, "--limit", "1")
        code, _, err = call("timeline", *arguments)
        assert (0, True) == (code, "2 older request(s) were left out" in err)

    def test_without_a_file_it_is_a_wrong_call(self, run):
        """The page would fill a terminal."""
        assert USAGE == call("timeline", "--log", run)[0]

    @pytest.mark.parametrize("option", ["-o", "--perfetto"])
    def test_file_that_cannot_be_written_is_named(self, run, tmp_path, option):
        """A full disk names no file by itself; one line says which, without an errno."""
        told = [
            call("timeline", option, path, "--log", run)
            for path in ("/dev/full", tmp_path / "no" / "page")
        ]
        assert [
            (UNREADABLE, "", "ucm: /dev/full: No space left on device\n"),
            (UNREADABLE, "", f"ucm: {tmp_path}/no/page: No such file or directory\n"),
        ] == told


COMMANDS = (
    ("show", "r"),
    ("why",),
    ("why", "r"),
    ("stats",),
    ("timeline", "-o", "/dev/null", "--perfetto", "/dev/null"),
    ("diff",),
)


def over(command, path):
    """Return a command's arguments with the log that it reads, or the two."""
    return (*command, path, path) if command == ("diff",) else (*command, "--log", path)


@pytest.mark.parametrize("command", [("stats",), ("why",), ("show", "r2")])
def test_what_could_not_be_read_is_said_where_nothing_was_found(tmp_path, command):
    """A log of another release, or of another user, is one; it may have what was looked for."""
    write(tmp_path / "ucm-scheduler-1.jsonl", ended("r2", v=9))
    if command == ("show", "r2"):
        write(tmp_path / "ucm-scheduler-2.jsonl", ended("r1"))
    code, _, err = call(*command, "--log", tmp_path)
    assert UNREADABLE == code
    assert err.endswith("; 1 line(s) are of another version of the schema\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
class TestBadInput:
    def test_what_is_missing_is_one_line(self, tmp_path, command):
        """Missing, empty and foreign: a line, a code, no traceback."""
        foreign = tmp_path / "foreign"
        foreign.write_bytes(b"\x7fELF\x00\xff" * 1000)
        for path in (tmp_path / "missing", tmp_path, foreign):
            code, out, err = call(*over(command, path))
            assert (UNREADABLE, "", 1) == (code, out, err.count("\n"))
            assert err.startswith("ucm: ")

    def test_what_a_terminal_would_obey_is_not_printed(self, tmp_path, command):
        """Escape sequences, markup and turned text of a log are shown, not obeyed."""
        evil = "r\x1b]0;owned\x07\x9b31m[red]\u202e\r"
        log = write(
            tmp_path / "ucm-s-1.jsonl",
            ended(evil, outcome=evil, miss=evil, load_failure=evil),
            missed(evil, reason=evil, detail=evil, key=evil),
            settled(
                evil, outcome=evil, direction=evil, error=evil, edges=[[evil, 0, 1]]
            ),
            line(evil, request_id=evil, what=evil),
        )
        code, out, err = call(*over(command, log))
        assert code == 0
        for each in (out, err):
            assert set() == set(each) & set("\x1b\x07\x9b\u202e\r")
        assert "red" in out or command[0] in ("timeline", "stats")

    @pytest.mark.slow
    @settings(
        max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.data())
    def test_whatever_is_in_a_file_is_answered(self, tmp_path, command, data):
        """Damaged lines of ours and bytes of anybody's end in an answer or one line."""
        value = st.recursive(
            st.none() | st.integers() | st.floats() | st.text() | st.booleans(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        )
        lines = []
        for made in (ended("r"), missed("r"), settled("r"), line("x", request_id="r")):
            key = data.draw(st.sampled_from(sorted(made)))
            lines.append(json.dumps(made | {key: data.draw(value)}).encode())
        cut = data.draw(st.integers(0, 300))
        lines += [lines[0][:cut], data.draw(st.binary(max_size=100))]
        log = tmp_path / "ucm-s-1.jsonl"
        log.write_bytes(b"\n".join(data.draw(st.permutations(lines))))
        code, _, err = call(*over(command, log), "--json")
        assert code in (0, UNREADABLE, USAGE)
        assert (code == 0) or err.startswith("ucm: ")
        assert "Traceback" not in err
