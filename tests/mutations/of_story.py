# SPDX-License-Identifier: Apache-2.0
"""Mutants of what reads logs, draws them, and tells how a process is."""

from tests.mutations.mutant import Mutant

__all__ = ["STORY"]

_FILES = "ucm/story/files.py"
_LINES = "ucm/story/lines.py"
_LIVES = "ucm/story/lives.py"
_COLLECTED = "ucm/story/collected.py"
_TOTALS = "ucm/story/totals.py"
_DRAWING = "ucm/story/drawing.py"
_PAGE = "ucm/story/page.py"
_PERFETTO = "ucm/story/perfetto.py"
_TRACE = "ucm/cli/trace.py"
_ANSWERS = "ucm/cli/trace_answers.py"
_STATUS = "ucm/status.py"
_VIEW = "ucm/cli/top_view.py"
_FILE_TESTS = "tests/story/test_files.py"
_LIFE_TESTS = "tests/story/test_lives.py"
_TOTAL_TESTS = "tests/story/test_totals.py"
_DRAWING_TESTS = "tests/story/test_drawing.py"
_PAGE_TESTS = "tests/story/test_page.py"
_TRACE_TESTS = "tests/cli/test_trace.py"
_STATUS_TESTS = "tests/test_status.py"
_TOP_TESTS = "tests/cli/test_top.py"

