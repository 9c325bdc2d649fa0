# SPDX-License-Identifier: Apache-2.0
"""A store that fails or is slow is not asked for a while."""

import contextlib
import fcntl
from pathlib import Path

import pytest

from tests.kit.lockstep import Tracer
from tests.stores.slab_kit import index_path, open_slab
from tests.stores.test_wrap import InnerBypass
from ucm.errors import StoreUnavailableError
from ucm.metrics import Counters
from ucm.reasons import Reason
from ucm.stores.abc import Store
from ucm.stores.bypass import BypassStore
from ucm.stores.memory import MemoryStore
from ucm.stores.slab._layout import Word
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save
from ucm.testing.store_contract import StoreContract
from ucm.tracing import STORE_ANSWERS, STORE_BYPASSED

KEYS = make_keys(3)
VERBS = ("match", "contains", "touch")


class TestContract(InnerBypass, StoreContract):
    """The contract, through a bypass of a store that is well."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a store that is never bypassed."""
        inner = MemoryStore(num_blocks, BLOCK_BYTES)
        return BypassStore(inner, counters=Counters(), log=Tracer().log)


class LookedAt(WrapperStore):
    """A store that calls a function at each look-up."""

    def __init__(self, look):
        super().__init__(MemoryStore(4, BLOCK_BYTES))
        self.look = look

    def match(self, keys):
        """Look, and answer."""
        self.look()
        return super().match(keys)

    def contains(self, keys):
        """Look, and answer."""
        self.look()
        return super().contains(keys)

    def touch(self, keys, uses=None):
        """Look, and mark."""
        self.look()
        super().touch(keys)


class Asked:
    """A store in a time of its own, and what is asked of it."""

    def __init__(self):
        self.now = 100.0
        self.calls = 0
        self.took_s = 0.0
        self.fails = False
        self.counters = Counters()
        self.tracer = Tracer()
        self.store = BypassStore(
            LookedAt(self.look),
            counters=self.counters,
            log=self.tracer.log,
            clock=lambda: self.now,
        )

    def look(self):
        """Take some time, and fail if that is planned."""
        self.calls += 1
        self.now += self.took_s
        if self.fails:
            raise StoreUnavailableError("planned")

    def ask(self, verb="match", keys=KEYS):
        """Return whether there was an answer."""
        with contextlib.suppress(StoreUnavailableError):
            getattr(self.store, verb)(keys)
            return True
        return False

    def fail(self, times):
        """Ask and get no answer so often."""
        self.fails = True
        for _ in range(times):
            assert not self.ask()
        self.fails = False

    @property
    def told(self):
        """The events that were logged, and how long a bypass was to be."""
        return [(each["event"], each.get("seconds")) for each in self.tracer.events]


