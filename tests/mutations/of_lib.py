# SPDX-License-Identifier: Apache-2.0
"""Mutants of the library for hosts of their own."""

from tests.mutations.mutant import Mutant

__all__ = ["LIB"]

_CORE = "ucm/cache/core.py"
_AIO = "ucm/cache/aio.py"
_SYNC = "ucm/cache/sync.py"
_ENDS = "ucm/cache/transfers.py"
_ORDERS = "ucm/cache/orders.py"
_USERS = "ucm/cache/users.py"
_ROOM = "ucm/cache/room.py"
_SERVING = "ucm/cache/serving.py"
_LOOP = "ucm/cache/host_loop.py"
_ASKING = "ucm/cache/asking.py"
_WAITS = "ucm/cache/waits.py"
_OPENING = "ucm/cache/opening.py"
_PREFIXES = "ucm/prefixes.py"
_BUFFERS = "ucm/devices/_buffers.py"
_VERBS = "tests/cache/test_verbs.py"
_MISTAKES = "tests/cache/test_mistakes.py"
_CANCEL = "tests/cache/test_cancel.py"
_CLOSE = "tests/cache/test_close.py"
_PARTS = "tests/cache/test_parts.py"
_BLOCKING = "tests/cache/test_blocking.py"
_OPEN = "tests/cache/test_opening.py::TestRefusals"
_HASHER = "tests/test_prefixes.py::TestPrefixHasher"
_ARRAYS = "tests/devices/test_buffers.py"

