# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is done where descriptors, threads or room run out."""

from tests.mutations.mutant import Mutant

__all__ = ["SHORT"]

_EMPTIED = "tests/backends/test_files_emptied.py"
_SLAB = "tests/stores/test_slab_short.py"
_WEIGHTS = "tests/integration/vllm/test_weights.py::TestAnswers"
_AGENT = "tests/agent/test_exhausted.py"
_LOG = "tests/test_log_room.py"
_ADDRESS = "tests/agent/test_address.py"

SHORT = (
    Mutant(
        name="agent_ends_for_want_of_a_descriptor",
        why="R-63: one engine that cannot be served costs all others their tiers.",
        file="ucm/agent/connection.py",
        find="        except (OSError, RuntimeError) as exc:  # no descriptor or thread",
        replace="        except ZeroDivisionError as exc:  # no descriptor or thread",
        killers=(
            f"{_AGENT}::test_agent_without_descriptors_for_an_engine_serves_the_others",
        ),
    ),
    Mutant(
        name="engine_ends_for_want_of_a_thread",
        why="Weights that may have changed while no thread is to be had end the engine.",
        file="ucm/integration/vllm/weights.py",
        find="            with contextlib.suppress(RuntimeError):  # no thread;",
        replace="            with contextlib.suppress(ZeroDivisionError):  # no thread;",
        killers=(
            f"{_WEIGHTS}::test_reading_that_gets_no_thread_begins_in_a_later_step",
        ),
    ),
    Mutant(
        name="slab_kept_by_who_got_no_thread",
        why="R-25: a host that tries again finds its own slab in use, for good.",
        file="ucm/stores/slab/_opened.py",
        find="        except (ConfigError, StoreUnavailableError):\n            self.close()",
        replace="        except ConfigError:\n            self.close()",
        killers=(f"{_SLAB}::test_slab_whose_memory_gets_no_thread_is_left",),
    ),
    Mutant(
        name="refused_description_left",
        why="Each try on a full mount leaves an empty file, until inodes are short as well.",
        file="ucm/stores/slab/_keyspaces.py",
        find="                inner.remove(temporary)\n",
        replace="                pass\n",
        killers=(f"{_SLAB}::test_description_without_room_leaves_nothing",),
    ),
    Mutant(
        name="host_stopped_by_a_text_for_people",
        why="A full mount refuses a host whose slab is whole and has its memory.",
        file="ucm/cache/opening.py",
        find="    except UCMError as exc:\n        log.warning(STORE",
        replace="    except ZeroDivisionError as exc:\n        log.warning(STORE",
        killers=(
            "tests/cache/test_short.py::test_text_that_nobody_can_keep_stops_no_host",
        ),
    ),
    Mutant(
        name="status_without_a_thread_raises",
        why="Who tells how a process is ends it.",
        file="ucm/status.py",
        find="        except RuntimeError as exc:\n            self.close()\n",
        replace="        except ZeroDivisionError as exc:\n            self.close()\n",
        killers=(
            "tests/test_status.py::TestSlab::test_a_process_without_a_thread_for_it_serves_nobody",
        ),
    ),
    Mutant(
        name="emptied_share_stays_away",
        why="Who clears a tier's directory is without the tier until all its engines have ended.",
        file="ucm/backends/files/_share.py",
        find="        self.is_lost |= is_gone\n",
        replace="",
        killers=(f"{_EMPTIED}::test_share_that_was_emptied_is_ours_again",),
    ),
    Mutant(
        name="mount_point_taken_for_the_share",
        why="R-24: while a mount is away its blocks go to the file system below it.",
        file="ucm/backends/files/_share.py",
        find="        if not is_same and not os.path.exists(self.path(MANIFEST)):\n",
        replace="        if is_same is None:\n",
        killers=(f"{_EMPTIED}::test_mount_point_without_its_mount_is_left_alone",),
    ),
    Mutant(
        name="too_few_open_files_cost_a_slab",
        why="R-24: who has too few open files is told to remove the slab.",
        file="ucm/stores/slab/_files.py",
        find="    remedy = _MORE_FILES if is_short else _REMOVE\n",
        replace="    remedy = _REMOVE\n",
        killers=(f"{_SLAB}::test_remedy_for_too_few_open_files_removes_nothing",),
    ),
    Mutant(
        name="counts_made_in_an_emptied_share",
        why="R-24: the next agent takes the directory for somebody else's.",
        file="ucm/backends/files/_share.py",
        find="        os.stat(self.path(MANIFEST))\n",
        replace="",
        killers=(f"{_EMPTIED}::test_put_into_an_emptied_directory_leaves_nothing",),
    ),
    Mutant(
        name="agent_that_nobody_finds_stays",
        why="R-63: engines that come are served by nobody, or there are two agents.",
        file="ucm/agent/address.py",
        find='        return "" if is_own else',
        replace='        return "" if self else',
        killers=(f"{_ADDRESS}::test_name_that_another_agent_has_stays",),
    ),
    Mutant(
        name="socket_of_the_next_agent_removed",
        why="R-63: whoever comes then is served by nobody.",
        file="ucm/agent/address.py",
        find="            if self._own and os.path.samestat(",
        replace="            if self._own or os.path.samestat(",
        killers=(f"{_ADDRESS}::test_name_that_another_agent_has_stays",),
    ),
    Mutant(
        name="job_kept_without_a_thread",
        why="X-14: a tier whose first threads could not be started has no answer for ever.",
        file="ucm/backends/_crew.py",
        find="        self._hire(1)\n        job = Job(work)\n        self._jobs.append(job)\n",
        replace="        job = Job(work)\n        self._jobs.append(job)\n        self._hire(1)\n",
        killers=(
            "tests/backends/test_crew_short.py::test_call_without_a_thread_leaves_nothing_to_those_that_come",
        ),
    ),
    Mutant(
        name="line_beside_a_cut_one",
        why="R-22: a line behind a full disk cannot be read, and counts as written.",
        file="ucm/line_writer.py",
        find='                    self._is_torn = not written.endswith(b"\\n")',
        replace="                    self._is_torn = not written",
        killers=(
            f"{_LOG}::test_lines_behind_a_cut_one_are_whole_and_the_others_counted",
        ),
    ),
    Mutant(
        name="loss_at_the_end_of_a_log_untold",
        why="R-22: whoever reads a log takes it for whole.",
        file="ucm/line_writer.py",
        find="                if dropped:  # by the last lines",
        replace="                if dropped and lines:  # by the last lines",
        killers=(f"{_LOG}::test_lines_that_were_the_last_ones_are_told_of",),
    ),
    Mutant(
        name="blocks_put_into_a_removed_file",
        why="R-51: what is told as spilled is gone with the agent, and nothing says so.",
        file="ucm/backends/disk/_drive.py",
        find="        if not os.fstat(self._fd).st_nlink:",
        replace="        if os.fstat(self._fd).st_nlink < 0:",
        killers=(
            "tests/backends/test_disk_removed.py::test_blocks_that_nobody_would_find_again_are_not_taken",
        ),
    ),
    Mutant(
        name="slab_not_opened_keeps_its_index",
        why="R-63: each try of an engine takes an agent some descriptors more.",
        file="ucm/stores/slab/_locks.py",
        find="            self.on_taken = _nothing\n",
        replace="",
        killers=(f"{_SLAB}::test_slab_that_cannot_be_opened_keeps_no_descriptor",),
    ),
    Mutant(
        name="error_of_a_call_keeps_its_frames",
        why="R-63: what a call had that failed is kept until the collector comes.",
        file="ucm/agent/calls.py",
        find="            del error, over  # which",
        replace="            del error  # which",
        killers=(
            "tests/agent/test_calls.py::TestThreadCalls::test_error_takes_along_what_its_call_had",
        ),
    ),
)
