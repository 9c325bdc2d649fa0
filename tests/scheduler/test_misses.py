# SPDX-License-Identifier: Apache-2.0
"""Each reason for which a look-up can fall short, and what finding it out costs (R-71)."""

from collections.abc import Mapping

import pytest

from tests.scheduler.miss_kit import HASHES, TOKENS, end, nowhere, start, told, why
from tests.scheduler.model import (
    DIGEST,
    HYBRID,
    ONE_FULL,
    SetIndex,
    facts,
    failure_of,
    hashes_of,
    make_adapter,
    saved,
    scheduled,
)
from ucm.blocks import PackedKey
from ucm.config import SaveDecoded
from ucm.fates import Fate, Told
from ucm.reasons import Reason
from ucm.scheduler.messages import StepReport
from ucm.scheduler.requests import RequestEnd, Wishes
from ucm.stores.memory import MemoryStore


class TestOffers:
    def test_prompt_that_nobody_offered_costs_one_question(self) -> None:
        """R-71: the commonest miss asks the store for one block more, once in a life and
        in no step besides; the look-up itself is as it was."""
        index = SetIndex()
        adapter = make_adapter(ONE_FULL, index)
        for _ in range(9):
            match = adapter.match_prefix("asks", 4 * 4096, hashes_of("n", 4096), 0)
        assert (9, 9 * 32, 0) == (index.calls, index.asked, index.told_calls)
        miss = adapter.misses.explain(match, 0, nowhere)
        assert ("never_offered", 0, None) == told(miss)
        assert (9, 1) == (index.calls, index.told_calls)
        assert 4 * 4095 <= match.wanted

    def test_hit_of_all_that_was_wanted_is_no_miss(self, index: SetIndex) -> None:
        """What falls short of whole blocks only, or is in the engine's cache, does not."""
        index.put(0, HASHES)
        adapter = make_adapter(ONE_FULL, index)
        assert why(adapter) is None
        assert why(adapter, tokens=35) is None
        assert why(adapter, computed=32) is None
        assert 0 == index.told_calls

    def test_hit_that_falls_short_says_at_which_block(self, index: SetIndex) -> None:
        """R-71: the first block that is missing, and its key on the first part."""
        index.put(0, HASHES[:5])
        adapter = make_adapter(ONE_FULL, index)
        miss = why(adapter)
        assert ("never_offered", 5, None) == told(miss)
        assert miss is not None
        assert miss.key.endswith(HASHES[5])
        assert adapter.match_prefix("asks", TOKENS, HASHES, 0).tokens == 20

    def test_part_that_is_missing_is_asked_about(self, index: SetIndex) -> None:
        """Of a block whose first part is there, the part that is not says why."""
        adapter = make_adapter(ONE_FULL, index, num_ranks=2, shards=2)
        index.put(0, HASHES, shards=2)
        keys = set(index.keys)
        index.drop(0, HASHES[3:4], shard=1)
        (gone,) = keys - index.keys
        index.told[gone] = Told(Fate.EVICTED, 3.0)
        miss = why(adapter)
        assert ("evicted", 3, "evicted") == told(miss)
        assert miss is not None
        assert (3.0, True) == (miss.detail["age_s"], miss.key != gone)

    @pytest.mark.parametrize("answer", [None, [], KeyError("k")])
    def test_store_that_cannot_say_why_ends_nobody(
        self, index: SetIndex, monkeypatch: pytest.MonkeyPatch, answer: object
    ) -> None:
        """R-71: a store of somebody else's may answer anything, on the engine's thread."""

        def fates(keys: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(index, "fates", fates)
        reason, at, text = told(why(make_adapter(ONE_FULL, index)))
        assert ("unavailable", 0) == (reason, at)
        assert "Error(" in text  # whose, as nobody here knows it

    def test_prompt_shorter_than_a_block_is_too_short(self, index: SetIndex) -> None:
        """R-71: it has nothing that could be found, whatever is stored."""
        adapter = make_adapter(ONE_FULL, index)
        assert ("too_short", None, "no whole block") == told(
            why(adapter, tokens=3, hashes=[])
        )

    @pytest.mark.parametrize(
        ("fate", "reason"),
        [
            (Fate.NEVER, "never_offered"),
            (Fate.WRITING, "not_committed"),
            (Fate.STORED, "not_committed"),
            (Fate.EVICTED, "evicted"),
            (Fate.FORGOTTEN, "evicted"),
            (Fate.CLEARED, "evicted"),
            (Fate.CORRUPT, "corrupt"),
            (Fate.UNKNOWN, "unknown"),
        ],
    )
    def test_store_tells_what_became_of_the_block(
        self, index: SetIndex, fate: Fate, reason: str
    ) -> None:
        """R-71: each fate is a reason; which one it was is the detail."""
        adapter = make_adapter(ONE_FULL, index)
        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        index.put(0, HASHES[:1])
        (key,) = index.keys
        index.keys.clear()
        index.told[key] = Told(fate, 4.0)
        miss = adapter.misses.explain(match, 0, nowhere)
        assert (reason, 0) == told(miss)[:2]
        assert miss is not None
        is_gone = reason in {"evicted", "corrupt"}
        assert (4.0 if is_gone else None) == miss.detail.get("age_s")

    def test_store_that_keeps_no_such_things_says_so(self) -> None:
        """A store of a user's own need not know; nothing is claimed then."""
        with MemoryStore(8, 64) as store:
            assert ("unknown", 0) == told(why(make_adapter(ONE_FULL, store)))[:2]

    def test_store_that_is_down_is_unavailable(self, index: SetIndex) -> None:
        """R-71: also if it goes down between the look-up and the question why."""
        adapter = make_adapter(ONE_FULL, index)
        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        index.is_up = False
        assert ("unavailable", 0) == told(adapter.misses.explain(match, 0, nowhere))[:2]
        assert ("unavailable", None, "the store did not answer") == told(why(adapter))

    def test_block_under_another_key_space_is_told_with_what_differs(
        self, index: SetIndex
    ) -> None:
        """R-71: asked only if nothing at all is found and nothing else is known."""
        adapter, asked = make_adapter(ONE_FULL, index), []

        def elsewhere(key: PackedKey) -> Mapping[str, object]:
            asked.append(key)
            return {"kv_dtype": ("float16", "fp8")}

        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        miss = adapter.misses.explain(match, 0, elsewhere)
        assert ("other_key_space", 0, None) == told(miss)
        assert miss is not None
        assert {"kv_dtype": ("float16", "fp8")} == miss.detail
        assert [miss.key] == asked
        index.put(0, HASHES[:1])
        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        found = adapter.misses.explain(match, 0, elsewhere)
        assert ("never_offered", 1, 1) == (*told(found)[:2], len(asked))


class TestSaves:
    @pytest.mark.parametrize(
        ("reason", "expected"),
        [
            (Reason.QUEUE_TICKETS, "queue"),
            (Reason.STORE_BEHIND, "queue"),
            (Reason.STORE_FULL, "failed"),
            (Reason.ERROR, "failed"),
        ],
    )
    def test_save_that_was_not_stored_says_why(
        self, reason: Reason, expected: str, index: SetIndex
    ) -> None:
        """R-71: refused and failed saves are remembered with what their rank told."""
        adapter = make_adapter(ONE_FULL, index, span_blocks=8)
        adapter.tick(100.0)
        (order,) = start(adapter)
        assert ("not_committed", 0, "this engine is saving it") == told(why(adapter))
        number = order.transfer_id
        report = StepReport(
            rank=0,
            released=(number,),
            unstored_saves=(number,),
            why_unstored={number: reason},
        )
        adapter.apply_report(report)
        adapter.tick(107.5)
        miss = why(adapter)
        assert (expected, 0, reason) == told(miss)
        assert miss is not None
        assert 7.5 == miss.detail["age_s"]

    def test_of_two_ranks_the_one_that_failed_says_why(self, index: SetIndex) -> None:
        """A rank that has stored its part says nothing of the other's."""
        adapter = make_adapter(ONE_FULL, index, num_ranks=2, shards=2)
        (order,) = start(adapter)
        number = order.transfer_id
        failed = StepReport(
            rank=0,
            released=(number,),
            unstored_saves=(number,),
            why_unstored={number: Reason.DEVICE},
        )
        adapter.apply_report(failed)
        adapter.apply_report(saved(order, rank=1))
        assert ("failed", 0, "device") == told(why(adapter))

    @pytest.mark.parametrize(("age_s", "expected"), [(1.0, "evicted"), (9.0, "failed")])
    def test_more_recent_word_counts(
        self, age_s: float, expected: str, index: SetIndex
    ) -> None:
        """R-71: a block that was refused, saved and evicted was evicted; one that was
        evicted and then refused was refused."""
        adapter = make_adapter(ONE_FULL, index)
        (order,) = start(adapter)
        number = order.transfer_id
        adapter.apply_report(
            StepReport(
                rank=0,
                released=(number,),
                unstored_saves=(number,),
                why_unstored={number: Reason.ERROR},
            )
        )
        adapter.tick(5.0)
        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        index.put(0, HASHES[:1])
        index.told = dict.fromkeys(index.keys, Told(Fate.EVICTED, age_s))
        index.keys.clear()
        miss = adapter.misses.explain(match, 0, nowhere)
        assert (expected, 0) == told(miss)[:2]

    def test_what_no_plan_took_in_time_was_dropped_for_the_queue(
        self, index: SetIndex
    ) -> None:
        """R-71: a request's last blocks for which no worker had room are remembered."""
        adapter = make_adapter(
            ONE_FULL, index, tickets=0, decoded=SaveDecoded.AT_END, max_step_blocks=0
        )
        start(adapter)
        adapter.request_finished("r", end())
        adapter.plan_step(facts())
        adapter.tick(1000.0)
        adapter.plan_step(facts())
        assert ("queue", 0, "not_taken") == told(why(adapter))

    def test_request_that_wishes_no_save_is_not_admitted(self, index: SetIndex) -> None:
        """R-71: its prompt is not found again, because it was not to be."""
        adapter = make_adapter(ONE_FULL, index)
        wishes = Wishes(most_saved=0)
        assert () == start(adapter, wishes)
        adapter.request_finished("r", end(wishes))
        assert ("admission", 0, "wish") == told(why(adapter))

    def test_answers_that_are_never_saved_are_not_admitted(
        self, index: SetIndex
    ) -> None:
        """R-71: what follows a prompt is missing by a setting."""
        adapter = make_adapter(ONE_FULL, index, decoded=SaveDecoded.NEVER)
        request = scheduled("r", HASHES, [range(1, 10)], 0, 32, is_new=True, prompt=16)
        (order,) = adapter.plan_step(facts(request)).saves
        index.put(0, order.split_hashes())
        adapter.apply_report(saved(order))
        last = RequestEnd(
            computed_tokens=32,
            known_tokens=33,
            prompt_tokens=16,
            hashes=HASHES,
            tables=[range(1, 10)],
        )
        adapter.request_finished("r", last)
        assert ("admission", 4, "save_decoded") == told(why(adapter))


class TestLoads:
    @pytest.mark.parametrize(
        ("reason", "expected"),
        [(Reason.CORRUPT, "corrupt"), (Reason.EVICTED, "denied")],
    )
    def test_block_whose_load_failed_is_denied_or_corrupt(
        self, reason: Reason, expected: str, index: SetIndex
    ) -> None:
        """R-71: while it is denied, why its load failed is told; another of its kind in
        the other group is not meant."""
        adapter = make_adapter(HYBRID, index)
        index.put(0, HASHES)
        index.put(1, HASHES[1::2])
        match = adapter.match_prefix("r", TOKENS, HASHES, 0)
        tables = [range(1, 9), range(11, 15)]
        adapter.blocks_allocated(
            "r", tables, HASHES, computed_tokens=0, external_tokens=match.tokens
        )
        loads = adapter.plan_step(facts()).loads
        (order,) = [each for each in loads if each.group_id == 0]
        bad = failure_of(order, 2, reason)
        adapter.apply_report(
            StepReport(
                rank=0,
                failures=(bad,),
                loads_done=tuple(each.transfer_id for each in loads),
            )
        )
        miss = why(adapter)
        assert (expected, 2, reason) == told(miss)
        assert miss is not None
        assert miss.block is not None
        assert 0 == miss.block.group.group_id
        adapter.tick(2.0)
        assert why(adapter) is None

    def test_request_whose_load_failed_without_a_culprit_has_failed(
        self, index: SetIndex
    ) -> None:
        """R-71: it looks nothing up any more; others find what is stored."""
        adapter = make_adapter(ONE_FULL, index)
        index.put(0, HASHES)
        match = adapter.match_prefix("r", TOKENS, HASHES, 0)
        adapter.blocks_allocated(
            "r",
            [range(1, 9)],
            HASHES,
            computed_tokens=0,
            external_tokens=match.tokens,
        )
        (order,) = adapter.plan_step(facts()).loads
        bad = failure_of(order, None, Reason.DEADLINE)
        adapter.apply_report(
            StepReport(rank=0, failures=(bad,), loads_done=(order.transfer_id,))
        )
        miss = why(adapter, name="r")
        assert ("failed", None, "a load of this request failed") == told(miss)
        assert why(adapter) is None

    def test_loads_of_others_leave_no_room(self, index: SetIndex) -> None:
        """R-71: where loads must come with the step, too many of them are a queue."""
        adapter = make_adapter(ONE_FULL, index, parks=False, max_step_blocks=0)
        index.put(0, HASHES)
        assert ("queue", None) == told(why(adapter))[:2]


class TestDeclined:
    def test_nothing_is_looked_up_behind_a_failed_runtime(
        self, index: SetIndex
    ) -> None:
        """R-71: a request with nothing to find does not count even then."""
        adapter = make_adapter(ONE_FULL, index)
        adapter.apply_report(StepReport(rank=0, healthy=False))
        assert ("bypassed", None, "the runtime of a rank has failed") == told(
            why(adapter)
        )
        assert why(adapter, tokens=3, hashes=[]) is None

    def test_unkeyed_long_ids_and_partial_blocks_are_told_apart(
        self, index: SetIndex
    ) -> None:
        """R-71: a reason each, and a text for those that share one."""
        adapter = make_adapter(ONE_FULL, index)
        assert "admission" == told(why(adapter, name="x" * 70000))[0]
        assert ("bypassed", None, "the engine's own hit ends inside a block") == told(
            why(adapter, computed=5)
        )
        adapter.doubt(1)
        assert "unkeyed" == told(why(adapter))[0]
        # As where ranks on other machines have told nothing yet.
        assert "unkeyed" == told(why(adapter, wishes=Wishes(most_loaded=0)))[0]

    def test_keys_that_go_behind_the_look_up_leave_no_reason(
        self, index: SetIndex
    ) -> None:
        """R-71: weights in doubt before the answer is used: nobody is asked, nothing raised."""
        adapter = make_adapter(ONE_FULL, index)
        match = adapter.match_prefix("asks", TOKENS, HASHES, 0)
        adapter.rekey(b"")
        miss = adapter.misses.explain(match, 0, nowhere)
        assert ("unkeyed", 0) == told(miss)[:2]
        assert 0 == index.told_calls

    def test_what_is_known_is_forgotten_with_the_keys(self, index: SetIndex) -> None:
        """Under another key space nothing was refused yet; under the same, proven anew
        after a doubt, it still was."""
        adapter = make_adapter(ONE_FULL, index)
        wishes = Wishes(most_saved=0)
        adapter.rekey(DIGEST)
        start(adapter, wishes)
        adapter.request_finished("r", end(wishes))
        adapter.doubt(1)
        adapter.rekey(DIGEST)
        assert "admission" == told(why(adapter))[0]
        adapter.rekey(bytes(16))
        assert "never_offered" == told(why(adapter))[0]
