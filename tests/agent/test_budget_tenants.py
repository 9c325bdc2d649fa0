# SPDX-License-Identifier: Apache-2.0
"""The budget of fetches is shared by tenants, and who wants much has its turn as well."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
import attrs
import pytest
from anyio.abc import TaskGroup

from tests.agent.unruly import run_virtual
from ucm.agent.budget import Budget, Place


@attrs.define(eq=False)
class Told:
    """An event that writes down when it is set, which is before anybody wakes."""

    write: Callable[[], None]
    event: anyio.Event = attrs.Factory(anyio.Event)

    def set(self) -> None:
        """Write it down, and wake who waits."""
        self.write()
        self.event.set()

    def is_set(self) -> bool:
        """Return whether it was."""
        return self.event.is_set()

    async def wait(self) -> None:
        """Wait until it is."""
        await self.event.wait()


@attrs.define(eq=False)
class Asker:
    """Who asks a budget for slots, and writes down in which order they came."""

    budget: Budget
    tasks: TaskGroup
    came: list[Place] = attrs.Factory(list)
    scopes: dict[Place, anyio.CancelScope] = attrs.Factory(dict)

    async def ask(self, count: int, tenant: int, priority: int = 0) -> Place:
        """Stand in the queue, or have slots; return where."""
        place = Place(priority, tenant)
        place.came = Told(lambda: self.came.append(place))
        self.tasks.start_soon(self._ask, count, place)
        await anyio.sleep(1.0)
        return place

    async def _ask(self, count: int, place: Place) -> None:
        with anyio.CancelScope() as self.scopes[place]:
            await self.budget.acquire(count, place)

    async def give_up(self, place: Place) -> None:
        """Want nothing any more."""
        self.scopes[place].cancel()
        await anyio.sleep(1.0)

    def tenants(self) -> list[int]:
        """Return whose turns there were."""
        return [place.tenant for place in self.came]


def asked(total: int, talk: Callable[[Asker], Awaitable[None]]) -> Asker:
    """Let *talk* ask a budget; return who has asked, once all is over."""

    async def run() -> Asker:
        async with anyio.create_task_group() as tasks:
            asker = Asker(Budget(total), tasks)
            await talk(asker)
            tasks.cancel_scope.cancel()
        return asker

    return run_virtual(run)


def test_tenant_that_has_least_comes_before_who_came_first() -> None:
    """R-53: slots that a tenant with many wants gives back go to one that has fewer, as long as that
    has fewer, and to who came first where both have as many."""

    async def talk(asker) -> None:
        for _ in range(8):
            await asker.ask(1, tenant=1)
        for _ in range(4):
            await asker.ask(1, tenant=2)
        for _ in range(4):
            asker.budget.release(1, 1)
        assert {1: 2, 2: 2} == asker.budget.held

    assert [1] * 4 + [2, 2, 1, 1] == asked(4, talk).tenants()


def test_tenants_have_their_turns_where_nobody_has_anything() -> None:
    """R-53: where one is served at a time, as by a tier, who has sent a hundred is not served a
    hundred times before the next one."""

    async def talk(asker) -> None:
        for tenant in (1, 1, 1, 1, 2, 2, 3):
            await asker.ask(4, tenant)
        for _ in range(6):
            asker.budget.release(4, asker.came[-1].tenant)

    assert [1, 1, 2, 3, 1, 2, 1] == asked(4, talk).tenants()


def test_tenant_alone_has_everything() -> None:
    """R-53: nothing is set aside for tenants that want nothing."""

    async def talk(asker) -> None:
        for _ in range(5):
            await asker.ask(1, tenant=7)
        assert (0, 1, {7: 4}) == (
            *(asker.budget.left, asker.budget.num_waiting),
            asker.budget.held,
        )

    asked(4, talk)


def test_priority_comes_before_tenants() -> None:
    """R-58: whom the engine runs first has its blocks first, whatever its tenant has."""

    async def talk(asker) -> None:
        for _ in range(4):
            await asker.ask(1, tenant=1)
        await asker.ask(1, tenant=2, priority=5)
        await asker.ask(1, tenant=1)
        asker.budget.release(1, 1)

    assert [1] * 5 == asked(4, talk).tenants()


def test_who_is_moved_on_stands_where_it_came() -> None:
    """R-53, R-58: whose blocks somebody wants sooner comes before those of its tenant's that came later,
    and leaves nothing behind where it stood."""

    async def talk(asker) -> None:
        await asker.ask(4, tenant=1)
        first = await asker.ask(4, tenant=1, priority=5)
        second = await asker.ask(4, tenant=1)
        asker.budget.move_on(first, 0)
        assert 2 == asker.budget.num_waiting
        for _ in range(2):
            asker.budget.release(4, 1)
        assert [first, second] == asker.came[1:]
        asker.budget.release(4, 1)
        assert ({}, {}, 4) == (
            *(asker.budget.held, asker.budget._rows),
            asker.budget.left,
        )

    asked(4, talk)


def test_who_has_its_slots_is_moved_on_no_more() -> None:
    """R-53: who joins flights as their slots come does not have them come twice."""

    async def talk(asker) -> None:
        place = await asker.ask(4, tenant=1, priority=5)
        asker.budget.move_on(place, 0)
        assert (0, 0) == (asker.budget.num_waiting, asker.budget.left)

    asked(4, talk)


def test_large_want_is_not_passed_over_for_ever() -> None:
    """R-53: of a tenant that has something, and wants much more, others are served before until as many slots
    were granted to them as there are; then it is waited for, however little they ask for."""

    async def talk(asker) -> None:
        budget = asker.budget
        await asker.ask(2, tenant=1)
        await asker.ask(3, tenant=3)
        large = await asker.ask(6, tenant=1)
        num_before = len(asker.came)
        for _ in range(100):
            small = await asker.ask(1, tenant=2)
            if not small.came.is_set():
                break
            budget.release(1, 2)
        assert 8 == len(asker.came) - num_before
        budget.release(3, 3)
        assert (large, 0) == (asker.came[-1], budget.left)

    asked(8, talk)


@pytest.mark.parametrize("how", ["passed on", "taken"])
def test_who_comes_next_by_what_another_was_given_is_served(how) -> None:
    """R-53: slots that are left are not kept for one who has more by now than another that they are enough
    for: that one waited until somebody gave some back."""

    async def talk(asker) -> None:
        budget = asker.budget
        for tenant, count in ((1, 3), (2, 4)):
            await asker.ask(count, tenant)
        await asker.ask(4, tenant=1)
        small = await asker.ask(1, tenant=2)
        assert not small.came.is_set()
        if how == "passed on":
            budget.pass_on(3, tenant=2, to=1)
        else:
            assert budget.take(2, tenant=1)
        assert small.came.is_set()
        assert budget.total - budget.left == budget.held.total()

    asked(10, talk)


def test_nothing_is_kept_of_who_has_nothing() -> None:
    """R-53: of tenants that were served, or gave up, as their turn came or before, nothing is left."""

    async def talk(asker) -> None:
        budget = asker.budget
        for tenant in range(50):
            with anyio.move_on_after(0.5):
                await budget.acquire(1, Place(tenant % 3, tenant))
        assert (4, 4) == (len(budget.held), sum(budget.held.values()))
        assert ({}, 0) == (budget._rows, budget.num_waiting)
        for tenant in list(budget.held):
            budget.release(1, tenant)
        assert ({}, 4) == (budget.held, budget.left)

    asked(4, talk)


@attrs.define
class Turn:
    """A tenant's next turn."""

    before: set[int]
    """Who waited before it, and had no turn since."""
    passed: int = 0
    """Slots that were granted to others since."""


