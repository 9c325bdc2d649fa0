# SPDX-License-Identifier: Apache-2.0
"""A store of somebody else's that raises what it likes, in an engine's scheduler."""

from collections.abc import Callable
from typing import NoReturn

import pytest

from tests.integration.vllm.test_doubts import HIT, NOTHING, WeighedEngine, engine
from tests.integration.vllm.test_halves import request
from tests.stores.test_foreign_answers import PanicError

__all__ = ["engine"]


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return what raises it, whatever it is called with."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("boo"), PanicError("boo")])
class TestRaises:
    def test_engine_that_is_not_told_how_full_it_is_looks_again(
        self, engine: WeighedEngine, error: BaseException
    ) -> None:
        """The thread that keeps gauges fresh goes on, and says that something is wrong."""
        half, store = engine.scheduler, engine.scheduler.store.inner
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "stats", raising(error))
            half.refresh()
            assert 0 == half.counters.snapshot().gauges["ucm_healthy"]
        half.refresh()
        assert 1 == half.counters.snapshot().gauges["ucm_healthy"]

    @pytest.mark.parametrize("verb", ["describe", "keyspaces"])
    def test_reset_goes_on_without_descriptions(
        self, engine: WeighedEngine, error: BaseException, verb: str
    ) -> None:
        """They are for people; the step in which ranks agreed on the weights ended the engine."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.scheduler.store.inner, verb, raising(error))
            engine.empty()
            assert (None, False) == engine.look_up()
            engine.ask()
        assert HIT == engine.look_up()

    def test_thread_that_deletes_goes_on(
        self, engine: WeighedEngine, error: BaseException
    ) -> None:
        """It ended, and what later requests wanted deleted stayed, and waited for good."""
        half, forgetter = engine.scheduler, engine.scheduler._forgetter
        keys = half._adapter.matcher.keys_of_prefix(request("q").block_hashes, 48)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(half.store.inner, "forget", raising(error))
            assert forgetter.put(keys)
            assert forgetter.close()
        assert HIT == engine.look_up()
        assert forgetter.put(keys)
        assert forgetter.close()
        assert NOTHING == engine.look_up()
        assert 0 == forgetter._num_waiting
