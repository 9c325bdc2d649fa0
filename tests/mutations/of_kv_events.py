# SPDX-License-Identifier: Apache-2.0
"""Mutants of what routers are told: the ledger, its feeds, the mirror, the engine's events."""

from tests.mutations.mutant import Mutant

__all__ = ["KV_EVENTS"]

_LEDGER = "ucm/agent/ledger.py"
_MIRROR = "ucm/agent/mirror.py"
_FEED = "ucm/agent/feeding.py"
_WATCHED = "ucm/backends/watched.py"
_SLOTS = "ucm/backends/disk/_slots.py"
_TELLER = "ucm/integration/vllm/kv_events.py"
_WORDS = "ucm/integration/vllm/kv_words.py"
_WANTING = "ucm/scheduler/wanting.py"
_FOLLOWS = "tests/agent/test_ledger.py::TestFollow"
_EXACT = f"{_FOLLOWS}::test_who_follows_has_what_is_whole"
_DESCRIBES = "tests/agent/test_ledger.py::TestDescribe"
_AGAIN = "tests/agent/test_ledger.py::TestAgain"
_CONNECTION = "tests/agent/test_following.py"
_FEEDS = "tests/agent/test_feeding.py"
_TELLS = "tests/backends/test_watched.py"
_DOOR = "tests/integration/vllm/test_kv_events.py"
_TIERS = "tests/integration/vllm/test_kv_events_tiers.py::TestOtherTiers"
_DUE = "tests/integration/vllm/test_kv_events_idle.py::TestDue"

