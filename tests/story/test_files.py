# SPDX-License-Identifier: Apache-2.0
"""Logs are found and read whatever lies in the directory, in bounded pieces."""

import json
import os

import pytest

from tests.story.logs import ended, line, real_run, settled, write
from ucm.errors import NoLogError
from ucm.story.files import MAX_LINE, Reading, find_logs, read_logs
from ucm.story.lines import Settled


def read(path):
    """Return all lines of a log, and what became of the others."""
    reading = Reading()
    return list(read_logs(find_logs(path), reading)), reading


class TestFind:
    def test_rotated_files_come_before_the_newest_of_their_process(self, tmp_path):
        """A story is told from its beginning, whatever was rotated meanwhile."""
        for name in ("ucm-w-1.jsonl", "ucm-w-1.jsonl.2", "ucm-w-1.jsonl.1"):
            write(tmp_path / name, ended())
        (tmp_path / "other.txt").write_text("not of a log")
        names = [file.path.name for file in find_logs(tmp_path)]
        assert ["ucm-w-1.jsonl.2", "ucm-w-1.jsonl.1", "ucm-w-1.jsonl"] == names

    @pytest.mark.parametrize(
        "behind", ["-20261130", "-20261130-1796040000", ".2026-11-30", ".20261130"]
    )
    def test_a_file_that_was_put_aside_with_its_date_is_found(self, tmp_path, behind):
        """As by logrotate, with dateext: it went without a word, and numbers were of the rest."""
        write(tmp_path / f"ucm-w-1.jsonl{behind}", ended())
        write(tmp_path / f"ucm-w-1.jsonl{behind}.gz", ended())
        found = find_logs(tmp_path)
        assert ["w-1"] * 2 == [file.process for file in found]
        assert 1 == sum(file.is_packed for file in found)

    def test_files_with_dates_come_in_the_order_in_which_they_were_written(
        self, tmp_path
    ):
        """Nothing counts them: they came as the directory had them, the present one amid them."""
        names = [f"ucm-w-1.jsonl-202611{day:02}" for day in range(1, 31)]
        names.append("ucm-w-1.jsonl")
        for when_s, name in enumerate(names):
            os.utime(write(tmp_path / name, ended()), (when_s, when_s))
        assert names == [file.path.name for file in find_logs(tmp_path)]

    def test_who_wrote_a_line_is_said_by_its_file(self, tmp_path):
        """Two workers of two engines have one role; their process ids differ."""
        write(tmp_path / "ucm-worker-0-17.jsonl", settled())
        assert ["worker-0-17"] == [each.process for each in read(tmp_path)[0]]

    def test_a_file_of_any_name_can_be_named(self, tmp_path):
        """A log that was copied away is read as well; its lines say their role."""
        lines, _ = read(write(tmp_path / "copied.txt", settled()))
        assert ["worker-0"] == [each.process for each in lines]

    def test_a_directory_without_a_log_is_an_error(self, tmp_path):
        """The error says which setting makes logs."""
        with pytest.raises(NoLogError, match=r"set log\.directory"):
            find_logs(tmp_path)

    def test_what_is_no_plain_file_is_not_opened(self, tmp_path):
        """A pipe of a fitting name would be waited for without end."""
        os.mkfifo(tmp_path / "ucm-w-1.jsonl")
        with pytest.raises(NoLogError):
            find_logs(tmp_path)