class TestBypass:
    @pytest.mark.parametrize("verb", VERBS)
    def test_store_that_does_not_answer_is_not_asked_for_a_while(self, verb):
        """X-14: behind the third failure every look-up fails at once, without asking,
        and each is counted; when the time is up the store is asked again."""
        asked = Asked()
        asked.fail(3)
        assert [(STORE_BYPASSED, 1.0)] == asked.told
        assert not asked.ask(verb)
        assert 3 == asked.calls
        asked.now += 1.0
        assert asked.ask(verb)
        assert asked.ask(verb)
        assert 5 == asked.calls
        assert [(STORE_BYPASSED, 1.0), (STORE_ANSWERS, None)] == asked.told
        counted = asked.counters.total
        assert 3 == counted("ucm_failed_lookups_total", reason="unavailable")
        assert 1 == counted("ucm_bypassed_lookups_total")

    @pytest.mark.parametrize("wrong", [None, "x", -1, 4, 1.5, [True]])
    @pytest.mark.parametrize("verb", ["match", "contains"])
    def test_store_of_others_that_answers_something_else_has_not_answered(
        self, verb, wrong
    ):
        """It would end the engine, whose scheduler's thread asks."""
        asked = Asked()
        setattr(asked.store.inner, verb, lambda keys: wrong)
        for _ in range(3):
            assert not asked.ask(verb)
        assert [(STORE_BYPASSED, 1.0)] == asked.told

    def test_store_of_others_that_raises_its_own_has_not_answered(self):
        """No engine can know what a client of somebody else's may raise."""
        asked = Asked()
        asked.store.inner.look = {}.popitem
        with pytest.raises(StoreUnavailableError, match=r"KeyError.*is empty"):
            asked.store.match(KEYS)
        assert 1 == asked.counters.total("ucm_failed_lookups_total")

    def test_slow_store_is_not_asked_for_a_while(self):
        """X-14: answers that come late count like failures; they are used all the same."""
        asked = Asked()
        asked.took_s = 0.06
        assert asked.ask()
        assert asked.ask()
        assert asked.ask()
        assert not asked.ask()
        assert 3 == asked.calls
        assert 3 == asked.counters.total("ucm_failed_lookups_total", reason="slow")

    def test_long_prompt_may_take_longer(self):
        """What counts as slow grows with the keys that are asked for: a long prompt is
        not a slow store."""
        asked = Asked()
        asked.took_s = 0.06
        for _ in range(10):
            assert asked.ask(keys=make_keys(8) * 1000)
        assert [] == asked.told

    def test_single_failures_do_not_count(self):
        """A store that mostly answers is asked: two bad answers in eight are none."""
        asked = Asked()
        for _ in range(5):
            asked.fail(2)
            for _ in range(6):
                assert asked.ask()
        assert [] == asked.told

    def test_failures_need_not_follow_each_other(self):
        """Three bad answers in eight are too many, whatever came between them."""
        asked = Asked()
        for _ in range(2):
            asked.fail(1)
            assert asked.ask()
            assert asked.ask()
        asked.fail(1)
        assert [(STORE_BYPASSED, 1.0)] == asked.told

    def test_bypass_gets_longer_while_the_store_does_not_recover(self):
        """One try ends each bypass; while it fails the next is twice as long, up to half
        a minute, and an answer makes the store one as good as ever."""
        asked = Asked()
        asked.fail(3)
        for seconds in (1, 2, 4, 8, 16, 30, 30):
            assert (STORE_BYPASSED, float(seconds)) == asked.told[-1]
            asked.now += seconds - 0.01
            calls = asked.calls
            asked.fail(1)
            assert calls == asked.calls
            asked.now += 0.01
            asked.fail(1)
            assert calls + 1 == asked.calls
        asked.now += 30
        assert asked.ask()
        assert (STORE_ANSWERS, None) == asked.told[-1]
        asked.fail(2)
        assert asked.ask()
        asked.fail(1)
        assert (STORE_BYPASSED, 1.0) == asked.told[-1]

    def test_other_errors_are_the_callers(self):
        """A bug is no trouble of the store's and hides behind no bypass."""
        asked = Asked()
        for _ in range(5):
            with pytest.raises(TypeError):
                asked.store.match(None)
        assert [] == asked.told


def test_process_that_stopped_within_a_change_holds_nobody_up_for_long(tmp_path):
    """X-14: a look-up waits its deadline for a process that stands still in the middle
    of a change, three times; then nobody waits any more, and when it has died the store
    is as good as ever."""
    now = [0.0]
    with (
        open_slab(tmp_path / "s") as writer,
        open_slab(tmp_path / "s", index_only=True, lock_timeout=0.01) as index,
    ):
        store = BypassStore(
            index, counters=Counters(), log=Tracer().log, clock=lambda: now[0]
        )
        save(writer, KEYS)
        assert 3 == store.match(KEYS)
        with index_path(tmp_path / "s").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer._slab.index.header[Word.VERSION] |= 1
            for _ in range(3):
                with pytest.raises(StoreUnavailableError, match="held by a process"):
                    store.match(KEYS)
            for _ in range(100):
                with pytest.raises(StoreUnavailableError, match=r"another 1\.0 s"):
                    store.match(KEYS)
        now[0] = 1.0
        assert 3 == store.match(KEYS)