LIB = (
    Mutant(
        name="load_beside_a_reader",
        why="Bytes of one prompt are stored under the key of another.",
        file=_USERS,
        find="            if block in self._readers or block in self._written or block in taken:",
        replace="            if block in self._written or block in taken:",
        killers=(f"{_PARTS}::TestBlockUsers::test_many_read_and_one_writes",),
    ),
    Mutant(
        name="block_loaded_twice_at_once",
        why="Which of two blocks is in it nobody can say.",
        file=_USERS,
        find="            if block in self._readers or block in self._written or block in taken:",
        replace="            if block in self._readers or block in self._written:",
        killers=(f"{_PARTS}::TestBlockUsers::test_block_is_not_written_twice_by_one",),
    ),
    Mutant(
        name="refused_reader_keeps_some",
        why="Blocks that nobody uses can never be loaded into again.",
        file=_USERS,
        find="        if not self._written.keys().isdisjoint(blocks):\n",
        replace="        self._readers.update(dict.fromkeys(blocks, 1))\n"
        "        if not self._written.keys().isdisjoint(blocks):\n",
        killers=(f"{_PARTS}::TestBlockUsers::test_refused_reader_has_taken_nothing",),
    ),
    Mutant(
        name="blocks_of_a_save_never_free",
        why="No block that was ever saved can be loaded into.",
        file=_CORE,
        find="            if outcome is None:\n                self._users",
        replace="            if outcome is None and transfer.is_load:\n                self._users",
        killers=(
            f"{_MISTAKES}::TestMistakes::test_block_that_a_save_reads_is_not_written",
        ),
    ),
    Mutant(
        name="room_never_made",
        why="A host that waits for room waits until its save is dropped.",
        file=_CORE,
        find="                self._room.leave(self._orders.nbytes(order))\n",
        replace="                pass\n",
        killers=(f"{_CLOSE}::TestClose::test_close_drains_what_is_under_way",),
    ),
    Mutant(
        name="line_moves_by_itself_only",
        why="Whoever waits for room is let in when the next one comes, or never.",
        file=_CORE,
        find="            each.callback(self._look_at_line)\n",
        replace="",
        killers=(f"{_BLOCKING}::TestVerbs::test_line_moves_without_a_newcomer",),
    ),
    Mutant(
        name="huge_save_waits_for_ever",
        why="One larger than the queue's bytes is never stored.",
        file=_ROOM,
        find="        if not self._items:\n            return True\n",
        replace="",
        killers=(f"{_PARTS}::TestRoom::test_larger_than_all_goes_in_alone",),
    ),
    Mutant(
        name="late_one_takes_room",
        why="What was dropped in the line counts as under way for ever.",
        file=_ROOM,
        find="        if now <= until:\n",
        replace="        if now > until:\n            self.enter(nbytes)\n        else:\n",
        killers=(
            f"{_PARTS}::TestRoom::test_who_waits_too_long_is_told_and_takes_no_room",
        ),
    ),
    Mutant(
        name="cancelled_load_returns_at_once",
        why="The host gives the blocks to somebody else, and the copy overwrites them.",
        file=_AIO,
        find="            while not transfer.over.is_done:  # however often somebody cancels\n",
        replace="            while False:\n",
        killers=(
            f"{_CANCEL}::test_load_cancelled_anywhere_returns_once_nothing_writes",
        ),
    ),
    Mutant(
        name="cancelled_twice_returns_at_once",
        why="A task that is cancelled while it cleans up leaves its blocks to a copy.",
        file=_AIO,
        find="            while not transfer.over.is_done:  # however often somebody cancels\n",
        replace="            if not transfer.over.is_done:\n",
        killers=(f"{_CANCEL}::test_load_cancelled_twice_still_waits_for_the_copy",),
    ),
    Mutant(
        name="cancelled_load_goes_on",
        why="What nobody waits for any more holds blocks until its deadline.",
        file=_AIO,
        find="            self._core.cancel(transfer)\n            while",
        replace="            while",
        killers=(f"{_CANCEL}::test_cancelled_load_does_not_wait_for_the_store",),
    ),
    Mutant(
        name="cancelled_waiter_stays",
        why="Each one who gave up waiting is kept for as long as the save is.",
        file=_LOOP,
        find="            late.cancel()\n            pending.unsubscribe(wake)\n",
        replace="            late.cancel()\n",
        killers=(
            f"{_CANCEL}::test_who_is_cancelled_while_awaiting_a_save_leaves_it_alone",
        ),
    ),
    Mutant(
        name="open_cancelled_in_the_middle",
        why="Threads and a store stay behind a host that never had its cache.",
        file=_AIO,
        find="            undo.push_async_callback(self._close)\n",
        replace="",
        killers=(
            f"{_CANCEL}::test_open_and_close_cancelled_at_each_point_leave_nothing",
        ),
    ),
    Mutant(
        name="opened_twice",
        why="The first of two caches of one opening is closed by nobody.",
        file=_AIO,
        find="        if self._host is not None:\n            raise",
        replace="        if not self._threads:\n            raise",
        killers=("tests/cache/test_opening.py::test_a_cache_is_opened_once_at_a_time",),
    ),
    Mutant(
        name="close_can_be_cancelled",
        why="A host that is cancelled leaves its saves and threads to nobody.",
        file="ucm/cache/host_loop.py",
        find="    with anyio.CancelScope(shield=True):\n        if _running",
        replace="    with anyio.CancelScope():\n        if _running",
        killers=(
            f"{_CANCEL}::test_open_and_close_cancelled_at_each_point_leave_nothing",
        ),
    ),
    Mutant(
        name="in_line_at_the_end",
        why="Who waits for a save that waited for room waits for ever.",
        file=_CORE,
        find="            for order, _ in in_line:\n                self._end_here(order.transfer_id, OutcomeKind.CANCELLED, Reason.CLOSED)\n",
        replace="",
        killers=(f"{_CLOSE}::TestClose::test_save_in_line_is_ended_by_close",),
    ),
    Mutant(
        name="closed_in_the_dark",
        why="Whoever waits for what a shutdown has cancelled waits for ever.",
        file=_CORE,
        find="        self._is_polled = True\n        self._attend()\n",
        replace="",
        killers=(f"{_CLOSE}::TestClose::test_close_ends_what_it_has_no_time_for",),
    ),
    Mutant(
        name="ended_in_the_dark",
        why="Whoever waits for a ticket of a pipeline that has died waits for ever.",
        file=_SERVING,
        find="            self.is_serving = False\n            self._attend()\n",
        replace="            self.is_serving = False\n",
        killers=(
            f"{_CLOSE}::TestDeadPipeline::test_everybody_hears_when_our_loop_dies",
        ),
    ),
    Mutant(
        name="submitted_in_the_dark",
        why="Whoever asks a pipeline that has died waits for a refusal nobody polls.",
        file=_CORE,
        find="self._serving.wake if self._serving.is_serving else",
        replace="self._serving.wake if True else",
        killers=(
            f"{_CLOSE}::TestDeadPipeline::test_everybody_hears_when_our_loop_dies",
        ),
    ),
    Mutant(
        name="store_closed_under_a_question",
        why="A look-up that returns late reads memory that is not there any more.",
        file=_CORE,
        find="            self._kept.is_asked = not self._questions.close(",
        replace="            self._kept.is_asked = False and self._questions.close(",
        killers=(
            f"{_CLOSE}::TestClose::test_question_that_hangs_keeps_the_store_open",
        ),
    ),
    Mutant(
        name="stuck_load_is_well",
        why="A host uses blocks again into which a copy still writes.",
        file=_CORE,
        find="            transfer.give_up()\n\n    def _statistics",
        replace="            transfer.hear(transfer_id, None)\n"
        "            transfer.look()\n\n    def _statistics",
        killers=(
            f"{_BLOCKING}::TestMistakes::test_load_that_never_ends_is_an_error_with_a_name",
        ),
    ),
    Mutant(
        name="load_over_before_its_copy",
        why="The host uses blocks while a copy still writes to them.",
        file=_ENDS,
        find="        if is_settled and not (self.is_load and self._unreleased):",
        replace="        if is_settled:",
        killers=(
            f"{_PARTS}::TestTransfer::test_load_is_not_over_while_its_blocks_are_touched",
        ),
    ),
    Mutant(
        name="released_at_once",
        why="A host overwrites blocks that are still read, and stores the new bytes.",
        file=_ENDS,
        find="        if not self._unreleased:\n            self.released.end(None)",
        replace="        if True:\n            self.released.end(None)",
        killers=(
            "tests/cache/test_simulated.py::TestHostWorld::test_runs_meet_what_can_happen",
        ),
    ),
    Mutant(
        name="hole_counted_as_prefix",
        why="The host builds on a block that was not loaded.",
        file=_ENDS,
        find="            if worst is None and end.kind in _WHOLE:",
        replace="            if end.kind in _WHOLE:",
        killers=(
            f"{_PARTS}::TestTransfer::test_prefix_ends_with_the_first_part_that_failed",
        ),
    ),
    Mutant(
        name="depth_forgotten",
        why="Room is made from the head of a prefix, and the rest of it is of no use.",
        file=_ORDERS,
        find="                asked.used_ns - last * shape.block_tokens,\n",
        replace="                asked.used_ns,\n",
        killers=(
            f"{_PARTS}::TestOrders::test_deeper_blocks_count_as_used_before_those_they_need",
        ),
    ),
    Mutant(
        name="place_forgotten",
        why="Parts of a prefix that are saved apart push each other out.",
        file=_ORDERS,
        find="(int(place.began_ns) or now_ns) - int(place.first) * shape.block_tokens",
        replace="(int(place.began_ns) or now_ns)",
        killers=(f"{_PARTS}::TestOrders::test_uses_are_those_of_the_orders",),
    ),
    Mutant(
        name="key_twice_in_a_save",
        why="A store is asked for two slots of one block.",
        file=_ORDERS,
        find="    if num_distinct < len(keys):",
        replace="    if False:",
        killers=(
            f"{_MISTAKES}::TestMistakes::test_keys_that_are_none_are_refused_before_anything_is_done",
        ),
    ),
    Mutant(
        name="load_is_no_use",
        why="Blocks that are loaded all the time make room before those nobody needs.",
        file=_CORE,
        find="            self.touch(keys, group=group, place=place)\n        return self._begin",
        replace="            pass\n        return self._begin",
        killers=(f"{_VERBS}::TestRoom::test_loaded_and_touched_blocks_count_as_used",),
    ),
    Mutant(
        name="retained_until_now",
        why="What a host wants to keep goes first.",
        file=_ASKING,
        find="self._now_ns() + int(ttl * 1e9))",
        replace="self._now_ns())",
        killers=(f"{_VERBS}::TestRoom::test_retained_blocks_stay_where_used_ones_go",),
    ),
    Mutant(
        name="kept_for_as_long_as_any",
        why="Of what a host keeps, what matters less stays as long as what matters most.",
        file=_ASKING,
        find="self._now_ns() + int(ttl * 1e9))",
        replace="self._now_ns() + int(600e9))",
        killers=(f"{_VERBS}::TestRoom::test_priority_is_a_time_that_wears_off",),
    ),
    Mutant(
        name="foreign_key_space_opened",
        why="Blocks of another layout are loaded as if they were the host's.",
        file=_OPENING,
        find="        _check_keyspace(keyspace, layout)\n",
        replace="",
        killers=(f"{_OPEN}::test_two_openers_with_different_layouts_do_not_mix",),
    ),
    Mutant(
        name="refused_store_stays_open",
        why="Each start that fails holds a store and its files.",
        file=_OPENING,
        find="            unowned.callback(store.close)\n",
        replace="",
        killers=(f"{_OPEN}::test_store_with_smaller_slots_is_refused",),
    ),
    Mutant(
        name="salt_forgotten",
        why="A tenant finds the blocks of another one.",
        file=_PREFIXES,
        find="            root.update(salt)\n",
        replace="",
        killers=(
            f"{_HASHER}::test_salt_and_each_field_of_the_key_space_change_every_key",
        ),
    ),
    Mutant(
        name="tokens_hashed_as_text",
        why="What other releases have stored is never found again.",
        file=_PREFIXES,
        find='ALGORITHM.encode() + b"\\0" + keyspace.digest',
        replace="ALGORITHM.encode() + keyspace.digest",
        killers=(f"{_HASHER}::test_keys_are_the_same_for_ever",),
    ),
    Mutant(
        name="chain_broken",
        why="A block is taken for one with other tokens before it.",
        file=_PREFIXES,
        find="            key = digest.digest()\n            keys.append(key)\n",
        replace="            keys.append(digest.digest())\n",
        killers=(f"{_HASHER}::test_equal_keys_mean_equal_prefixes",),
    ),
    Mutant(
        name="read_only_buffer_taken",
        why="A load writes to memory that must not change, or dies of it.",
        file=_BUFFERS,
        find="    if not array.flags.writeable:",
        replace="    if False:",
        killers=(f"{_ARRAYS}::TestRefusals::test_buffer_that_does_not_fit_is_named",),
    ),
    Mutant(
        name="addresses_taken_for_bytes",
        why="A load writes addresses of objects of another process, which dies of it.",
        file=_BUFFERS,
        find="    if array.dtype.hasobject:",
        replace="    if False:",
        killers=(f"{_ARRAYS}::TestRefusals::test_buffer_that_does_not_fit_is_named",),
    ),
    Mutant(
        name="page_in_pieces",
        why="Bytes between a block's pieces are stored, and overwritten by a load.",
        file=_BUFFERS,
        find=" or not page.flags.c_contiguous:",
        replace=":",
        killers=(f"{_ARRAYS}::TestRefusals::test_buffer_that_does_not_fit_is_named",),
    ),
    Mutant(
        name="buffer_let_go",
        why="A host's buffer is freed or moved while copies read it.",
        file=_BUFFERS,
        find="_AllMemory(tuple(arrays.values()))",
        replace="_AllMemory(())",
        killers=(
            f"{_ARRAYS}::TestBuffers::test_buffer_is_held_while_it_is_registered",
        ),
    ),
    Mutant(
        name="hung_store_is_waited_for",
        why="A host's request stands still for as long as the store does.",
        file=_WAITS,
        find="            over.wait(min(limit, TIMEOUT_MAX))",
        replace="            over.wait()",
        killers=(
            f"{_BLOCKING}::TestMistakes::test_store_that_does_not_answer_is_not_waited_for",
        ),
    ),
)