class TestRead:
    def test_lines_of_the_real_pipeline_are_understood(self, tmp_path):
        """What a worker writes today is what is read: two tickets, with their bytes."""
        lines, reading = read(real_run(tmp_path / "log"))
        told = [each for each in lines if isinstance(each, Settled)]
        assert [("r1", "save"), ("r2", "load")] == [
            (*each.owners, each.direction) for each in told
        ]
        assert [4 * 1536] * 2 == [each.committed_bytes for each in told]
        assert (0, 0) == (reading.garbage, reading.other_schema)

    @pytest.mark.parametrize(
        "garbage",
        [
            b"\xff\xfe\x00",
            b"null",
            b"[" * 100_000,
            b'{"event":"request.ended","timestamp_s":1e999}',
            b'{"event":"request.ended","timestamp_s":1,"life":-1}',
            b'{"event":"x","timestamp_s":1,"a":' + b"[" * 100_000,
            b'{"event":"x","timestamp_s":1,"role":"' + b"x" * 2 * MAX_LINE + b'"}',
            b'{"event":"ticket.settled","timest',
        ],
        ids=range(8),
    )
    def test_garbage_is_counted_and_the_rest_is_read(self, tmp_path, garbage):
        """One bad line costs that line only."""
        path = write(tmp_path / "ucm-w-1.jsonl", ended("before"))
        after = json.dumps(ended("after")).encode()
        path.write_bytes(path.read_bytes() + garbage + b"\n" + after + b"\n")
        lines, reading = read(tmp_path)
        assert ["before", "after"] == [each.request_id for each in lines]
        assert 1 == reading.garbage
        assert ["1 line(s) are not of this log and were passed over"] == reading.notes()

    @pytest.mark.parametrize(
        "before",
        ['{"v": 1, "role": "w", "requ', "\rLoading: 50%|#####     | 1/2"],
        ids=["torn", "bar"],
    )
    def test_a_line_behind_a_torn_one_is_read(self, tmp_path, before):
        """A process was killed amid a write, or a bar is shown on standard error: the line
        behind it went along."""
        path = write(tmp_path / "server.log", ended("r1"))
        path.write_text(before + path.read_text() + before + before)
        lines, reading = read(path)
        assert ["r1"] == [each.request_id for each in lines]
        assert (1, 2) == (reading.lines, reading.garbage)

    def test_a_line_with_long_words_is_read(self, tmp_path):
        """Clients choose their requests' ids, and errors carry paths."""
        path = tmp_path / "ucm-w-1.jsonl"
        write(path, settled("r" * 900, error="e" * 9000), ended("r" * 900))
        assert (2, 0) == (len(read(tmp_path)[0]), read(tmp_path)[1].garbage)

    def test_a_line_of_another_schema_is_not_guessed_at(self, tmp_path):
        """Keys of a later version may mean something else."""
        write(tmp_path / "ucm-w-1.jsonl", ended() | {"v": 2}, line("x"))
        lines, reading = read(tmp_path)
        assert ["x"] == [each.event for each in lines]
        assert 1 == reading.other_schema

    def test_a_file_that_vanishes_is_counted(self, tmp_path):
        """Rotation may take a file away between look and read."""
        files = find_logs(write(tmp_path / "ucm-w-1.jsonl", ended()))
        files[0].path.unlink()
        reading = Reading()
        assert [] == list(read_logs(files, reading))
        assert 1 == reading.unread_files

    @pytest.mark.parametrize("suffix", [".gz", ".1.gz", ".12.zst", ".xz", ".2.bz2"])
    def test_a_file_that_is_compressed_is_counted(self, tmp_path, suffix):
        """Who packs old files was told numbers of the rest as if they were all."""
        write(tmp_path / "ucm-w-1.jsonl", ended("r1"))
        (tmp_path / f"ucm-w-1.jsonl{suffix}").write_bytes(b"\x1f\x8b\n\n")
        lines, reading = read(tmp_path)
        assert ["r1"] == [each.request_id for each in lines]
        assert (1, 0) == (reading.packed_files, reading.garbage)
        assert "1 file(s) are compressed" in " ".join(reading.notes())

    def test_a_file_that_is_rotated_away_meanwhile_is_counted(self, tmp_path):
        """Its lines stand under another name by then, and somebody is told."""
        present, reading = tmp_path / "ucm-w-1.jsonl", Reading()
        write(present, ended("r1"))
        found = find_logs(tmp_path)
        present.rename(tmp_path / "ucm-w-1.jsonl.1")
        write(present, ended("r2"))
        assert ["r2"] == [each.request_id for each in read_logs(found, reading)]
        assert 1 == reading.unread_files
        assert "rotated away" in " ".join(reading.notes())

    def test_lines_about_others_are_not_looked_into(self, tmp_path):
        """R-71: the story of one request was as slow as all of a log; whatever may be about it,
        be it spelt otherwise or behind a torn line, is still read, and what is broken counted."""
        others = (ended("r2"), ended("q1", life=-1))
        path = write(tmp_path / "l", *others, ended("r1"), ended("r1-0"))
        odd = json.dumps(ended("r1")).replace('"r1"', '"\\u00721"')
        torn = json.dumps(ended("q2"))[:60] + json.dumps(ended("q3"))
        later = json.dumps(ended("q4")).replace('"v": 1', '"v": 2')
        path.write_text(f"{path.read_text()}{odd}\n{torn}\n{later}")
        reading = Reading()
        lines = [*read_logs(find_logs(path), reading, about="r1")]
        assert ["r1", "r1-0", "r1", "q3"] == [each.request_id for each in lines]
        assert 6 == reading.lines  # one of them is none, if it is looked into
        assert (1, 1) == (reading.garbage, reading.other_schema)

    def test_lines_of_the_real_pipeline_about_others_are_not_looked_into(
        self, tmp_path
    ):
        """The log's own lines have their event behind what is bound to them: each was decoded."""
        reading, found = Reading(), find_logs(real_run(tmp_path / "log"))
        assert [] == [*read_logs(found, reading, about="nobody")]
        assert reading.lines > 2

    def test_id_that_is_spelt_otherwise_in_a_line_is_found(self, tmp_path):
        """R-71: clients choose ids; what JSON spells in several ways is looked for in all lines."""
        path = write(tmp_path / "l", *map(ended, ("r\N{SNOWMAN}", 'r"', "r\\", "q")))
        for name in ("r\N{SNOWMAN}", 'r"', "r\\"):
            lines = read_logs(find_logs(path), Reading(), about=name)
            assert name in [each.request_id for each in lines]
        no_text = os.fsdecode(b"r\xff")
        assert [] == [*read_logs(find_logs(path), Reading(), about=no_text)][3:]

    def test_progress_is_told_in_bytes(self, tmp_path):
        """Whoever waits for a large log sees how far it is."""
        path = write(tmp_path / "ucm-w-1.jsonl", ended(), ended())
        told = []
        list(read_logs(find_logs(path), Reading(), told.append))
        assert path.stat().st_size == sum(told)
