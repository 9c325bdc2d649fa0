# SPDX-License-Identifier: Apache-2.0
"""Blocks that another connector did not bring: what becomes of those who share them."""

from collections.abc import Sequence

import msgspec
import pytest

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
    saved_blocks,
)
from tests.scheduler.test_foreign import NOBODY, TABLE, adapter, going_on, run, served
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.requests import RequestEnd, ScheduledRequest, StepFacts, Wishes

__all__ = ["adapter"]

OTHER = (1, 2, 13, 14, 15, 16)
THIRD = (*OTHER[:4], 21, 22)
HASH = [*HASHES[:2], *HASHES[20:24]]


def other(
    name: str,
    computed: int,
    tokens: int,
    table: Sequence[int] = OTHER,
    *,
    own: int | None = None,
    is_new: bool = True,
) -> ScheduledRequest:
    """Return the facts of a request that shares its first two blocks, and goes on otherwise."""
    own = computed if own is None else own
    request = served(name, computed, tokens, own=own, table=table, is_new=is_new)
    return msgspec.structs.replace(request, hashes=HASH[: len(request.tables[0])])


def left() -> RequestEnd:
    """Return what there is of one that ends behind five blocks."""
    tables = [list(OTHER[:5])]
    return RequestEnd(
        computed_tokens=20,
        known_tokens=21,
        prompt_tokens=20,
        hashes=HASH[:5],
        tables=tables,
    )


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_was_computed_on_bad_blocks_is_bad_for_a_third(
    adapter: SchedulerAdapter, goes_on: bool
) -> None:
    """Who shares what another one had computed on top of them saves none of it, though what did not
    come is computed anew by then."""
    assert NOBODY == run(adapter, served("r"), other("s", 8, 8))
    adapter.foreign.lost({1, 2})
    if (
        goes_on
    ):  # less what the step computed whose output it was, with another one under way
        assert NOBODY == run(adapter, other("s", 9, 8, is_new=False))
    else:
        adapter.request_finished("s")
    run(adapter, going_on(0, 16))
    assert NOBODY == run(adapter, other("t", 16, 8, THIRD))


@pytest.mark.parametrize("first", [8, 3])
def test_what_is_computed_on_blocks_that_are_bad_already_is_bad_for_a_third(
    adapter: SchedulerAdapter, first: int
) -> None:
    """Likewise of who comes while it is known already that they did not, in however many steps."""
    run(adapter, served("r"))
    adapter.foreign.lost({1, 2})
    assert NOBODY == run(adapter, other("s", 8, first))
    if first < 8:
        assert NOBODY == run(adapter, other("s", 11, 5, is_new=False))
    run(adapter, going_on(0, 16))
    assert NOBODY == run(adapter, other("t", 16, 8, THIRD))


@pytest.mark.parametrize("tokens", [7, 3])
def test_one_that_does_not_run_until_all_is_computed_anew_is_not_saved(
    adapter: SchedulerAdapter, tokens: int
) -> None:
    """It had computed on top, and has no part in the step that computes them anew: its own output
    was under way. That no bad block is left does not make its own good."""
    run(adapter, served("r"))
    assert NOBODY == run(adapter, other("s", 8, tokens))
    adapter.foreign.lost({1, 2})
    run(adapter, going_on(0, 16))
    again = other("s", 8 + tokens, 8 - tokens, is_new=False)
    assert NOBODY == run(adapter, again)


def test_sharer_that_goes_on_before_they_are_computed_anew_is_not_saved(
    adapter: SchedulerAdapter,
) -> None:
    """An engine takes it back to what it computed itself, and has no room for the other one."""
    assert NOBODY == run(adapter, served("r"), other("s", 8, 8))
    adapter.foreign.lost({1, 2})
    for _ in range(3):
        assert NOBODY == run(adapter, other("s", 8, 8, is_new=False))


def test_second_output_does_not_hide_what_the_first_one_said(
    adapter: SchedulerAdapter,
) -> None:
    """One stands on another's blocks and was served itself; neither came, as two outputs say. It goes
    back to its own, which are behind bad ones."""
    run(adapter, served("r"))
    assert NOBODY == run(adapter, other("s", 16, 4, own=8))
    adapter.foreign.lost({1})
    adapter.foreign.lost({13})
    again = run(adapter, going_on(0, 4), other("s", 8, 8, is_new=False))
    assert {0: [1]} == again


@pytest.mark.parametrize("own", [8, 16])
def test_one_that_ends_before_it_runs_again_is_not_saved(
    adapter: SchedulerAdapter, own: int
) -> None:
    """It ends with the next output, of what it computed on top of them; also where it was served
    itself, and that came."""
    run(adapter, served("r"))
    run(adapter, going_on(16), other("s", 16, 4, own=own))
    adapter.foreign.lost({1})
    adapter.request_finished("s", left())
    for _ in range(4):
        assert NOBODY == saved_blocks(adapter.plan_step(StepFacts()))


def test_output_of_one_that_ended_does_not_speak_for_whoever_has_its_blocks(
    adapter: SchedulerAdapter,
) -> None:
    """An engine takes blocks of a served request away while its step runs, and serves another one with
    them: what the first output says of these is not all that there is to be said."""
    run(adapter, served("r"))
    adapter.plan_step(facts(served("q"), preempted=["r"]))
    adapter.foreign.lost({2})  # r's output; the engine takes it for q's, too
    assert NOBODY == run(adapter, going_on(4, 4, "q"))
    adapter.foreign.lost({1})  # q's own
    assert {0: [1, 2]} == run(adapter, going_on(0, 8, "q"))


def test_nothing_is_kept_of_lives_that_ended(adapter: SchedulerAdapter) -> None:
    """However many end before they run again, nothing of them is left."""
    for number in range(50):
        run(adapter, served(f"r{number}"))
        adapter.foreign.lost({1})
        adapter.request_finished(f"r{number}")
        adapter.plan_step(StepFacts(allocated=TABLE, is_idle=False))
        adapter.deferral_ended([f"r{number}"])
    for _ in range(5):
        adapter.plan_step(StepFacts())
    assert adapter.is_idle
    assert not adapter.foreign.bad


@pytest.mark.parametrize(
    ("wishes", "shortest"),
    [(Wishes(), 0), (Wishes(most_saved=0), 0), (Wishes(), 64)],
    ids=["saved", "not wished", "too short"],
)
def test_blocks_computed_anew_are_good_again_whatever_is_saved_of_them(
    wishes: Wishes, shortest: int
) -> None:
    """Those who share them are saved again; nor does each step look at them any more."""
    adapter = make_adapter(ONE_FULL, SetIndex(), shortest=shortest)
    request = served(computed=16, tokens=4)
    run(adapter, msgspec.structs.replace(request, wishes=wishes))
    adapter.foreign.lost({1})
    for at in (0, 4, 8, 12, 16):
        request = msgspec.structs.replace(
            going_on(at, 4), wishes=wishes, tables=[TABLE[:5]], hashes=HASHES[:5]
        )
        if adapter.due.get("r", 0) <= request.end_tokens:
            run(adapter, request)
        else:
            adapter.plan_step(StepFacts(is_idle=False))
    assert not adapter.foreign.bad
