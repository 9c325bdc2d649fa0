# SPDX-License-Identifier: Apache-2.0
"""Mutants of the node's agent: who asks it, how, and when it ends."""

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
_SPILLS = "tests/agent/test_spill.py::TestSpill"

AGENT = (
    Mutant(
        name="brief_want_silences_the_agent",
        why="What others ask is refused for one that gave the agent no time to answer.",
        file=_CLIENT,
        find="return first and max(first, now + _LEAST_S)",
        replace="return first",
        killers=(
            (
                "tests/agent/test_client_brief.py::"
                "test_brief_want_does_not_silence_an_agent_that_has_just_spoken"
            ),
        ),
    ),
    Mutant(
        name="answer_of_the_dropped_kept",
        why="Answers to requests that are over pile up in the engine.",
        file=_CLIENT,
        find="if self._pending.pop(message.number, None) is None:",
        replace="if self._pending.pop(message.number, None) == 0:",
        killers=(f"{_ASKS}::test_answer_amid_a_drop_leaves_nothing",),
    ),
    Mutant(
        name="late_tiers_untold",
        why="A slow tier looks like a prompt that nobody has ever asked.",
        file="ucm/integration/vllm/lookups.py",
        find="if shortfall is not None and known.miss is not None:",
        replace="if False:",
        killers=(
            "tests/integration/vllm/test_lookups.py::TestReasons::test_tiers_that_were_late_are_the_reason",
        ),
    ),
    Mutant(
        name="tier_that_is_away_untold",
        why="An operator enlarges the slab for want of a tier that is away.",
        file="ucm/scheduler/misses.py",
        find='    Reason.UNAVAILABLE: (MissReason.UNAVAILABLE, "a tier could not be asked"),\n',
        replace="",
        killers=(f"{_LIVES}::TestPrediction::test_reason_is_told",),
    ),
    Mutant(
        name="former_tiers_served",
        why="An engine that was set to another address has its blocks from the former one.",
        file=_CONNECTION,
        find="if first.tiers and self._tiers and first.tiers != self._tiers:",
        replace="if False:",
        killers=(
            "tests/agent/test_connection.py::TestTiers::test_engine_that_is_set_to_other_tiers_is_refused_by_name",
        ),
    ),
    Mutant(
        name="stopped_agent_asked_again",
        why="Every request waits a second for an agent that says nothing.",
        file=_CLIENT,
        find="        is_late = 0 < self._silent_until < self._clock()\n",
        replace="        is_late = False\n",
        killers=(f"{_NOBODY}::test_agent_that_is_stopped_costs_one_deadline",),
    ),
    Mutant(
        name="stopped_agent_asked_for_all_of_a_deletion",
        why="For a minute behind a deletion every request waits its whole time for an agent that says nothing.",
        file=_CLIENT,
        find="min(self._silent_until or due, due)",
        replace="self._silent_until or due",
        killers=(
            "tests/agent/test_client_brief.py::test_stopped_agent_costs_one_deadline_whatever_it_has_more_time_for",
        ),
    ),
    Mutant(
        name="want_amid_a_loss_is_waited_for",
        why="A request waits for all of its deadline for an agent that is gone.",
        file="ucm/agent/client.py",
        find="        self.call(lambda: self._ask(ask))\n",
        replace="        self.call(lambda: self.send(ask))\n",
        killers=(
            "tests/agent/test_client.py::TestNobody::test_question_amid_a_loss_does_not_silence_the_next_agent",
        ),
    ),
    Mutant(
        name="silent_to_who_has_no_time",
        why="A look-up with hardly any time left ends the fetches of all others.",
        file=_CLIENT,
        find="now + max(seconds, _LEAST_S)",
        replace="now + seconds",
        killers=(
            "tests/agent/test_health.py::TestLook::test_want_of_no_time_does_not_silence_the_agent",
        ),
    ),
    Mutant(
        name="status_before_wants",
        why="A tier that does not tell how it is has the wants of each engine late.",
        file="ucm/agent/connection.py",
        find="                tasks.start_soon(self._say_status)\n",
        replace="                await self._say_status()\n",
        killers=(
            "tests/agent/test_connection.py::TestTalk::test_tier_that_does_not_say_how_it_is_holds_up_no_want",
        ),
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
        find="            self.call(lambda: self.send(Drop(number)))\n",
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
        file="ucm/config.py",
        find="        most=LONGEST_FETCH_S,\n",
        replace="",
        killers=("tests/test_config_bounds.py::test_longest_fetch_is_named",),
    ),
    Mutant(
        name="medium_that_no_tier_has",
        why="Who misspells a tier has nothing fetched, and is not told.",
        file="ucm/integration/vllm/wishes.py",
        find="        elif strange := self._strange(known):\n",
        replace="        elif False and (strange := self._strange(known)):\n",
        killers=(
            "tests/integration/vllm/test_wishes.py::TestReader::test_medium_that_no_tier_has_is_counted",
        ),
    ),
    Mutant(
        name="hanging_call_unseen",
        why="A drive that hangs in the kernel costs each request its whole deadline.",
        file="ucm/backends/_circuit.py",
        find="        self._look_for_hung()\n        if self.is_open and",
        replace="        if self.is_open and",
        killers=(
            "tests/backends/test_hung.py::test_nobody_asks_while_a_call_cannot_be_ended",
        ),
    ),
    Mutant(
        name="life_asks_in_each_step",
        why="A miss is fetched for ever.",
        file=_DOOR,
        find="        question.state = _State.ANSWERED\n",
        replace="        question.state = _State.BEGUN\n",
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
        find="            self._tiers.drop(request_id)\n        if self.events.is_told:\n",
        replace="            pass\n        if self.events.is_told:\n",
        killers=(_PENDING,),
    ),
    Mutant(
        name="pending_answer_looks_up",
        why="Each request that waits costs the engine a look-up in each step.",
        file="ucm/integration/vllm/scheduler.py",
        find="if tiers.are_there and tiers.is_pending(",
        replace="if not tiers and tiers.is_pending(",
        killers=(_PENDING,),
    ),
    Mutant(
        name="parts_of_one_size",
        why="Ranks with other layers than the first fetch garbage.",
        file=_WANTING,
        find="self._sizes += sizes *",
        replace="self._sizes += sizes[:1] * len(sizes) *",
        killers=(
            f"{_WANTED}::TestWantedBlocks::test_all_parts_of_a_block_stand_together",
        ),
    ),
    Mutant(
        name="wanted_group_by_group",
        why="Half of what came in time is of no use: another group's half is missing.",
        file=_WANTING,
        find='return np.argsort(np.concatenate(self._ends), kind="stable")',
        replace="return np.arange(len(self._keys))",
        killers=(f"{_WANTED}::TestWantedBlocks::test_groups_take_turns",),
    ),
    Mutant(
        name="window_of_no_hit_needed_by_each",
        why="Where blocks of a window are smaller than a hit's step, no hit is found without ones that none needs.",
        file=_WANTING,
        find="np.where(longest < shortest, _NONE, longest)",
        replace="longest",
        killers=(
            f"{_WANTED}::TestWantedHits::test_each_hit_needs_what_it_would_be_asked_for_alone",
        ),
    ),
    # What the agent believes, and when it ends.
    Mutant(
        name="reasons_of_another_release_taken",
        why="A word that an engine does not know ends it.",
        file="ucm/agent/protocol.py",
        find="    number: int\n    found: int\n    reason: Reason\n",
        replace="    number: int\n    found: int\n    reason: str\n",
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
        name="agent_dies_with_a_peer",
        why="An engine that stops while it is told something takes everybody's agent along.",
        file=_CONNECTION,
        find='        problem = ""\n        try:\n            async with',
        replace="        try:\n            async with",
        killers=(f"{_TALK}::test_peer_that_is_gone_when_it_is_told_something_is_gone",),
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
        killers=("tests/agent/test_second.py::TestSecond::test_slab_has_one_agent",),
    ),
    Mutant(
        name="no_slab_in_silence",
        why="R-63: a service with a misspelt path ends well, and nobody hears of it.",
        file="ucm/agent/__main__.py",
        find="        raise _NoSlabError(",
        replace="        return 0\n        str(",
        killers=(
            "tests/agent/test_second.py::TestSecond::test_service_that_meets_no_slab_says_so",
        ),
    ),
    Mutant(
        name="service_that_is_first_is_deaf",
        why="R-63: in a container of its own it waits for its slab until it is killed.",
        file="ucm/agent/__main__.py",
        find="    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n",
        replace="    pass\n",
        killers=(
            "tests/agent/test_second.py::TestSecond::test_service_without_a_slab_ends_when_it_is_told_to",
            "tests/agent/test_second.py::TestSecond::test_service_that_imports_what_it_needs_ends_when_it_is_told_to",
        ),
    ),
    Mutant(
        name="ended_agents_unburied",
        why="R-63: in a container the table of processes fills, until no thread can be started.",
        file="ucm/agent/launch.py",
        find="            os.waitpid(pid, 0)\n",
        replace="            pass\n",
        killers=(
            "tests/agent/test_orphan.py::TestOrphan::test_agents_that_have_ended_are_not_left_to_the_first_process",
        ),
    ),
    Mutant(
        name="settings_of_an_agent_cut_short",
        why="R-63: an agent of many tiers refuses what it reads, and nothing is fetched.",
        file="ucm/agent/launch.py",
        find="            ours.sendall(settings)\n",
        replace="            ours.sendall(settings[:_MOST_TEXT])\n",
        killers=(
            "tests/agent/test_orphan.py::TestOrphan::test_python_without_files_in_memory_starts_agents",
        ),
    ),
    Mutant(
        name="agent_of_an_old_environment",
        why="R-63: an agent that is started anew has credentials that are over.",
        file="ucm/agent/launch.py",
        find="if self._keeper is None or self._keeper.environment != environment:",
        replace="if self._keeper is None:",
        killers=(
            "tests/agent/test_orphan.py::TestOrphan::test_agent_that_is_started_anew_has_the_environment_of_now",
        ),
    ),
    Mutant(
        name="engines_without_end",
        why="An agent keeps a connection, and what it wants, for as many engines as come.",
        file=_NODE,
        find="if self._num_engines > _MOST_PEERS:",
        replace="if False:",
        killers=(
            "tests/agent/test_node.py::TestMain::test_engine_beyond_those_that_an_agent_takes_is_told",
        ),
    ),
)