KV_EVENTS = (
    Mutant(
        name="mirror_goes_on_with_another_process",
        why="R-57: behind an engine's restart a router counts on blocks that are gone, and says that nothing is lost.",
        file="examples/kv_mirror.py",
        find="        if self._last not in (None, dict(found).get(last, self._last)):",
        replace="        if False:",
        killers=(
            "tests/integration/vllm/test_kv_mirror.py::TestMirror::test_engine_that_begins_again_unseen_has_what_it_told_since",
        ),
    ),
    Mutant(
        name="router_waits_for_who_stands_still",
        why="X-14: each prompt that a machine has which stands still is an error behind five minutes.",
        file="examples/cluster/router.py",
        find="total=None, sock_connect=_CONNECT_S, sock_read=silent_s",
        replace="total=silent_s",
        killers=(
            "tests/examples/test_cluster.py::test_engine_that_says_nothing_is_passed_over",
        ),
    ),
    Mutant(
        name="router_asks_again_who_stands_still",
        why="X-14: five minutes of waiting, five seconds of peace, and five minutes again.",
        file="examples/cluster/router.py",
        find="max(_PAUSE_S, now - began)",
        replace="_PAUSE_S",
        killers=(
            "tests/examples/test_cluster.py::test_engine_that_says_nothing_is_passed_over",
        ),
    ),
    Mutant(
        name="other_tiers_of_the_same_numbers",
        why="R-57: routers count on a tier that nobody has, or an engine without tiers follows no agent any more.",
        file=_TELLER,
        find="        if tuple(media) != self._tiers:",
        replace="        if tuple(media) == ():",
        killers=(f"{_TIERS}::test_what_the_last_agents_tiers_had_is_gone_from_these",),
    ),
    Mutant(
        name="ledger_overflow_unseen",
        why="A router that was slow for a while is sent to blocks that are gone.",
        file=_LEDGER,
        find="        if left > len(self._changes):\n            return None\n",
        replace="        left = min(left, len(self._changes))\n",
        killers=(f"{_FOLLOWS}::test_who_was_too_slow_is_told_what_there_is",),
    ),
    Mutant(
        name="listing_begins_anew_for_ever",
        why="R-57: beside tiers in use routers hear of no removal, from one listing to the next.",
        file=_LEDGER,
        find="        if self._listing is not None:\n            return self._list(self._listing)\n",
        replace="        if self._listing is not None and self._ledger.since(self._sequence) is not None:\n            return self._list(self._listing)\n",
        killers=(
            f"{_FOLLOWS}::test_listing_that_is_too_slow_ends_before_the_next_begins",
        ),
    ),
    Mutant(
        name="changes_amid_a_listing_lost",
        why="R-57: a block that went while all were listed is told of as stored for ever.",
        file=_LEDGER,
        find="        entries = news or []\n",
        replace="        entries = []\n",
        killers=(f"{_FOLLOWS}::test_listing_ends_though_changes_come",),
    ),
    Mutant(
        name="listing_ends_amid_changes",
        why="R-57: at the end of a listing routers hear that what has just come is not there.",
        file=_LEDGER,
        find="            news is None or self._sequence >= self._listing_ends\n",
        replace="            self._sequence >= 0\n",
        killers=(f"{_FOLLOWS}::test_listing_ends_with_what_was_there_at_one_time",),
    ),
    Mutant(
        name="each_engine_tells",
        why="Engines that share a slab each tell the same removal.",
        file=_LEDGER,
        find="return not reader.alone or self._queues.get(reader.prefix, [])[:1] == [reader]",
        replace="return True",
        killers=(f"{_FOLLOWS}::test_of_those_who_want_to_be_alone_one_is_told",),
    ),
    Mutant(
        name="ledger_without_bound",
        why="The agent's memory grows with a tier of any size.",
        file=_LEDGER,
        find="if not media and self._num_blocks >= self._most_blocks:",
        replace="if False:",
        killers=(f"{_FOLLOWS}::test_more_than_it_can_know_is_counted",),
    ),
    Mutant(
        name="lost_blocks_keep_their_room",
        why="Once a shared tier has had a million blocks, no router hears of a new one in the slab.",
        file=_LEDGER,
        find="            if not self._guessed:\n",
        replace="            if True:\n",
        killers=(f"{_FOLLOWS}::test_what_a_tier_may_have_lost_makes_room",),
    ),
    Mutant(
        name="slabs_blocks_forgotten",
        why="A block of the slab is told as removed, for one that a tier may have.",
        file=_LEDGER,
        find="        if not media & ~self._guesses:\n",
        replace="        if True:\n",
        killers=(f"{_FOLLOWS}::test_what_a_tier_may_have_lost_makes_room",),
    ),
    Mutant(
        name="descriptions_without_bound",
        why="The agent's memory grows with all prompts ever.",
        file=_LEDGER,
        find="while self._said_bytes > self._most_said_bytes:",
        replace="while False:",
        killers=(f"{_DESCRIBES}::test_oldest_descriptions_go",),
    ),
    Mutant(
        name="descriptions_of_nothing_without_bound",
        why="Who says nothing of blocks, again and again, has the agent's memory grow.",
        file=_LEDGER,
        find="self._said_bytes += len(block) + len(said)",
        replace="self._said_bytes += len(said)",
        killers=(f"{_DESCRIBES}::test_descriptions_that_say_nothing_have_a_bound",),
    ),
    Mutant(
        name="late_descriptions_lost",
        why="Blocks that were saved before their tokens were told of stay unknown to routers.",
        file=_LEDGER,
        find="            if self.has(medium, key):\n",
        replace="            if False:\n",
        killers=(f"{_DESCRIBES}::test_late_description_tells_of_the_block_again",),
    ),
    Mutant(
        name="engine_that_left_keeps_its_place",
        why="When the engine that told is gone nobody tells.",
        file="ucm/agent/connection.py",
        find="        finally:\n            if self._reader is not None:\n                self._ledger().close(self._reader)\n",
        replace="        finally:\n            pass\n",
        killers=(f"{_CONNECTION}::TestFollow::test_engine_that_is_gone_makes_place",),
    ),
    Mutant(
        name="listing_sweeps_nothing",
        why="What went while no agent was there is told of for ever.",
        file=_MIRROR,
        find="for at, it in blocks.items() if it.parts != whole]",
        replace="for at, it in blocks.items() if False]",
        killers=(f"{_FOLLOWS}::test_what_went_while_no_agent_was_there_is_told",),
    ),
    Mutant(
        name="listing_is_over_before_it_swept",
        why="R-57: where an agent is lost just then, routers that forgot all do not hear of what was left to sweep.",
        file=_MIRROR,
        find="            whole = self._all\n",
        replace="            whole, self._tells_again = self._all, False\n",
        killers=(
            "tests/agent/test_mirror.py::test_all_is_told_again_also_where_the_end_of_a_listing_broke_off",
        ),
    ),
    Mutant(
        name="former_weights_blocks_go_last",
        why="R-57: with weights that were there before, routers hear that blocks are gone which the slab has.",
        file=_MIRROR,
        find="            if prefix := self._prefix:\n",
        replace="            if prefix := b'':\n",
        killers=(
            "tests/agent/test_mirror.py::test_block_of_two_key_spaces_is_there_behind_a_change",
        ),
    ),
    Mutant(
        name="mirror_is_told_no_key_space",
        why="R-57: the same, as nobody says which blocks are of former weights.",
        file=_TELLER,
        find="self._mirror.tell_again(keyspace_prefix(self._digest))",
        replace="self._mirror.tell_again()",
        killers=(
            "tests/integration/vllm/test_kv_events_world.py::test_subscriber_has_what_is_there",
        ),
    ),
    Mutant(
        name="part_of_a_block_is_told_as_stored",
        why="A router counts on a block of which another rank's part is gone.",
        file=_MIRROR,
        find="        if block.parts != self._all:\n            return\n",
        replace="",
        killers=(_EXACT,),
    ),
    Mutant(
        name="all_that_is_gone_is_told_in_one_go",
        why="Where a listing leaves out a million blocks, no answer of the agent is heard for seconds.",
        file=_TELLER,
        find="list(itertools.islice(self._news, _MOST_NEWS))",
        replace="list(self._news)",
        killers=(
            "tests/integration/vllm/test_kv_events_many.py::test_listing_that_ends_without_many_blocks_keeps_nobody_waiting",
        ),
    ),
    Mutant(
        name="each_step_has_more_made_at_a_time",
        why="Where an engine steps fast, no answer of the agent is heard for seconds all the same.",
        file=_TELLER,
        find="        if self._goes_on:\n",
        replace="        if False:\n",
        killers=(
            "tests/integration/vllm/test_kv_events_many.py::test_engine_that_takes_all_the_time_keeps_nobody_waiting",
        ),
    ),
    Mutant(
        name="cleared_cache_is_not_told_again",
        why="After reset_prefix_cache a router knows nothing of what is below the engine.",
        file=_MIRROR,
        find="        is_due = block.told is None or (self._tells_again and not had_all)\n",
        replace="        is_due = block.told is None\n",
        killers=(f"{_AGAIN}::test_listing_tells_all_again_when_asked",),
    ),
    Mutant(
        name="other_name_is_left_behind",
        why="A block that was told of under our hash stays there under it for ever.",
        file=_MIRROR,
        find="            if block.told not in (None, content.block_hash):\n",
        replace="            if False:\n",
        killers=(f"{_DESCRIBES}::test_block_has_the_name_that_its_engine_has_for_it",),
    ),
    Mutant(
        name="slab_listing_forgets_nothing",
        why="What a process took along when it died is told of as stored for ever.",
        file=_FEED,
        find="                changes += [(key, False) for key in unlisted]\n",
        replace="",
        killers=(f"{_FEEDS}::TestSlab::test_what_a_listing_leaves_out_is_gone",),
    ),
    Mutant(
        name="told_before_it_is_listed",
        why="When an agent is started again, routers hear that all blocks of its slab are gone.",
        file=_LEDGER,
        find="        if not ledger.is_whole:\n            return None\n",
        replace="",
        killers=(f"{_FEEDS}::TestSlab::test_nobody_is_told_before_all_was_listed",),
    ),
    Mutant(
        name="tier_is_not_listed",
        why="After a restart of the agent a full disk counts as empty.",
        file=_FEED,
        find="                        ledger.stored(SLAB + 1 + at, key)\n",
        replace="                        pass\n",
        killers=(f"{_FEEDS}::TestTiers::test_tiers_are_numbered_behind_the_slab",),
    ),
    Mutant(
        name="missing_blocks_of_a_tier_untold",
        why="What a server evicted is told of as stored for ever.",
        file=_WATCHED,
        find="    Presence.ABSENT: False,\n",
        replace="",
        killers=(
            f"{_TELLS}::TestAnswers::test_answers_tell_of_a_backend_that_does_not",
        ),
    ),
    Mutant(
        name="absence_older_than_a_put_told",
        why="R-57: a block that was just put stays unknown to routers, as long as nobody looks for it.",
        file=_WATCHED,
        find="            put.update(stored)\n",
        replace="            put.update(())\n",
        killers=(
            f"{_TELLS}::TestPutMeanwhile::test_answer_that_is_older_than_a_put_is_not_told",
        ),
    ),
    Mutant(
        name="evictions_of_a_disk_untold",
        why="A router is sent to blocks that a disk made room with.",
        file=_SLOTS,
        find="            self.tell(slot.key, False)\n",
        replace="            pass\n",
        killers=(
            f"{_TELLS}::TestDisk::test_disk_tells_what_it_has_and_what_it_lets_go",
        ),
    ),
    Mutant(
        name="batches_without_bound",
        why="An engine that idles piles up what happens on its node.",
        file=_TELLER,
        find=" or len(self._ready) >= _MOST_READY:",
        replace=":",
        killers=(
            f"{_DOOR}::TestTake::test_no_more_than_some_batches_wait_for_the_engine",
        ),
    ),
    Mutant(
        name="answers_of_a_former_key_space_count",
        why="Blocks of former weights are told of as if they were of use.",
        file=_TELLER,
        find="        if told.number != self._number:\n            return  # of another key space\n",
        replace="",
        killers=(
            f"{_DOOR}::TestTake::test_answers_of_a_former_key_space_are_passed_over",
        ),
    ),
    Mutant(
        name="described_on_the_engines_thread",
        why="A long prompt holds the engine's step up while its blocks are described.",
        file=_TELLER,
        find="            self._client.call(self._describe_all)\n",
        replace="            self._describe_all()\n",
        killers=(f"{_DOOR}::TestDescribe::test_blocks_are_described_once",),
    ),
    Mutant(
        name="silent_engine_is_not_refused",
        why="Events are asked for, and nobody ever hears of one.",
        file=_WORDS,
        find="    if engines is None or not engines.enable_kv_cache_events:\n",
        replace="    if False:\n",
        killers=(f"{_DOOR}::TestCheck::test_events_that_nobody_publishes_are_refused",),
    ),
    Mutant(
        name="parents_left_out_of_chains",
        why="Blocks of two prompts are told of as one chain.",
        file=_WORDS,
        find="    is_next = one.said.parent == last.said.block_hash\n",
        replace="    is_next = True\n",
        killers=(f"{_DOOR}::TestWords::test_only_blocks_of_a_chain_share_an_event",),
    ),
    Mutant(
        name="innermost_tier_counts",
        why="What came from a disk counts as a hit of the slab.",
        file=_WANTING,
        find="max(outermost.get(end, _SLAB), medium)",
        replace="min(outermost.get(end, medium), medium)",
        killers=(
            "tests/scheduler/test_wanting.py::TestTokens::test_outermost_medium_of_a_token_counts",
        ),
    ),
    Mutant(
        name="idle_engine_keeps_its_events",
        why="R-57: what the last request stored is told to routers with the next one.",
        file=_TELLER,
        find="        if self._ready:\n            return True\n        if self",
        replace="        if self",
        killers=(f"{_DUE}::test_what_is_told_behind_the_last_request_is_published",),
    ),
    Mutant(
        name="idle_engine_does_not_wait_for_news",
        why="R-57: blocks are committed behind the last step, and nobody hears of them.",
        file=_TELLER,
        find="        if now < self._idle_since + self._patience_s:\n",
        replace="        if False:\n",
        killers=(f"{_DUE}::test_engine_that_has_nothing_to_tell_sleeps",),
    ),
    Mutant(
        name="idle_engine_never_sleeps",
        why="An engine with nothing to do takes a thousand steps a second.",
        file=_TELLER,
        find="        if self._idle_since is None:\n            self._idle_since = now\n",
        replace="        self._idle_since = now\n",
        killers=(f"{_DUE}::test_engine_that_has_nothing_to_tell_sleeps",),
    ),
    Mutant(
        name="idle_engine_tells_eight_batches",
        why="R-57: of what happened while it slept a part stays untold once it is awake.",
        file=_TELLER,
        find="            self._idle_since, self._patience_s = None, _TAIL_S\n",
        replace="",
        killers=(f"{_DUE}::test_what_is_told_behind_the_last_request_is_published",),
    ),
    Mutant(
        name="news_of_others_keep_an_engine_awake",
        why="Beside a neighbour that stores all the time neither a pause nor a sleep is ever complete.",
        file="ucm/integration/vllm/kv_events.py",
        find="        if now >= self._idle_from + _LONGEST_S:\n",
        replace="        if False:\n",
        killers=(
            "tests/integration/vllm/test_kv_events_idle.py::TestDue::test_news_of_others_keep_no_engine_awake_for_ever",
        ),
    ),
)