STORY = (
    Mutant(
        name="story_misses_of_a_reason_have_one_remedy",
        why="Who has one block deleted of many that made room is told of none.",
        file=_ANSWERS,
        find="ways = totals.remedies[reason].items() if kind",
        replace="ways = list(totals.remedies[reason].items())[:1] if kind",
        killers=(
            f"{_TRACE_TESTS}::TestWhy::test_remedies_of_a_reason_are_those_of_its_misses",
        ),
    ),
    # Reading.
    Mutant(
        name="story_long_line_ends_reading",
        why="One long line hides all that stands behind it in a log.",
        file=_FILES,
        find="        if is_inside and nbytes > 0 and not was_inside:\n            yield None",
        replace="        if is_inside and nbytes > 0 and not was_inside:\n            return",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_garbage_is_counted_and_the_rest_is_read",
        ),
    ),
    Mutant(
        name="story_nested_line_raises",
        why="A line of brackets ends the command with a traceback.",
        file=_LINES,
        find="    except RecursionError as exc:\n        raise ValueError",
        replace="    except KeyError as exc:\n        raise ValueError",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_garbage_is_counted_and_the_rest_is_read",
        ),
    ),
    Mutant(
        name="story_reads_any_schema",
        why="Numbers of a later schema are taken for those of this one.",
        file=_LINES,
        find="        if head.v != SCHEMA:",
        replace="        if head.v < SCHEMA:",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_a_line_of_another_schema_is_not_guessed_at",
        ),
    ),
    Mutant(
        name="story_newest_first",
        why="Rotated files are read backwards; what was left out is the newest.",
        file=_FILES,
        find="(file.process, -file.age, ",
        replace="(file.process, file.age, ",
        killers=(
            f"{_FILE_TESTS}::TestFind::test_rotated_files_come_before_the_newest_of_their_process",
        ),
    ),
    Mutant(
        name="story_keeps_all",
        why="A log of a busy day takes all memory of whoever looks at it.",
        file=_COLLECTED,
        find="        while len(self._heap) > self._most or (",
        replace="        while len(self._heap) > 10**9 or (",
        killers=(
            f"{_LIFE_TESTS}::TestBounds::test_the_newest_are_kept_in_whatever_order_they_come",
        ),
    ),
    Mutant(
        name="story_lines_weigh_nothing",
        why="Lines of a megabyte each take all memory of whoever looks.",
        file=_LINES,
        find="line.weight = 1 + len(raw) // _BYTES_PER_WEIGHT",
        replace="line.weight = 1",
        killers=(f"{_LIFE_TESTS}::TestBounds::test_long_lines_count_for_more",),
    ),
    Mutant(
        name="story_ticket_of_the_last_life",
        why="A save of one life is told of a later request with the same id.",
        file=_LIVES,
        find="reversed(self.lives[max(0, begun - _LOOKED_AT) : begun])",
        replace="reversed(self.lives[-_LOOKED_AT:])",
        killers=(
            f"{_LIFE_TESTS}::TestJoin::test_a_ticket_goes_to_the_life_that_had_begun",
        ),
    ),
    Mutant(
        name="story_what_runs_on_has_ended",
        why="Who looks for a request that hangs is told of the one before with its id, as well.",
        file=_LIVES,
        find="if by or not candidates.lives:",
        replace="if not candidates.lives:",
        killers=(
            f"{_LIFE_TESTS}::TestJoin::test_what_runs_on_is_not_told_of_what_has_ended",
        ),
    ),
    Mutant(
        name="story_next_life_begins_early",
        why="A look-up of one life is told of the next one, which had not begun.",
        file=_LIVES,
        find="for skew_s in (0.0, _SKEW_S):",
        replace="for skew_s in (_SKEW_S,):",
        killers=(
            f"{_LIFE_TESTS}::TestJoin::test_an_id_that_comes_again_at_once_is_told_apart",
        ),
    ),
    # Numbers.
    Mutant(
        name="story_bytes_asked_for_are_committed",
        why="Bytes of blocks that never arrived are counted as moved.",
        file=_LINES,
        find="return self.nbytes * self.committed // self.blocks if self.blocks else 0",
        replace="return self.nbytes",
        killers=(f"{_TOTAL_TESTS}::TestTotals::test_bytes_are_those_that_arrived",),
    ),
    Mutant(
        name="story_quantile_of_octaves",
        why="A quantile may be twice what it was.",
        file=_TOTALS,
        find="_PER_DOUBLING: Final = 4",
        replace="_PER_DOUBLING: Final = 1",
        killers=(
            f"{_TOTAL_TESTS}::TestDurations::test_a_quantile_is_at_most_a_fifth_too_much",
        ),
    ),
    # Drawing.
    Mutant(
        name="story_bars_hide_bars",
        why="A request that overlaps another is drawn on top of it.",
        file=_DRAWING,
        find="        row = heapq.heappop(free) if free else len(busy)",
        replace="        row = heapq.heappop(free) if free else 0",
        killers=(f"{_DRAWING_TESTS}::TestLanes::test_bars_of_one_row_never_overlap",),
    ),
    Mutant(
        name="story_perfetto_overlaps",
        why="Events of one thread that do not nest are drawn wrongly.",
        file=_PERFETTO,
        find="            if stages[-1][2] <= stage[1]:",
        replace="            if stages[-1][1] <= stage[1]:",
        killers=(f"{_DRAWING_TESTS}::TestPerfetto::test_events_of_one_thread_nest",),
    ),
    Mutant(
        name="story_page_unescaped",
        why="A request's id becomes an element of the page, and its script is run.",
        file=_PAGE,
        find='    for sign in "<>&":',
        replace='    for sign in "&":',
        killers=(
            f"{_PAGE_TESTS}::TestPage::test_whatever_a_request_is_called_is_data",
        ),
    ),
    Mutant(
        name="story_page_may_fetch",
        why="A page of a log may ask the network, and tell it what is in the log.",
        file=_PAGE,
        find="default-src 'none'; style-src",
        replace="default-src *; style-src",
        killers=(
            f"{_PAGE_TESTS}::TestPage::test_only_its_own_script_and_style_are_allowed",
        ),
    ),
    Mutant(
        name="story_others_of_all_lives",
        why="What befell the second life is told of the first.",
        file=_TRACE,
        find="        if since <= line.when_s < until and life.request_id in line.owners",
        replace="        if life.request_id in line.owners",
        killers=(
            f"{_TRACE_TESTS}::TestShow::test_lines_of_other_kinds_belong_to_the_life_they_fall_into",
        ),
    ),
    Mutant(
        name="story_guesses_the_request",
        why="Of two requests that begin alike, somebody else's story is told.",
        file=_TRACE,
        find="    if len(names) > 1:",
        replace="    if len(names) > 10**9:",
        killers=(
            f"{_TRACE_TESTS}::TestShow::test_the_beginning_of_an_id_is_enough_if_it_is_one",
        ),
    ),
    Mutant(
        name="story_empty_run_compared",
        why="A log that is empty is compared as a run in which nothing happened.",
        file=_TRACE,
        find="    if not reading.lines:",
        replace="    if not reading.files:",
        killers=(f"{_TRACE_TESTS}::TestDiff::test_a_run_without_a_line_is_an_error",),
    ),
    # Status.
    Mutant(
        name="status_tells_anybody",
        why="Another user of the machine reads what an engine does.",
        file=_STATUS,
        find="                    if peer_uid(connection) in (os.geteuid(), 0):",
        replace="                    if peer_uid(connection) >= 0:",
        killers=(f"{_STATUS_TESTS}::TestAccess::test_another_user_is_told_nothing",),
    ),
    Mutant(
        name="status_socket_open",
        why="The socket has the modes of the process's umask.",
        file=_STATUS,
        find="            os.fchmod(listener.fileno(), 0o600)",
        replace="            os.fchmod(listener.fileno(), 0o666)",
        killers=(f"{_STATUS_TESTS}::TestAccess::test_files_are_for_this_user_alone",),
    ),
    Mutant(
        name="status_in_open_directory",
        why="Others put sockets beside ours, and `ucm top` shows what they say.",
        file=_STATUS,
        find="    if not is_ours or info.st_mode & _OF_OTHERS:",
        replace="    if not is_ours:",
        killers=(
            f"{_STATUS_TESTS}::TestAccess::test_a_directory_that_is_open_to_others_is_not_used",
        ),
    ),
    Mutant(
        name="status_waits_for_its_client",
        why="One client that was stopped keeps all others from an answer.",
        file=_STATUS,
        find="                connection.settimeout(_ANSWER_S)",
        replace="                connection.settimeout(30.0)",
        killers=(
            f"{_STATUS_TESTS}::TestAnswer::test_who_reads_nothing_holds_up_nobody",
        ),
    ),
    Mutant(
        name="status_takes_the_living",
        why="A server that starts takes away the sockets of those that serve.",
        file=_STATUS,
        find="        except OSError:  # busy, or gone\n            return False\n    return False",
        replace="        except OSError:  # busy, or gone\n            return False\n    return True",
        killers=(f"{_STATUS_TESTS}::TestEnd::test_what_the_dead_have_left_goes",),
    ),
    Mutant(
        name="status_endless_answer",
        why="Whoever listens there fills the memory of who asks.",
        file=_STATUS,
        find="            if len(told) > _MOST_BYTES or left <= 0:",
        replace="            if left <= 0:",
        killers=(
            f"{_STATUS_TESTS}::TestSilent::test_an_answer_that_is_none_of_ours_is_named",
        ),
    ),
    Mutant(
        name="top_rate_since_the_start",
        why="What was saved yesterday is shown as saved now.",
        file=_VIEW,
        find="max(0.0, value - past.get(key, 0.0)) / span",
        replace="max(0.0, value) / span",
        killers=(
            f"{_TOP_TESTS}::TestEngines::test_a_rate_is_of_the_time_between_two_looks",
        ),
    ),
    Mutant(
        name="top_bypassed_is_well",
        why="An engine that saves and loads nothing looks well.",
        file=_VIEW,
        find='"starting" if healthy is None else "ok" if healthy else "bypassed"',
        replace='"starting" if healthy is None else "ok"',
        killers=(
            f"{_TOP_TESTS}::TestEngines::test_states_are_told_apart",
            f"{_TOP_TESTS}::TestCommand::test_an_engine_that_is_bypassed_is_not_well",
        ),
    ),
    # What an operator asks of a hit, and of saves that are not stored.
    Mutant(
        name="hits_of_two_tiers_of_one_name",
        why="Of a hit on two disks the tokens of one are told nowhere.",
        file="ucm/integration/vllm/tiers.py",
        find="            found[name] = found.get(name, 0) + count\n",
        replace="            found[name] = count\n",
        killers=(
            "tests/integration/vllm/test_hits.py::TestHit::test_two_tiers_of_one_name_share_it",
        ),
    ),
    Mutant(
        name="load_without_its_place",
        why="Of a request that runs nobody knows which tier had its hit.",
        file="ucm/integration/vllm/lifelog.py",
        find="                hit_tokens=hit,\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_lifelog.py::TestRequest::test_line_says_what_was_loaded",
        ),
    ),
    Mutant(
        name="skipped_blocks_told_as_lost",
        why="What the store had already is counted as blocks that a failed save has cost.",
        file=_TOTALS,
        find="            lost = max(0, ticket.blocks - ticket.committed - ticket.skipped)\n",
        replace="            lost = max(0, ticket.blocks - ticket.committed)\n",
        killers=(
            f"{_TOTAL_TESTS}::TestTotals::test_reasons_of_what_did_not_arrive_are_counted",
        ),
    ),
    Mutant(
        name="narrow_tables",
        why="On a narrow terminal a table is a ladder of letters.",
        file="ucm/cli/output.py",
        find="        if options.max_width >= _NARROW:\n",
        replace="        if options.max_width:\n",
        killers=(
            "tests/cli/test_output.py::test_narrow_terminal_has_a_line_for_each_cell",
        ),
    ),
    Mutant(
        name="drives_without_room_for_a_block",
        why="A disk tier of several drives opens, and takes nothing.",
        file="ucm/backends/disk/_settings.py",
        find="        least = _LEAST_CAPACITY * len(self.path)\n",
        replace="        least = _LEAST_CAPACITY\n",
        killers=(
            "tests/cli/test_config.py::TestCheck::test_what_an_engine_or_its_agent_refuses_is_refused",
        ),
    ),
    Mutant(
        name="story_packed_files_read",
        why="Who packs old files is told numbers of the rest as if they were all.",
        file=_FILES,
        find="    files = [file for file in found if not file.is_packed]\n",
        replace="    files = found\n",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_a_file_that_is_compressed_is_counted",
        ),
    ),
    Mutant(
        name="story_no_miss_in_what_was_not_read",
        why="A log of another release is told as one in which nothing was missed.",
        file=_ANSWERS,
        find="        say_notes(notes)\n        return\n",
        replace="        return\n",
        killers=(
            f"{_TRACE_TESTS}::TestWhy::test_a_run_of_which_a_part_was_not_read_is_not_said_to_have_none",
        ),
    ),
    Mutant(
        name="story_lines_of_others_read",
        why="R-71: the story of one request takes as long as all of a log.",
        file=_FILES,
        find="if word and word not in raw and _is_plain(raw):",
        replace="if False:",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_lines_about_others_are_not_looked_into",
        ),
    ),
    Mutant(
        name="story_odd_lines_left_out",
        why="R-71: a request's line that spells it otherwise, or is broken, goes without a word.",
        file=_FILES,
        find="if word and word not in raw and _is_plain(raw):",
        replace="if word and word not in raw:",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_lines_about_others_are_not_looked_into",
        ),
    ),
    Mutant(
        name="story_id_that_is_no_text_raises",
        why="R-71: bytes that are no text, given as an id, end the command with a traceback.",
        file=_FILES,
        find='about.encode(errors="backslashreplace")',
        replace="about.encode()",
        killers=(
            f"{_FILE_TESTS}::TestRead::test_id_that_is_spelt_otherwise_in_a_line_is_found",
        ),
    ),
)
