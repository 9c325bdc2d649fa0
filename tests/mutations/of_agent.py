# SPDX-License-Identifier: Apache-2.0
"""Mutants of what happens below the slab: its changes, and the node's agent."""

from tests.mutations.mutant import Mutant

__all__ = ["AGENT"]

_CLIENT = "ucm/agent/client.py"
_CONNECTION = "ucm/agent/connection.py"
_DOOR = "ucm/integration/vllm/tiers.py"
_NODE = "ucm/agent/node.py"
_WANTING = "ucm/scheduler/wanting.py"
_ASKS = "tests/agent/test_client.py::TestAsk"
_NOBODY = "tests/agent/test_client.py::TestNobody"
_LIVES = "tests/integration/vllm/test_tiers.py"
_PENDING = "tests/integration/vllm/test_tiers_pending.py::TestEngine::test_pending_answer_costs_no_look_up"
_PROCESS = "tests/agent/test_process.py::TestAgent"
_STRANGERS = "tests/agent/test_connection.py::TestStrangers"
_TALK = "tests/agent/test_connection.py::TestTalk"
_WANTED = "tests/scheduler/test_wanting.py"
_CHANGES = "ucm/stores/slab/_changes.py"
_TABLES = "ucm/stores/slab/_tables.py"
_FETCH = "ucm/agent/fetch.py"
_SPILL = "ucm/agent/spill.py"
_RANDOM = "tests/agent/test_core_random.py::TestCore::test_whatever_a_tier_does_no_byte_is_wrong"
_BUDGET = "tests/agent/test_fetch.py::TestBudget"
_FETCHES = "tests/agent/test_fetch.py::TestFetch"
_PINS = "tests/agent/test_fetch.py::TestPin"
_RECYCLED = "tests/agent/test_spill.py::TestRecycled"
_SPILLS = "tests/agent/test_spill.py::TestSpill"
_TROUBLE = "tests/agent/test_fetch.py::TestTrouble"
_MIRROR = "tests/stores/test_slab_changes.py::TestMirror"
_FOLLOWS = f"{_MIRROR}::test_reader_that_follows_has_what_is_stored"

