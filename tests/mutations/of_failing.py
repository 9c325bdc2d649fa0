# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is left where a start, a thread or somebody else's code fails."""

from tests.mutations.mutant import Mutant

__all__ = ["FAILING"]

_PIPELINE = "ucm/pipeline/pipeline.py"
_RUNTIME = "ucm/runtime.py"
_LOOP = "ucm/loop.py"
_START = "tests/test_runtime_start.py"
_DEADLINES = "tests/test_runtime_deadlines.py::TestDeadlines"
_FOREIGN = "tests/test_runtime_foreign.py"
_ASIDE = "tests/test_threads.py::TestAside"

FAILING = (
    Mutant(
        name="withdrawn_hang_unseen",
        why="Each load waits out its deadline behind a store that hangs for one that was withdrawn.",
        file=_PIPELINE,
        find="dict.fromkeys([*self.queue.open.values(), *self._worked_on()])",
        replace="dict.fromkeys(self.queue.open.values())",
        killers=(
            f"{_DEADLINES}::test_hang_is_noticed_though_its_load_was_withdrawn",
            f"{_DEADLINES}::test_hang_while_slots_are_given_back_is_noticed",
        ),
    ),
    Mutant(
        name="slots_given_back_count_as_a_hang",
        why="Where one save ends late, all that wait are dropped as behind a store that hangs.",
        file="ucm/pipeline/deadlines.py",
        find="now > self._left.get(ticket, now) + _BRIEF_S",
        replace="now > 0.0",
        killers=(
            "tests/pipeline/test_deadlines.py::TestLookThrough::test_slots_that_are_just_given_back_cancel_nobody",
        ),
    ),
    Mutant(
        name="slots_given_back_by_nobody",
        why="A store that hangs as it takes slots back is offered saves for ever.",
        file="ucm/pipeline/tickets.py",
        find="            self._num_jobs += 1  # a store may hang here as well\n",
        replace="            self._num_jobs += 0\n",
        killers=(f"{_DEADLINES}::test_hang_while_slots_are_given_back_is_noticed",),
    ),
    Mutant(
        name="host_s_spans_end_the_service",
        why="A processor of the host's traces that raises ends all saves and loads.",
        file="ucm/spans.py",
        find="contextlib.suppress(Exception)",
        replace="contextlib.suppress(OSError)",
        killers=(
            "tests/test_spans.py::TestSpans::test_processor_that_raises_is_the_hosts_own_matter",
        ),
    ),
    Mutant(
        name="one_end_keeps_others_open",
        why="Where one line of log cannot be written, requests wait for loads that nobody ends.",
        file=_RUNTIME,
        find="                ends.callback(ticket.end, Outcome(kind, reason))\n",
        replace="                ticket.end(Outcome(kind, reason))\n",
        killers=(
            f"{_FOREIGN}::TestFailure::test_ticket_whose_end_raises_keeps_no_other_from_its_own",
        ),
    ),
    Mutant(
        name="engine_waits_for_a_dead_service",
        why="A step waits for a copy that nobody will see the end of.",
        file=_RUNTIME,
        find="            self._intake.changed.notify()  # who waits",
        replace="            pass  # who waits",
        killers=(
            f"{_FOREIGN}::TestFailure::test_engine_that_waits_for_a_copy_hears_of_a_failure",
        ),
    ),
    Mutant(
        name="untold_error_ends_the_thread",
        why="An error of a host's that cannot say what it is ends all saves.",
        file="ucm/errors.py",
        find="        return type(error).__name__\n",
        replace="        raise\n",
        killers=(
            f"{_FOREIGN}::test_error_that_cannot_say_what_it_is_has_its_types_name",
            f"{_FOREIGN}::test_save_whose_error_cannot_be_told_fails_alone",
        ),
    ),
    Mutant(
        name="only_a_device_s_own_error_is_heard",
        why="A request waits for ever for a load whose blocks could not be zeroed.",
        file="ucm/pipeline/guard.py",
        find="        except Exception:  # noqa: BLE001 - no device",
        replace="        except OSError:  # noqa: BLE001 - no device",
        killers=(f"{_FOREIGN}::test_load_whose_blocks_cannot_be_zeroed_is_told",),
    ),
    Mutant(
        name="late_loop_serves",
        why="Threads of a start that was given up stay, and use what is closed.",
        file=_LOOP,
        find="                self._to_call.append(function)\n",
        replace="",
        killers=(
            f"{_START}::TestClosedBefore::test_loop_that_comes_up_late_ends",
            f"{_START}::TestClosedBefore::test_runtime_that_is_closed_while_it_begins_serves_nobody",
        ),
    ),
    Mutant(
        name="store_closed_under_its_start",
        why="A store is unmapped while another thread begins with it.",
        file=_LOOP,
        find="        self._is_begun = True\n",
        replace="",
        killers=(
            f"{_START}::TestClosedBefore::test_runtime_that_is_closed_while_it_begins_serves_nobody",
        ),
    ),
    Mutant(
        name="failed_start_waited_for",
        why="A close leaves the store open behind a start that failed.",
        file=_LOOP,
        find="            self._ended.set()\n            raise\n",
        replace="            raise\n",
        killers=(
            f"{_START}::TestClosedBefore::test_start_that_fails_is_waited_for_by_nobody",
        ),
    ),
    Mutant(
        name="thread_that_never_began_is_joined",
        why="Where the system has no more threads, a close raises, and leaves the store open.",
        file="ucm/pipeline/workers.py",
        find="[thread for thread in self._threads if thread.is_alive()]",
        replace="self._threads",
        killers=(
            f"{_START}::TestStart::test_thread_that_the_system_does_not_start_leaves_nothing",
        ),
    ),
    Mutant(
        name="copy_threads_left_by_a_failed_start",
        why="Threads that did start are there until the process ends.",
        file=_PIPELINE,
        find="""\
        try:
            self._start_threads()
            async with""",
        replace="""\
        self._start_threads()
        try:
            async with""",
        killers=(
            f"{_START}::TestStart::test_thread_that_the_system_does_not_start_leaves_nothing",
        ),
    ),
    Mutant(
        name="job_without_a_thread_is_lost",
        why="A block that was to be forgotten stays.",
        file="ucm/threads.py",
        find="""\
        self._jobs.put(job)
        self.begin()
""",
        replace="""\
        self.begin()
        if self._thread is not None:
            self._jobs.put(job)
""",
        killers=(
            f"{_ASIDE}::test_job_for_which_there_is_no_thread_is_done_with_the_next",
        ),
    ),
    Mutant(
        name="loop_that_fails_is_up",
        why="A cache whose loop has died is open, and each call waits for all its time.",
        file="ucm/cache/serving.py",
        find="self.is_serving = False  # before who waits for the start is told",
        replace="pass",
        killers=(
            "tests/cache/test_close.py::test_cache_whose_store_raises_as_it_starts_is_not_open",
        ),
    ),
    Mutant(
        name="any_blocks_are_opened",
        why="Blocks that a store did not open count as loaded, with what they held before.",
        file="ucm/pipeline/load.py",
        find="if tuple(lease.keys) != ticket.span.keys:",
        replace="if False:",
        killers=(
            "tests/cache/test_wrong_store.py::test_store_that_opens_fewer_blocks_gives_no_hit",
        ),
    ),
    Mutant(
        name="any_keys_are_leased",
        why="Blocks are stored under keys of others, for all to find.",
        file="ucm/pipeline/save.py",
        find="if tuple(lease.keys) != granted:",
        replace="if False:",
        killers=(
            "tests/cache/test_wrong_store.py::test_store_that_counts_its_slots_anew_stores_nothing_wrong",
        ),
    ),
    Mutant(
        name="error_is_what_its_init_takes",
        why="A pool of processes waits for ever for a worker whose error it cannot read.",
        file="ucm/errors.py",
        find="return _again, (type(self), self.args), self.__dict__",
        replace="return super().__reduce__()",
        killers=(
            "tests/test_errors.py::test_an_error_comes_whole_from_another_process",
        ),
    ),
    Mutant(
        name="ended_interpreter_is_waited_in",
        why="A process ends by as much later as a close would drain, for threads that run no more.",
        file="ucm/cache/sync.py",
        find="if sys.is_finalizing():  # as a generator's that nobody has ended",
        replace="if False:",
        killers=(
            "tests/cache/test_interpreter.py::test_interpreter_does_not_wait_for_threads_that_have_ended",
        ),
    ),
    Mutant(
        name="any_count_is_an_answer",
        why="A host is told what a store of others says, whatever it is.",
        file="ucm/stores/leases.py",
        find="    if not 0 <= count <= most:\n",
        replace="    if False:\n",
        killers=(
            "tests/cache/test_wrong_store.py::test_store_that_answers_something_else_has_not_answered",
        ),
    ),
    Mutant(
        name="numbers_of_numpy_go_on",
        why="An engine ends over a number of a store of others that it cannot send.",
        file="ucm/stores/leases.py",
        find="        count = int(index(told))\n",
        replace="        count = told\n        index(told)\n",
        killers=(
            "tests/stores/test_foreign_answers.py::test_commit_tells_plain_numbers_or_fails[told0]",
            "tests/stores/test_foreign_answers.py::test_numbers_of_numpy_are_plain_ones_to_a_scheduler",
        ),
    ),
    Mutant(
        name="panics_end_engines",
        why="An engine ends by a panic of native code that looks its blocks up.",
        file="ucm/stores/bypass.py",
        find="        except BaseException as exc:  # it would end the engine\n",
        replace="        except Exception as exc:\n",
        killers=(
            "tests/stores/test_foreign_answers.py::test_look_up_that_raises_no_exception_has_no_answer",
        ),
    ),
    Mutant(
        name="commits_are_believed",
        why="Blocks are held for good, or counters fall, by what a store of others says.",
        file="ucm/pipeline/save.py",
        find='committed = told_count("commit", told, left)',
        replace="committed = told",
        killers=(
            "tests/stores/test_foreign_answers.py::test_commit_tells_plain_numbers_or_fails",
        ),
    ),
    Mutant(
        name="plug_ins_end_doctors",
        why="An agent is started again and again over a class that was renamed.",
        file="ucm/registry.py",
        find="    except Exception as exc:  # a plug-in",
        replace="    except ImportError as exc:  # a plug-in",
        killers=(
            "tests/test_registry.py::TestLoadClass::test_whatever_a_plug_in_raises_is_a_wrong_setting",
        ),
    ),
    Mutant(
        name="names_of_ours_are_taken",
        why="An engine's blocks go to whatever registered the name of its store.",
        file="ucm/registry.py",
        find="    if len(found) > 1:",
        replace="    if len(found) > 2:",
        killers=(
            "tests/test_registry.py::TestLoadClass::test_name_that_several_registered_is_nobodys",
        ),
    ),
    Mutant(
        name="any_stats_are_an_answer",
        why="A scrape fails with an error of Python's.",
        file="ucm/cache/questions.py",
        find="        if not isinstance(told, StoreStats):\n",
        replace="        if False:\n",
        killers=(
            "tests/cache/test_wrong_store.py::test_store_that_answers_something_else_has_not_answered",
        ),
    ),
    Mutant(
        name="any_look_up_is_an_answer",
        why="An engine ends by what a store of others says.",
        file="ucm/stores/bypass.py",
        find="            elif tells_each and not (is_plain",
        replace="            elif False and not (is_plain",
        killers=(
            "tests/stores/test_bypass.py::TestBypass::test_store_of_others_that_answers_something_else_has_not_answered",
        ),
    ),
    Mutant(
        name="descriptions_end_engines",
        why="An engine ends as a store of others is told what its key space is, or a thread of it as it forgets.",
        file="ucm/stores/bypass.py",
        find="        except BaseException as exc:  # it would end the engine, or a thread of it\n",
        replace="        except ZeroDivisionError as exc:\n",
        killers=(
            "tests/integration/vllm/test_foreign_store.py::TestRaises::test_reset_goes_on_without_descriptions",
            "tests/integration/vllm/test_foreign_store.py::TestRaises::test_thread_that_deletes_goes_on",
        ),
    ),
    Mutant(
        name="panic_of_stats_ends_a_thread",
        why="An engine's gauges stand still for good, behind one panic of native code.",
        file="ucm/integration/vllm/stats.py",
        find="        except BaseException:  # noqa: BLE001 - a store of others: the next look is to come\n",
        replace="        except Exception:\n",
        killers=(
            "tests/integration/vllm/test_foreign_store.py::TestRaises::test_engine_that_is_not_told_how_full_it_is_looks_again[error1]",
        ),
    ),
    Mutant(
        name="errors_of_others_end_engines",
        why="An engine ends by an error that a client of somebody else's raises.",
        file="ucm/stores/bypass.py",
        find="        except BaseException as exc:  # it would end the engine\n",
        replace="        except ZeroDivisionError as exc:\n",
        killers=(
            "tests/stores/test_bypass.py::TestBypass::test_store_of_others_that_raises_its_own_has_not_answered",
        ),
    ),
    Mutant(
        name="flood_is_taken_in_at_once",
        why="A loop of ours stands still for as long as a host asks for saves.",
        file="ucm/cache/core.py",
        find="            while self._asked and most > 0:\n",
        replace="            while self._asked:\n",
        killers=(
            "tests/cache/test_late_loop.py::test_many_saves_are_taken_in_with_turns_of_others_between",
        ),
    ),
    Mutant(
        name="ended_tickets_wait",
        why="Saves that were let in where others were cancelled are refused.",
        file="ucm/pipeline/dump_queue.py",
        find="            self._waits_no_more(ticket)  # though its item may still be here\n",
        replace="",
        killers=(
            "tests/pipeline/test_dump_queue.py::TestDumpQueue::test_ticket_that_has_ended_is_in_nobodys_way",
        ),
    ),
)
