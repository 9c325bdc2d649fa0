# SPDX-License-Identifier: Apache-2.0
"""Who of those that run is to be looked at, and what it costs that nobody is."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ucm.integration.vllm.running import Running
from ucm.layout import GroupKind
from ucm.scheduler.due import Due, patience_of


def make_running(patience: int = 0) -> tuple[Running, Due]:
    """Return the loop, and when it finds requests due."""
    due = Due()
    due.patience = patience
    adapter, layout = SimpleNamespace(due=due), SimpleNamespace(groups=())
    adapters, reader = SimpleNamespace(), SimpleNamespace()
    return Running(adapters, adapter, reader, layout), due  # type: ignore[arg-type]


def make_output(
    cached: dict[str, tuple[int, int]], new: dict[str, int] | None = None
) -> SimpleNamespace:
    """Return a step of requests by their computed and scheduled tokens."""
    new = new or {}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
        ),
        num_scheduled_tokens=new | {name: told[1] for name, told in cached.items()},
    )


class Untold(list[str]):
    """Names that nobody may read, only count."""

    def __iter__(self) -> Iterator[str]:
        """Refuse."""
        raise AssertionError("somebody goes through all that run")


class TestQuiet:
    def test_steps_in_which_nobody_can_be_due_pass_by_all_that_run(self):
        """R-18: not even the names of a thousand requests are read until so many steps
        have gone that one of them might be due, long prompts beside them or not."""
        running, due = make_running()
        names = [f"r{at}" for at in range(1000)]
        for name in names:
            due.put([(name, 50, 10)])
        assert [] == running._due_ones(make_output(dict.fromkeys(names, (10, 1))), ())
        for computed in range(11, 49):
            output = make_output(dict.fromkeys(names, (computed, 1)), {"long": 4096})
            output.scheduled_cached_reqs.req_ids = Untold(names)
            assert () == running._due_ones(output, ())
        told = running._due_ones(make_output(dict.fromkeys(names, (49, 1))), ())
        assert [(name, 49) for name in names] == list(told)

    def test_who_offers_something_is_looked_at_in_any_step(self):
        """Whatever the others do; and a quiet time goes on behind it."""
        running, due = make_running()
        for name in ("a", "b"):
            due.put([(name, 100, 0)])
        running._due_ones(make_output({"a": (0, 1), "b": (0, 1)}), ())
        step = make_output({"a": (1, 1), "b": (1, 1)})
        assert [("b", 1)] == running._due_ones(step, {"b"})
        assert () == running._due_ones(make_output({"a": (2, 1), "b": (2, 1)}), ())

    @pytest.mark.parametrize("patience", [0, 4])
    @pytest.mark.parametrize("forget", ["at_once", "clear"])
    def test_request_that_is_forgotten_is_due_in_the_next_step(self, forget, patience):
        """Its load has failed, or all are to be looked at again."""
        running, due = make_running(patience)
        due.put([("a", 100, 0)])
        due.put([("b", 100, 0)])
        running._due_ones(make_output({"a": (0, 1), "b": (0, 1)}), ())
        due.at_once("a") if forget == "at_once" else due.clear()
        told = running._due_ones(make_output({"a": (8, 1), "b": (8, 1)}), ())
        assert [("a", 8), ("b", 8)][: 1 + (forget == "clear")] == list(told)


class TestTogether:
    def test_who_is_due_waits_a_few_tokens_for_others(self):
        """R-18: one look at four requests, where each block would have had its own."""
        running, due = make_running(patience=4)
        names = {name: 40 + at for at, name in enumerate("abcd")} | {"e": 60}
        for name, tokens in names.items():
            due.put([(name, tokens, 10)])
        looks = {}
        for computed in range(10, 50):
            output = make_output(dict.fromkeys(names, (computed, 1)))
            for name, at in running._due_ones(output, ()):
                looks.setdefault(at + 1, []).append(name)
                due.put([(name, 80, at + 1)])
        assert {44: [*"abcd"]} == looks

    @pytest.mark.parametrize(
        ("waits", "kinds", "tokens"),
        [
            (True, [GroupKind.FULL] * 2, 4),
            (False, [GroupKind.FULL] * 2, 0),
            (True, [GroupKind.FULL, GroupKind.WINDOW], 0),
            (True, [GroupKind.STATE], 0),
        ],
    )
    def test_it_waits_only_where_saves_do_and_blocks_stay(self, waits, kinds, tokens):
        """A window gives its blocks back, and a state is gone after its step."""
        layout = SimpleNamespace(groups=[SimpleNamespace(kind=each) for each in kinds])
        assert tokens == patience_of(layout, waits=waits)


class TestAnySteps:
    @pytest.mark.parametrize("patience", [0, 4])
    def test_all_that_are_due_are_looked_at_and_nobody_else(self, patience):
        """Whoever runs, waits, ends, loses guesses or is forgotten, in any order; as soon
        as one of them may wait no longer."""
        assert all(num_quiet_steps(seed, patience) for seed in range(16))


def num_quiet_steps(seed: int, patience: int) -> int:
    """Return in how many steps of a random engine nobody had to be gone through."""
    drawn, (running, due) = random.Random(seed), make_running(patience)
    computed: dict[str, int] = {}
    ids = (f"r{at}" for at in itertools.count())
    num_quiet = 0
    for _ in range(150):
        new = {next(ids): drawn.randrange(1, 60) for _ in range(drawn.randrange(2))}
        most = drawn.choice([1, 1, 1, 4])
        cached = {
            name: (at, drawn.randint(1, most))
            for name, at in computed.items()
            if drawn.random() < 0.97
        }
        told = running._due_ones(make_output(cached, new), ())
        num_quiet += told == ()
        wanted = [
            (name, at)
            for name, (at, count) in cached.items()
            if at + count >= due.get(name, 0)
        ]
        is_late = any(
            at + count >= due.get(name, 0) + patience
            for name, (at, count) in cached.items()
        )
        assert (wanted if is_late else []) == list(told)
        for name, (at, count) in cached.items():
            computed[name] = at + count
        computed |= new
        for name in (*new, *(name for name, _ in told)):
            due.put([(name, computed[name] + drawn.randrange(1, 90), computed[name])])
        for name in list(computed):
            chance = drawn.random()
            if chance < 0.005:
                due.at_once(name)
            elif chance < 0.01:
                del computed[name]
                due.pop(name, None)
            elif chance < 0.1:
                computed[name] -= min(2, computed[name])  # guesses were rejected
    return num_quiet