AGENT = (
    Mutant(
        name="calls_of_any_size",
        why="A slow drive is never through with 64 blocks of megabytes: its breaker opens.",
        file="ucm/agent/calls.py",
        find="min(can.batch_blocks, CALL_BYTES // nbytes)",
        replace="can.batch_blocks",
        killers=(
            f"{_FETCHES}::test_a_call_is_of_so_many_bytes_only",
            f"{_SPILLS}::test_a_call_is_of_so_many_bytes_only",
        ),
    ),
    # What a reader of a slab's changes is told.
    Mutant(
        name="change_ring_overflow_unseen",
        why="A follower that was too slow believes in blocks that are gone.",
        file=_CHANGES,
        find="        or not 0 <= newest - cursor.sequence <= len(index.changes)\n",
        replace="",
        killers=(f"{_MIRROR}::test_reader_that_was_left_behind_lists_again",),
    ),
    Mutant(
        name="change_epoch_ignored",
        why="What a killed process had published is never told of.",
        file=_CHANGES,
        find="        or cursor.epoch != epoch\n",
        replace="",
        killers=(f"{_MIRROR}::test_change_that_a_death_left_is_listed",),
    ),
    Mutant(
        name="removed_blocks_untold",
        why="A router is sent to blocks that were evicted long ago.",
        file=_TABLES,
        find="                self.changes.add(REMOVED, removed)\n",
        replace="                pass\n",
        killers=(_FOLLOWS,),
    ),
    Mutant(
        name="reservations_told_as_removed",
        why="A block that another one keeps is told to be gone.",
        file=_TABLES,
        find="            removed = slots[self.state[slots] == COMMITTED]\n",
        replace="            removed = slots\n",
        killers=(f"{_MIRROR}::test_reservation_that_was_given_up_is_not_told",),
    ),
    Mutant(
        name="single_blocks_untold",
        why="Blocks that are saved one by one never leave the slab.",
        file="ucm/stores/slab/_one.py",
        find="    index.changes.add_one(STORED, slot)\n",
        replace="",
        killers=(_FOLLOWS,),
    ),
    # What is spilled.
    Mutant(
        name="seal_of_a_recycled_slot",
        why="A tier serves another prompt's bytes, and their checksum holds.",
        file=_SPILL,
        find="            lease.recheck()  # or it was not this block whose checksum was taken\n",
        replace="",
        killers=(f"{_RECYCLED}::test_slot_recycled_before_the_seal_is_not_put",),
    ),
    Mutant(
        name="put_of_a_recycled_slot_kept",
        why="A tier keeps a block that will never verify.",
        file=_SPILL,
        find="        if torn:\n            await self._backend.delete(torn)\n",
        replace="",
        killers=(f"{_RECYCLED}::test_slot_recycled_under_the_put_is_taken_back",),
    ),
    Mutant(
        name="spill_unverified",
        why="Damage in the slab is sealed as if it were the block.",
        file=_SPILL,
        find="            lease.verify(0, 1)\n",
        replace="",
        killers=(f"{_RECYCLED}::test_damaged_block_is_not_put",),
    ),
    Mutant(
        name="backlog_unbounded",
        why="A slow disk makes the agent grow until the machine has no memory.",
        file=_SPILL,
        find="len(self._waiting) >= self._most_waiting",
        replace="False",
        killers=(f"{_SPILLS}::test_backlog_is_bounded_and_conserved",),
    ),
    Mutant(
        name="stopped_spill_uncounted",
        why="Blocks vanish from the count when an agent stops.",
        file=_SPILL,
        find="            if left:\n",
        replace="            if not left:\n",
        killers=(f"{_SPILLS}::test_stop_amid_a_call_is_counted",),
    ),
    Mutant(
        name="backlog_thrown_at_a_dead_tier",
        why="A restart of a server loses all that waited for it.",
        file=_SPILL,
        find="            if (wait_s := self._backend.wait_s) > 0:\n",
        replace="            if (wait_s := self._backend.wait_s) < 0:\n",
        killers=(f"{_SPILLS}::test_backlog_waits_for_a_backend_that_is_down",),
    ),
    # What is fetched.
    Mutant(
        name="fetched_bytes_believed",
        why="A damaged disk writes into answers.",
        file=_FETCH,
        find="block_checksum(key, lease.slots.block(at).data) != answer.checksum",
        replace="False",
        killers=(f"{_TROUBLE}::test_damaged_bytes_are_never_seen", _RANDOM),
    ),
    Mutant(
        name="unknown_taken_for_absent",
        why="A server that is down looks as if it had nothing.",
        file=_FETCH,
        find="Reason.UNAVAILABLE if is_unknown else Reason.ABSENT",
        replace="Reason.ABSENT",
        killers=(f"{_TROUBLE}::test_could_not_ask_is_no_miss",),
    ),
    Mutant(
        name="each_want_its_own_flight",
        why="Requests that share a prefix fetch it as often as there are of them.",
        file=_FETCH,
        find="flight = None if is_there else self._flights.get(key)",
        replace="flight = None",
        killers=(f"{_FETCHES}::test_block_that_several_want_is_fetched_once",),
    ),
    Mutant(
        name="fetch_behind_a_hole",
        why="Blocks of no use evict others.",
        file=_FETCH,
        find="list(itertools.takewhile(tier_of.__contains__, flights))",
        replace="list(filter(tier_of.__contains__, flights))",
        killers=(f"{_FETCHES}::test_nothing_is_fetched_behind_a_hole",),
    ),
    Mutant(
        name="fetched_blocks_unpinned",
        why="Under load what was fetched is evicted before it is loaded, again and again.",
        file=_FETCH,
        find="until = self._clock_ns() + int(hold_s * 1e9)",
        replace="until = self._clock_ns()",
        killers=(f"{_PINS}::test_fetched_blocks_outlive_newer_saves",),
    ),
    Mutant(
        name="found_blocks_unpinned",
        why="The head of a prefix is evicted for its tail.",
        file=_FETCH,
        find="        self._store.touch(keys, self._uses(len(keys), hold_s))\n",
        replace="",
        killers=(f"{_PINS}::test_blocks_that_were_there_are_pinned_as_well",),
    ),
    Mutant(
        name="late_want_keeps_its_turn",
        why="Slots are taken for requests that have long gone on.",
        file=_FETCH,
        find="            if want is None:\n                self._budget.release(count)\n                return\n",
        replace="            if want is None:\n                return\n",
        killers=(
            f"{_BUDGET}::test_want_that_ended_while_it_waited_takes_no_slot",
            _RANDOM,
        ),
    ),
    Mutant(
        name="hanging_calls_give_slots_back",
        why="A drive that hangs takes the whole slab, want by want, and saves get no slot.",
        file=_FETCH,
        find="            try:\n                await self._get_all(of_tier, want)\n",
        replace="            want.num_slots, count = want.num_slots + count, 0\n            try:\n                await self._get_all(of_tier, want)\n",
        killers=(f"{_BUDGET}::test_calls_that_hang_keep_their_slots",),
    ),
    Mutant(
        name="budget_out_of_turn",
        why="Small wants starve a large one for ever.",
        file="ucm/agent/budget.py",
        find="        if not self._queue and count <= self.left:\n",
        replace="        if count:\n",
        killers=(f"{_BUDGET}::test_wants_have_their_slots_whole_and_in_turn",),
    ),
    # What engines ask, and are told.
    Mutant(
        name="stopped_agent_asked_again",
        why="Every request waits a second for an agent that says nothing.",
        file=_CLIENT,
        find="        is_late = 0 < self._silent_until < self._clock()\n",
        replace="        is_late = False\n",
        killers=(f"{_NOBODY}::test_agent_that_is_stopped_costs_one_deadline",),
    ),
    Mutant(
        name="silence_outlives_its_agent",
        why="A want amid the loss of an agent ends all fetches of its engine.",
        file=_CLIENT,
        find="        self._silent_until = 0.0  # a want may have come while the last one was lost\n",
        replace="",
        killers=(
            f"{_NOBODY}::test_question_amid_a_loss_does_not_silence_the_next_agent",
        ),
    ),
    Mutant(
        name="pending_without_end",
        why="A request waits for ever for an answer that was lost.",
        file=_CLIENT,
        find="        return until is not None and self._clock() < until\n",
        replace="        return until is not None\n",
        killers=(f"{_ASKS}::test_want_is_pending_until_its_deadline_at_most",),
    ),
    Mutant(
        name="lost_agent_keeps_wants",
        why="Requests wait for an agent that was killed.",
        file=_CLIENT,
        find="        for each in (self._pending, self._open, self._answers):\n            each.clear()\n",
        replace="",
        killers=(f"{_NOBODY}::test_agent_that_dies_leaves_nothing_pending",),
    ),
    Mutant(
        name="dropped_want_untold",
        why="Slots stay with requests that are over until their time is.",
        file=_CLIENT,
        find="            self._call(lambda: self._send(Drop(number)))\n",
        replace="",
        killers=(f"{_ASKS}::test_dropped_want_is_told_and_forgotten",),
    ),
    Mutant(
        name="agent_launched_beside_another_release",
        why="Agents are started again and again where one refuses.",
        file=_CLIENT,
        find="            except (OSError, MessageError) as exc:  # it is there, and does not serve us\n                self._lost(exc)\n",
        replace="            except (OSError, MessageError) as exc:\n                self._lost(exc)\n                self._launch()\n",
        killers=(f"{_NOBODY}::test_agent_of_another_release_is_left_alone",),
    ),
    Mutant(
        name="longer_than_an_agent_takes",
        why="A long timeout ends the connection to the agent with each want.",
        file=_DOOR,
        find="min(config.timeout.fetch, LONGEST_S)",
        replace="config.timeout.fetch",
        killers=(
            f"{_LIVES}::TestAsk::test_no_request_asks_for_longer_than_an_agent_takes",
        ),
    ),
    Mutant(
        name="hanging_call_unseen",
        why="A drive that hangs in the kernel costs each request its whole deadline.",
        file="ucm/backends/wrap.py",
        find="        if self._is_hung and self._clock() >= self._until:\n            self._open()\n",
        replace="",
        killers=(
            "tests/backends/test_wrap.py::TestCircuit::test_nobody_asks_while_a_call_cannot_be_ended",
        ),
    ),
    Mutant(
        name="life_asks_in_each_step",
        why="A miss is fetched for ever.",
        file=_DOOR,
        find="        self._wants[request_id] = _State.ANSWERED\n",
        replace="        self._wants[request_id] = _State.BEGUN\n",
        killers=(f"{_LIVES}::TestAsk::test_life_asks_once",),
    ),
    Mutant(
        name="skipping_request_fetches",
        why="Blocks are fetched for a request that will not read them.",
        file=_DOOR,
        find='getattr(request, "skip_reading_prefix_cache", False)',
        replace="False",
        killers=(f"{_LIVES}::TestAsk::test_request_that_would_not_load_asks_nobody",),
    ),
    Mutant(
        name="other_connectors_request_waits",
        why="A request that another engine has prefilled waits for our disk.",
        file=_DOOR,
        find='isinstance(params, Mapping) and params.get("do_remote_prefill")',
        replace="False",
        killers=(f"{_LIVES}::TestAsk::test_request_that_would_not_load_asks_nobody",),
    ),
    Mutant(
        name="finished_request_keeps_its_want",
        why="What was fetched for aborted requests stays pinned.",
        file="ucm/integration/vllm/scheduler.py",
        find="        self._tiers.drop(request_id)\n        self._adapters.forget(request_id)\n",
        replace="        self._adapters.forget(request_id)\n",
        killers=(_PENDING,),
    ),
    Mutant(
        name="pending_answer_looks_up",
        why="Each request that waits costs the engine a look-up in each step.",
        file="ucm/integration/vllm/scheduler.py",
        find="        if self._tiers.is_pending(request_id):\n            return None, False\n",
        replace="",
        killers=(_PENDING,),
    ),
    Mutant(
        name="parts_of_one_size",
        why="Ranks with other layers than the first fetch garbage.",
        file=_WANTING,
        find="of_parts[part]",
        replace="of_parts[0]",
        killers=(
            f"{_WANTED}::TestWantedBlocks::test_all_parts_of_a_block_stand_together",
        ),
    ),
    Mutant(
        name="wanted_group_by_group",
        why="Half of what came in time is of no use: another group's half is missing.",
        file=_WANTING,
        find="    found.sort(key=lambda each: each[0])\n",
        replace="",
        killers=(f"{_WANTED}::TestWantedBlocks::test_groups_take_turns",),
    ),
    # What the agent believes, and when it ends.
    Mutant(
        name="reasons_of_another_release_taken",
        why="A word that an engine does not know ends it.",
        file="ucm/agent/protocol.py",
        find="    found: int\n    reason: Reason\n",
        replace="    found: int\n    reason: str\n",
        killers=(f"{_NOBODY}::test_garbage_from_an_agent_ends_the_connection",),
    ),
    Mutant(
        name="other_release_served",
        why="Messages mean something else to the other side.",
        file=_CONNECTION,
        find="        if first.version != PROTOCOL_VERSION:\n",
        replace="        if first.version < 0:\n",
        killers=(f"{_STRANGERS}::test_other_version_is_refused_by_name",),
    ),
    Mutant(
        name="dropped_want_keeps_its_slots",
        why="A few aborted requests stop all fetches.",
        file=_CONNECTION,
        find="                scope.cancel()\n",
        replace="                pass\n",
        killers=(f"{_TALK}::test_dropped_want_gives_its_slots_back",),
    ),
    Mutant(
        name="dropped_want_unanswered",
        why="One aborted request ends all fetches: its engine waits for a word for ever.",
        file=_CONNECTION,
        find="                await self._send(Done(message.number, 0, Reason.WITHDRAWN))\n",
        replace="",
        killers=(f"{_TALK}::test_dropped_want_has_its_answer",),
    ),
    Mutant(
        name="agent_kept_by_who_looks",
        why="A dashboard, or an engine of another release, keeps an agent for ever.",
        file=_NODE,
        find="                if peer.is_engine:  # who only looks, or is refused, keeps nobody here\n                    self._left_at",
        replace="                if peer:\n                    self._left_at",
        killers=(f"{_PROCESS}::test_agent_that_is_only_looked_at_ends",),
    ),
    Mutant(
        name="agent_stays_for_a_dead_tier",
        why="A wrong address of a tier is mended, and each engine joins the former agent.",
        file="ucm/agent/core.py",
        find="spiller.is_served and not",
        replace="not",
        killers=(f"{_SPILLS}::test_backlog_waits_for_a_backend_that_is_down",),
    ),
    Mutant(
        name="agent_ends_undrained",
        why="What was saved last before a restart is computed again.",
        file=_NODE,
        find="                        await core.drain()\n",
        replace="                        pass\n",
        killers=(f"{_PROCESS}::test_told_to_end_it_spills_what_waits",),
    ),
    Mutant(
        name="two_agents_of_a_slab",
        why="Each backend is asked twice, and one agent's socket is the other's.",
        file=_NODE,
        find="            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        replace="            pass\n",
        killers=(f"{_PROCESS}::test_slab_has_one_agent",),
    ),
)