class Model:
    """What must hold of each turn, whichever way the next one is found; of one priority."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: Counter[int] = Counter()
        self.waiting: dict[Place, int] = {}
        self.num_due = 0
        self._turns: dict[int, Turn] = {}

    def stands(self, place: Place, count: int) -> None:
        """Have one wait."""
        self.waiting[place] = count
        if place.tenant not in self._turns:
            self._turns[place.tenant] = Turn(set(self._turns))

    def leaves(self, place: Place) -> None:
        """Have one wait no more."""
        del self.waiting[place]
        if all(each.tenant != place.tenant for each in self.waiting):
            del self._turns[place.tenant]
            self._let_others_go_on(place.tenant, 0)

    def came(self, place: Place) -> None:
        """See that it was the turn of who had it."""
        tenant, count = place.tenant, self.waiting[place]
        first = next(each for each in self.waiting if each.tenant == tenant)
        assert place is first
        due = {of: turn for of, turn in self._turns.items() if self._is_due(turn)}
        for of, turn in due.items():
            assert of == tenant or tenant in turn.before
            self.num_due += of != tenant
        if not due:
            least = min(self.held[each.tenant] for each in self.waiting)
            assert least == self.held[tenant]
        del self._turns[tenant]
        self._let_others_go_on(tenant, count)
        self._turns[tenant] = Turn(set(self._turns))
        self.leaves(place)
        self.held[tenant] += count

    def _is_due(self, turn: Turn) -> bool:
        return turn.passed >= self.total

    def _let_others_go_on(self, tenant: int, count: int) -> None:
        for turn in self._turns.values():
            turn.before.discard(tenant)
            turn.passed += count


def test_each_turn_is_whose_it_is() -> None:
    """R-53: whoever asks, gives up and gives back, who has least comes; who was passed over by as much as there
    is waits for those only that waited before it, for each of them once, and of those too much is left."""
    models = [asked_at_random(seed) for seed in range(12)]
    assert sum(model.num_due for model in models) >= 10


def asked_at_random(seed: int) -> Model:
    """Have tenants ask for slots, give up and give back; return what saw each turn."""
    dice, model = random.Random(seed), Model(12)

    async def talk(asker: Asker) -> None:
        budget = asker.budget
        counts: dict[Place, int] = {}
        num_seen = 0
        for _ in range(300):
            places = list(counts)
            if dice.random() < 0.55 or not places:
                tenant = dice.choice([1, 1, 1, 2, 2, 3, 4, 5])
                count = dice.randint(1, 12 if tenant == 2 else 3)
                place = await asker.ask(count, tenant)
                model.stands(place, count)
                counts[place] = count
            elif (place := dice.choice(places)).came.is_set():
                count = counts.pop(place)
                model.held[place.tenant] -= count
                budget.release(count, place.tenant)
            elif dice.random() < 0.3:
                del counts[place]
                model.leaves(place)
                await asker.give_up(place)
            for place in asker.came[num_seen:]:
                model.came(place)
            num_seen = len(asker.came)
            assert +model.held == budget.held
            assert model.total == budget.left + budget.held.total()
            assert len(model.waiting) == budget.num_waiting

    asked(12, talk)
    return model
