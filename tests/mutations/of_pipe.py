# SPDX-License-Identifier: Apache-2.0
"""Mutants of tickets that several requests share, and of what they lose."""

from tests.mutations.mutant import Mutant

__all__ = ["PIPE"]

_SAVE = "ucm/pipeline/save.py"
_PIPELINE = "ucm/pipeline/pipeline.py"
_GUARD = "ucm/pipeline/guard.py"
_TICKETS = "ucm/pipeline/tickets.py"
_WAITS = "ucm/pipeline/engine_waits.py"
_INDEX = "ucm/stores/slab/_index.py"
_MEMORY = "ucm/stores/memory.py"
_LOST = "tests/pipeline/test_lost.py"
_FENCE = f"{_LOST}::TestFence"
_TEAR = f"{_LOST}::TestTear"
_TICKET = "tests/pipeline/test_tickets.py::TestTicket"
_GUARDS = "tests/pipeline/test_guard.py::TestBlockGuard"
_SERVING = "tests/pipeline/test_serving.py::TestServing"
_RUNS = "tests/pipeline/test_runner.py::TestRunner"
_LEFT_OUT = "test_block_left_out_of_a_commit_is_given_back"
_DEATH = "tests/stores/test_slab_crash.py::test_death_at_any_line_leaves_a_whole_slab"