class TestLoads:
    """R-14: a store that answers look-ups and keeps loads waiting is bypassed as well."""

    @staticmethod
    def lose(asked, *numbers, rank=0, reason="deadline"):
        """Have loads fail on a rank."""
        asked.store.loads_ended(rank, dict.fromkeys(numbers, Reason(reason)), numbers)

    @staticmethod
    def win(asked, *numbers, rank=0):
        """Have loads succeed on a rank."""
        asked.store.loads_ended(rank, {}, numbers)

    @pytest.mark.parametrize("reason", ["deadline", "unavailable", "store_hung"])
    def test_store_whose_loads_hang_is_not_asked_for_a_while(self, reason):
        """R-14: behind the third such load every look-up is a miss at once; when the time
        is up one request tries the store, the others are misses until it has an answer."""
        asked = Asked()
        self.lose(asked, 1, 2, reason=reason)
        assert asked.ask()
        self.lose(asked, 3, reason=reason)
        assert [(STORE_BYPASSED, 1.0)] == asked.told
        for verb in VERBS:
            assert not asked.ask(verb)
        asked.now += 1.0
        assert asked.ask()
        asked.store.load_begun()
        assert not asked.ask()
        self.win(asked, 4)
        assert asked.ask()
        asked.store.load_begun()
        assert asked.ask()
        assert [(STORE_BYPASSED, 1.0), (STORE_ANSWERS, None)] == asked.told
        assert 4 == asked.counters.total("ucm_bypassed_lookups_total")

    @pytest.mark.parametrize(
        "reason", ["corrupt", "evicted", "overload", "device", "recycled"]
    )
    def test_failures_that_are_none_of_the_stores_do_not_count(self, reason):
        """R-14: a block that is damaged or gone, an engine with too many loads, a device:
        no reason to leave the store alone."""
        asked = Asked()
        self.lose(asked, *range(20), reason=reason)
        assert [] == asked.told
        assert asked.ask()

    def test_pause_gets_longer_while_each_try_fails(self):
        """R-14: one load tries behind each pause, and one that fails doubles it; other
        ends of loads from before say nothing, neither good nor bad."""
        asked = Asked()
        self.lose(asked, 1, 2, 3)
        for number, seconds in enumerate((1, 2, 4, 8, 16, 30, 30), start=10):
            assert (STORE_BYPASSED, float(seconds)) == asked.told[-1]
            before = len(asked.told)
            self.lose(asked, 100 + number)
            self.win(asked, 200 + number)
            asked.store.load_begun()  # matched before, and allocated late
            assert before == len(asked.told)
            asked.now += seconds - 0.01
            assert not asked.ask()
            asked.now += 0.01
            assert asked.ask()
            asked.store.load_begun()
            assert not asked.ask()
            self.lose(asked, number)
        asked.now += 30.0
        asked.store.load_begun()
        self.win(asked, 99)
        assert (STORE_ANSWERS, None) == asked.told[-1]
        self.lose(asked, 1, 2, 3)
        assert (STORE_BYPASSED, 1.0) == asked.told[-1]

    def test_one_rank_of_four_is_enough(self):
        """R-14: three ranks whose loads succeed neither hide a fourth one whose loads
        hang, nor end the pause before that one's has succeeded too."""
        asked = Asked()
        for number in range(3):
            for rank in range(3):
                self.win(asked, number, rank=rank)
            self.lose(asked, number, rank=3)
        assert [(STORE_BYPASSED, 1.0)] == asked.told
        asked.now += 1.0
        asked.store.load_begun()
        for rank in range(3):
            self.win(asked, 9, rank=rank)
        assert not asked.ask()
        self.win(asked, 9, rank=3)
        assert asked.ask()

    def test_load_that_failed_is_not_counted_as_done_later(self):
        """R-14: a load may be told as failed first, and as through when its copy is: that
        is no second, good end."""
        asked = Asked()
        for number in range(3):
            asked.store.loads_ended(0, {number: Reason.DEADLINE}, ())
            if number < 2:
                asked.store.loads_ended(0, {}, [number])
        assert [(STORE_BYPASSED, 1.0)] == asked.told
        asked.now += 1.0
        asked.store.load_begun()
        asked.store.loads_ended(0, {}, [2])
        assert not asked.ask()

    @pytest.mark.parametrize("reason", ["overload", "device"])
    def test_try_that_says_nothing_lets_another_one_try(self, reason):
        """R-14: a try that ends for a reason of the engine's holds nobody up."""
        asked = Asked()
        self.lose(asked, 1, 2, 3)
        asked.now += 1.0
        asked.store.load_begun()
        self.lose(asked, 4, reason=reason)
        assert asked.ask()
        asked.store.load_begun()
        assert not asked.ask()

    def test_try_whose_end_is_never_told_lets_another_one_try_in_the_end(self):
        """R-14: a request that is gone holds the others up for half a minute at most."""
        asked = Asked()
        self.lose(asked, 1, 2, 3)
        asked.now += 1.0
        asked.store.load_begun()
        asked.now += 29.9
        assert not asked.ask()
        asked.now += 0.2
        assert asked.ask()

    def test_few_failures_among_many_loads_do_not_count(self):
        """A store that mostly gives is used: two late loads in eight are none."""
        asked = Asked()
        for first in range(0, 100, 10):
            self.lose(asked, first, first + 1)
            self.win(asked, *range(first + 2, first + 8))
        assert [] == asked.told
