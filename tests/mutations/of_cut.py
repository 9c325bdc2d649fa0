# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is cancelled, interrupted or gone at the worst moment."""

from tests.mutations.mutant import Mutant

__all__ = ["CUT"]

_CUT_IN = "tests/cache/test_cut_in.py"
_AWAITING = "tests/integration/transformers/test_awaiting.py"
_CLUSTER = "tests/backends/test_redis_cluster.py"
_LINK = "ucm/backends/_redis_link.py"
_RESP = "ucm/backends/_resp.py"
_LINKS = "tests/backends/test_redis_connections.py"
_READ = "tests/backends/test_redis_link.py"
_SPILL = "tests/agent/test_spill.py::TestSpill"
_CREW = "tests/backends/test_crew.py"
_PLACES = "tests/backends/test_places.py"
_ROOM = "tests/backends/test_files_room.py::TestRoom"
_LONG = "tests/backends/test_files_room.py::TestLongWalk"
_SMALL = "tests/backends/test_files_room.py::TestSmallMount"
_WALK = "tests/backends/test_files_walk.py::TestEvict"

CUT = (
    Mutant(
        name="withdrawn_amid_its_commit_stays",
        why="R-42: a host that cancels a save and forgets its blocks finds them again.",
        file="ucm/pipeline/save.py",
        find="if self._forget is not None and _is_withdrawn(ticket):",
        replace="if False:",
        killers=(
            "tests/cache/test_cancel.py::test_save_cancelled_anywhere_gives_all_back[commit-asyncio]",
        ),
    ),
    Mutant(
        name="cancelled_between_two_looks",
        why="R-42: a save that is cancelled just after it was asked for goes on to its commit.",
        file="ucm/cache/core.py",
        find="        with self._lock:  # of those who attend; who appends needs none\n"
        "            unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]\n"
        "        is_turn = self._serving.is_serving and not unwanted\n"
        "        self._take_in(_TURN if is_turn else math.inf)  # behind which these have begun\n",
        replace="        self._take_in()\n        with self._lock:\n"
        "            unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]\n",
        killers=(
            f"{_CUT_IN}::test_save_cancelled_as_the_loop_has_just_looked_is_cancelled",
        ),
    ),
    Mutant(
        name="interrupted_load_writes_on",
        why="R-42: behind Ctrl-C in trio a copy writes to blocks that are the host's again.",
        file="ucm/cache/aio.py",
        find="anyio.get_cancelled_exc_class(), KeyboardInterrupt",
        replace="(anyio.get_cancelled_exc_class(),)",
        killers=(
            f"{_CUT_IN}::test_load_that_is_interrupted_returns_once_nothing_writes",
        ),
    ),
    Mutant(
        name="waiter_of_a_closed_loop_in_the_way",
        why="Who closes a cache behind another loop's end has an error of that loop.",
        file="ucm/cache/host_loop.py",
        find="with contextlib.suppress(RuntimeError):  # of a loop that is closed",
        replace="with contextlib.suppress(KeyError):",
        killers=(
            "tests/cache/test_close.py::TestWrongPlace::test_waiters_of_a_closed_loop_are_in_nobodys_way",
        ),
    ),
    Mutant(
        name="cache_held_when_its_save_has_its_turn",
        why="States of another answer are sealed under the tokens of the first one.",
        file="ucm/integration/transformers/awaiting.py",
        find="        held = self._prompts.hold(input_ids, past_key_values, attention_mask)\n"
        "        return self._lanes.call(partial(self._prompts.save_held, held, salt))\n",
        replace="        told = input_ids, past_key_values, attention_mask\n"
        "        return self._lanes.call(partial(self._prompts.save, *told, salt=salt))\n",
        killers=(
            f"{_AWAITING}::TestAwaiting::test_what_a_cache_holds_at_the_call_is_saved",
        ),
    ),
    Mutant(
        name="prompts_opened_for_nobody",
        why="R-42: a start that is given up leaves threads, a slab and an agent's client.",
        file="ucm/integration/transformers/awaiting.py",
        find="            undo.push_async_callback(to_its_end, self._made.close)\n",
        replace="",
        killers=(
            f"{_AWAITING}::TestCut::test_task_cancelled_while_it_opens_leaves_nothing",
        ),
    ),
    Mutant(
        name="hung_tier_has_no_wait",
        why="R-63: a backlog is thrown away for a tier that is not even asked.",
        file="ucm/backends/_circuit.py",
        find="        self._look_for_hung()\n        if not self.is_open:\n",
        replace="        if not self.is_open:\n",
        killers=(
            "tests/backends/test_hung.py::test_whoever_only_waits_has_a_hung_call_told",
        ),
    ),
    Mutant(
        name="unremovable_block_gives_room",
        why="A share whose mount refuses to remove is filled beyond its capacity.",
        file="ucm/backends/files/_walk.py",
        find="                continue  # it stays, and takes its room\n",
        replace="                pass\n",
        killers=(f"{_ROOM}::test_block_that_cannot_be_removed_takes_its_room",),
    ),
    Mutant(
        name="full_share_is_not_collected",
        why="A share without room for one more file never gets any, behind a restart, either.",
        file="ucm/backends/files/_share.py",
        find="            if exc.errno in AWAY:\n                raise\n            return None",
        replace="            raise",
        killers=(
            f"{_ROOM}::test_share_that_takes_no_file_at_all_is_counted_and_gets_room",
        ),
    ),
    Mutant(
        name="small_mount_is_full_for_ever",
        why="A mount that has less room than was set keeps its first blocks, and takes no other.",
        file="ucm/backends/files/_room.py",
        find="            self._refused = nbytes\n",
        replace="            pass\n",
        killers=(
            f"{_SMALL}::test_mount_with_less_room_than_was_set_goes_on_taking_blocks",
        ),
    ),
    Mutant(
        name="each_machine_makes_room_for_all",
        why="Of a mount that is full each of many machines removes a share, one after the other.",
        file="ucm/backends/files/_share.py",
        find="refused_bytes > 0 and not self._takes(refused_bytes)",
        replace="refused_bytes > 0",
        killers=(f"{_SMALL}::test_room_that_somebody_else_has_made_is_enough",),
    ),
    Mutant(
        name="filled_mount_is_raced",
        why="What others fill is walked through at each put, until none of our blocks is left.",
        file="ucm/backends/files/_room.py",
        find="if self._refused and anyio.current_time() >= self._short_from:",
        replace="if self._refused:",
        killers=(f"{_SMALL}::test_mount_that_is_filled_by_others_is_not_raced",),
    ),
    Mutant(
        name="hung_job_is_no_hung_thread",
        why="X-14: with one thread in a walk that hangs each call waits out its deadline.",
        file="ucm/backends/_crew.py",
        find="self.num_hung + self._num_jobs >= self.num_threads",
        replace="self.num_hung >= self.num_threads",
        killers=(f"{_CREW}::TestJob::test_job_that_hangs_is_no_thread_for_others",),
    ),
    Mutant(
        name="threads_hired_behind_the_end",
        why="A put that goes on while its disk is closed leaves a thread, or waits for one that ended.",
        file="ucm/backends/_crew.py",
        find="        if not items or self._is_closing:",
        replace="        if not items:",
        killers=(f"{_CREW}::TestClose::test_nothing_is_begun_behind_the_end",),
    ),
    Mutant(
        name="late_thread_waits_for_room",
        why="Deletions of a drive wait until blocks are moved that others move already.",
        file="ucm/backends/_crew.py",
        find="self._next + self._num_entered < len",
        replace="self._next < len",
        killers=(
            f"{_CREW}::TestRoom::test_thread_for_which_no_item_is_left_waits_for_no_room",
        ),
    ),
    Mutant(
        name="given_up_batch_stays_queued",
        why="X-14: while a mount hangs each call that is given up holds its blocks for ever.",
        file="ucm/backends/_crew.py",
        find="            self._forget_stopped()\n",
        replace="",
        killers=(
            f"{_CREW}::TestCancelled::test_calls_that_were_given_up_leave_nothing_behind",
        ),
    ),
    Mutant(
        name="long_walk_is_waited_for",
        why="R-63: behind each start a tier is taken for silent, also by whoever reads.",
        file="ucm/backends/files/_room.py",
        find="ends_at = self._started_at + self._patience_s",
        replace="ends_at = math.inf",
        killers=(f"{_LONG}::test_put_is_full_at_once_while_room_is_made",),
    ),
    Mutant(
        name="walk_begins_without_room_left",
        why="R-63: blocks are dropped while a large share is walked through, again and again.",
        file="ucm/backends/files/_room.py",
        find="return self._used > self.capacity - self._kept and now >= self._full_until",
        replace="return False",
        killers=(f"{_LONG}::test_room_is_made_before_it_is_used_up",),
    ),
    Mutant(
        name="first_of_several_starts_alone",
        why="R-24: of agents that come to a new directory at once all but one end with an error.",
        file="ucm/backends/_places.py",
        find="if others and name not in there and not _has(path / name):",
        replace="if others:",
        killers=(f"{_PLACES}::test_directory_is_of_all_who_come_at_the_same_time",),
    ),
    Mutant(
        name="manifest_read_once",
        why="R-24: an agent ends because another one was just writing.",
        file="ucm/backends/_places.py",
        find="range(_TRIES - 1)",
        replace="range(0)",
        killers=(f"{_PLACES}::test_manifest_that_is_not_whole_is_read_again",),
    ),
    Mutant(
        name="what_another_machine_removed_takes_room",
        why="X-02: of a share that two machines collect at once twice as much goes.",
        file="ucm/backends/files/_walk.py",
        find="        for nbytes in sizes.values():  # another",
        replace="        for nbytes in ():  # another",
        killers=(
            f"{_WALK}::test_what_another_machine_removed_makes_room_and_is_not_counted",
        ),
    ),
    Mutant(
        name="time_out_without_end",
        why="X-09: a time-out that no lock can wait for leaves a cache half closed.",
        file="ucm/settings.py",
        find="below = MOST if hint is float else math.inf",
        replace="below = math.inf",
        killers=(
            "tests/test_config.py::TestValues::test_value_out_of_its_range_is_refused[timeout-shutdown-10000000000.0]",
        ),
    ),
    Mutant(
        name="sent_from_a_slot",
        why="R-52: a stalled server is sent another block's bytes as a part of the first one.",
        file=_LINK,
        find="            if not is_well:\n                self.abort()\n",
        replace="            if answers.is_cut:\n                self.abort()\n",
        killers=(
            f"{_LINKS}::test_nothing_is_sent_behind_the_end_of_a_call",
            f"{_LINKS}::test_nothing_is_read_behind_the_end_of_a_call",
        ),
    ),
    Mutant(
        name="call_ends_before_its_thread",
        why="R-52: who gave a call up has its memory written to while it is another block's.",
        file=_LINK,
        find="                    await job.wait()  # nobody uses",
        replace="                    pass  # nobody uses",
        killers=(f"{_LINKS}::test_call_that_is_given_up_waits_for_its_thread",),
    ),
    Mutant(
        name="what_has_ended_is_asked",
        why="R-52: a backend that is closed as it connects waits for nobody's answer until its deadline.",
        file=_LINK,
        find='            if not self._is_open:\n                raise ConnectionError("it has ended")\n',
        replace="",
        killers=(f"{_READ}::test_what_has_ended_is_not_asked",),
    ),
    Mutant(
        name="other_answer_is_waited_for_again",
        why="R-52: a block that is not there, among others that are, costs the deadline.",
        file=_LINK,
        find="            answers.come(0)  # what came in place of a value\n",
        replace="",
        killers=(f"{_READ}::test_one_call_reads_what_many_read",),
    ),
    Mutant(
        name="end_of_a_value_is_not_looked_at",
        why="R-51: of two servers' words the second ones are bytes of a block.",
        file="ucm/native.c",
        find="if (part == end && comes(&from, suffix, suffix_bytes)) continue;",
        replace="if (part == end && comes(&from, suffix, 0 * suffix_bytes)) continue;",
        killers=(f"{_READ}::test_value_without_its_end_is_none",),
    ),
    Mutant(
        name="answer_to_nothing_is_the_next_ones",
        why="R-51: a server that says too much has each block take the one's bytes before it.",
        file=_RESP,
        find='raise ValueError("an answer to nothing")',
        replace="break",
        killers=(f"{_READ}::test_what_no_server_says_is_no_answer",),
    ),
    Mutant(
        name="value_is_read_however_long",
        why="R-52: a stranger's value of gigabytes in a block's place is read to its end.",
        file=_RESP,
        find="if over > _MOST_SKIPPED:",
        replace="if over < 0:",
        killers=(f"{_READ}::test_value_of_absurd_length_is_not_read",),
    ),
    Mutant(
        name="ended_connection_is_the_servers_silence",
        why="R-52: what was idle for long fails the first requests of each that comes back.",
        file="ucm/backends/_redis_answers.py",
        find="return isinstance(answer, ConnectionError | NoConnectionError)",
        replace="return False",
        killers=(f"{_LINKS}::test_connections_that_the_server_has_ended_are_replaced",),
    ),
    Mutant(
        name="rest_of_a_value_is_the_next_answer",
        why="R-51: what a stranger has put into a value is read as the server's words.",
        file=_LINK,
        find="job.error is None and not answers.is_cut",
        replace="job.error is None",
        killers=(f"{_LINKS}::test_rest_of_a_value_that_is_too_long_is_nobodys_answer",),
    ),
    Mutant(
        name="unasked_answer_is_kept",
        why="R-51: it is taken for the answer to what is asked next.",
        file=_LINK,
        find="        return False  # an answer to nothing, or the end",
        replace="        return True  # an answer to nothing, or the end",
        killers=(f"{_LINKS}::test_what_nobody_asked_for_ends_a_connection",),
    ),
    Mutant(
        name="calls_go_on_behind_the_end",
        why="R-52: what was queued connects anew to a backend that was closed.",
        file="ucm/backends/_redis_servers.py",
        find="        if not self._is_open or not commands:",
        replace="        if not commands:",
        killers=(f"{_LINKS}::test_nothing_goes_on_behind_the_end_of_a_backend",),
    ),
    Mutant(
        name="redis_py_goes_on_behind_the_end",
        why="R-52: it connects anew, and nobody ends that one.",
        file="ucm/backends/_redis_servers.py",
        find="            scope.cancel()\n",
        replace="            pass\n",
        killers=(f"{_LINKS}::test_what_redis_py_is_asked_ends_with_the_backend",),
    ),
    Mutant(
        name="large_block_of_an_earlier_release_is_damaged",
        why="After an update the large blocks of a server are deleted as damaged.",
        file="ucm/backends/_redis_values.py",
        find="return there if None in answers[1:] and there.nbytes == nbytes else GARBAGE",
        replace="return GARBAGE",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_large_block_of_an_earlier_release_is_served",
        ),
    ),
    Mutant(
        name="large_block_has_the_time_of_a_small_one",
        why="R-52: on a slow network no block of tens of megabytes is ever spilled.",
        file=_LINK,
        find="with anyio.fail_after(seconds_for(commands, self._timeout)):",
        replace="with anyio.fail_after(self._timeout):",
        killers=(f"{_LINKS}::test_large_request_outlives_a_small_one",),
    ),
    Mutant(
        name="later_redis_py_is_silence",
        why="After an update of redis-py no block is found in a server, nor put there.",
        file=_LINK,
        find='getattr(connection, "_sock", None)',
        replace="connection._sock",
        killers=(f"{_READ}::test_redis_py_that_keeps_its_socket_is_asked_itself",),
    ),
    Mutant(
        name="any_answer_is_a_block",
        why="R-51: what a server has queued, or takes for something else, is told to be there.",
        file="ucm/backends/_redis_values.py",
        find='if answer == b"OK" or answer is True:',
        replace="if not isinstance(answer, Exception):",
        killers=(f"{_LINKS}::test_answer_of_another_kind_is_no_answer",),
    ),
    Mutant(
        name="cluster_that_moves_is_not_followed",
        why="R-51: from the day on that a cluster is grown its blocks have no answer.",
        file="ucm/backends/_redis_answers.py",
        find='("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")',
        replace='("MOVED", "TRYAGAIN", "CLUSTERDOWN")',
        killers=(f"{_CLUSTER}::test_blocks_of_a_cluster_lie_with_both_servers",),
    ),
    Mutant(
        name="connections_stay_behind_the_end",
        why="A backend that is closed keeps the server's connections.",
        file="ucm/backends/_redis_servers.py",
        find="        for server in self._servers.values():\n            server.links.close()\n",
        replace="",
        killers=(f"{_LINKS}::test_nothing_goes_on_behind_the_end_of_a_backend",),
    ),
    Mutant(
        name="silent_slab_ends_a_drain",
        why="R-55: an agent that is told to end while a lock is held loses its backlog.",
        file="ucm/agent/core.py",
        find="with contextlib.suppress(StoreUnavailableError):  # what is known of is spilled",
        replace="with contextlib.suppress(KeyError):",
        killers=(
            f"{_SPILL}::test_backlog_is_spilled_where_the_slab_tells_nothing_more",
        ),
    ),
    Mutant(
        name="large_block_answers_for_all",
        why="Whoever puts a block that is too large among others has too few answers.",
        file="ucm/backends/files/_backend.py",
        find="                for block in blocks\n",
        replace="                for block in fitting\n",
        killers=(f"{_ROOM}::test_block_that_is_too_large_is_so_alone",),
    ),
)