PIPE = (
    # Who is lost.
    Mutant(
        name="lost_blocks_committed",
        why="A block is stored with bytes that the engine wrote amid its copy.",
        file=_SAVE,
        find="told, left = lease.commit(granted),",
        replace="told, left = lease.commit(),",
        killers=(
            f"{_FENCE}::test_block_lost_under_its_copy_costs_only_itself",
            f"{_FENCE}::test_block_lost_between_rows_is_not_stored",
        ),
    ),
    Mutant(
        name="lost_blocks_read",
        why="A copy begins on blocks that the engine was told are free.",
        file=_SAVE,
        find="    if lost := ticket.guard.lost:\n",
        replace="    if lost := frozenset():\n",
        killers=(f"{_FENCE}::test_block_lost_before_its_copy_is_not_read",),
    ),
    Mutant(
        name="lost_positions_of_the_lease",
        why="Positions of the ticket are taken for those of what was granted.",
        file=_SAVE,
        find="enumerate(lease.positions) if each in lost]",
        replace="enumerate(lease.positions) if at in lost]",
        killers=(f"{_FENCE}::test_lost_block_that_is_stored_already_is_none",),
    ),
    Mutant(
        name="lost_blocks_counted_as_stored",
        why="Blocks that nobody has are counted as such that the store had before.",
        file=_SAVE,
        find="int(lease.num_stored) + left - committed",
        replace="int(lease.num_stored) + len(lease.keys) - committed",
        killers=(f"{_FENCE}::test_block_lost_under_its_copy_costs_only_itself",),
    ),
    Mutant(
        name="one_lost_all_lost",
        why="A request that is preempted costs all others their blocks of the step.",
        file=_GUARD,
        find="return len(self.lost) >= self._num_blocks",
        replace="return True",
        killers=(f"{_FENCE}::test_block_lost_under_its_copy_costs_only_itself",),
    ),
    Mutant(
        name="all_lost_still_held",
        why="A save that lost its last block keeps the engine waiting for nothing.",
        file=_GUARD,
        find="return len(self.lost) >= self._num_blocks",
        replace="return False",
        killers=(f"{_FENCE}::test_save_that_loses_its_last_block_is_over",),
    ),
    Mutant(
        name="lost_behind_the_copy",
        why="Good blocks are thrown away because the engine uses theirs again.",
        file=_GUARD,
        find="if positions and not is_over and not",
        replace="if positions and not",
        killers=(f"{_GUARDS}::test_block_is_not_lost_behind_the_end_of_the_copy",),
    ),
    Mutant(
        name="last_loss_alone_counts",
        why="A block that was lost before the latest one is stored.",
        file=_GUARD,
        find="self.lost = self.lost.union(positions)",
        replace="self.lost = frozenset(positions)",
        killers=(f"{_FENCE}::test_save_that_loses_its_last_block_is_over",),
    ),
    Mutant(
        name="confirmed_blocks_torn",
        why="Good blocks are thrown away although their copy's end was seen.",
        file=_GUARD,
        find="            if self.is_confirmed:\n                return\n            if positions",
        replace="            if positions",
        killers=(f"{_TEAR}::test_copied_block_is_lost_unless_it_was_confirmed",),
    ),
    Mutant(
        name="fence_forgets_positions",
        why="One overwritten block costs its whole ticket.",
        file=_WAITS,
        find="positions = lost.get(ticket.transfer_id, ())",
        replace="positions = ()",
        killers=(f"{_FENCE}::test_block_lost_under_its_copy_costs_only_itself",),
    ),
    Mutant(
        name="tear_forgets_positions",
        why="One block that may be torn costs its whole ticket.",
        file=_WAITS,
        find="lost.get(transfer_id, ()))",
        replace="())",
        killers=(f"{_TEAR}::test_copied_block_is_lost_unless_it_was_confirmed",),
    ),
    # What a commit leaves out.
    Mutant(
        name="left_out_slots_published_by_the_next",
        why="A death amid a publication shows blocks that were left out of it.",
        file=_INDEX,
        find="                self._free_slots(slots[[*without]])\n",
        replace="                self.words[_PUBLISHING] = grant.generation\n"
        "                self._free_slots(slots[[*without]])\n",
        killers=(_DEATH,),
    ),
    Mutant(
        name="left_out_slots_kept",
        why="Slots of blocks that were lost are never used again.",
        file=_INDEX,
        find="                self._free_slots(slots[[*without]])\n",
        replace="",
        killers=(f"tests/stores/test_slab.py::TestSlabStore::{_LEFT_OUT}",),
    ),
    Mutant(
        name="left_out_slots_of_memory_kept",
        why="Slots of blocks that were lost are never used again.",
        file=_MEMORY,
        find="            self._free.extend(reversed(left))\n",
        replace="",
        killers=(f"tests/stores/test_memory.py::TestMemoryStore::{_LEFT_OUT}",),
    ),
    # The call that serves the lanes.
    Mutant(
        name="error_of_the_loop_swallowed",
        why="The loop goes on with lanes in disorder, and the engine waits for ever.",
        file=_PIPELINE,
        find="            self._over.set_exception(exc)\n",
        replace="            str(exc)\n",
        killers=(f"{_SERVING}::test_error_of_the_loop_fails_what_is_open",),
    ),
    Mutant(
        name="alarm_rings_once",
        why="A deadline is looked at once in the life of a process.",
        file=_PIPELINE,
        find="        self._alarm = None\n        self.wake()\n",
        replace="        self.wake()\n",
        killers=(f"{_SERVING}::test_deadlines_are_looked_at_while_anything_is_open",),
    ),
    Mutant(
        name="woken_once_only",
        why="After the first burst nobody hears of a copy's end before the next deadline.",
        file="ucm/pipeline/runner.py",
        find="        self._is_woken = False  # first: what ends from now on wakes again\n",
        replace="",
        killers=(f"{_RUNS}::test_each_burst_wakes_once",),
    ),
    Mutant(
        name="quick_copy_taken_twice",
        why="A span goes on twice where its copy was quicker than the loop.",
        file="ucm/pipeline/runner.py",
        find="            return False  # though",
        replace="            return run.is_over  # though",
        killers=(f"{_RUNS}::test_copy_that_is_quicker_than_the_loop_is_handed_back",),
    ),
    Mutant(
        name="served_within_itself",
        why="What a lane is in the middle of is done once more by what it calls.",
        file=_PIPELINE,
        find="if self._is_serving or self._over is None",
        replace="if self._over is None",
        killers=(f"{_SERVING}::test_wake_while_serving_serves_once_more",),
    ),
    # Tickets of several requests.
    Mutant(
        name="shared_lane_of_the_first",
        why="A request's own saves wait behind what it shares, and the other way round.",
        file=_TICKETS,
        find="    if len(owners) > 1:\n        return (direction, *_SHARED)",
        replace="    if False:\n        return (direction, *_SHARED)",
        killers=(f"{_TICKET}::test_shared_tickets_have_one_lane",),
    ),
    Mutant(
        name="shared_log_of_the_first",
        why="The log tells of one request what happened to several.",
        file="ucm/blocks.py",
        find="    if len(owners) > 1:\n        return named",
        replace="    if False:\n        return named",
        killers=(f"{_TICKET}::test_log_names_the_requests_of_a_shared_ticket",),
    ),
)
