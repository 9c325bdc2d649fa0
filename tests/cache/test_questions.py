# SPDX-License-Identifier: Apache-2.0
"""Questions to a store that does not answer."""

import threading

import pytest

from ucm.cache import questions
from ucm.cache.questions import Questions
from ucm.errors import PipelineClosedError, StoreUnavailableError
from ucm.testing.faults import Gate
from ucm.threads import SYSTEM


def test_questions_that_wait_are_bounded(monkeypatch):
    """What a hanging store is asked beyond the bound has no answer, at once, and asks nobody."""
    monkeypatch.setattr(questions, "_MOST", 3)
    asking, gate = Questions(threading.Lock(), SYSTEM), Gate()
    asking.start()
    first = asking.ask(gate)
    gate.wait_reached()
    waiting = [asking.ask(lambda: 7) for _ in range(2)]
    late = asking.ask(lambda: 7)
    assert [True, False] == [late.is_done, any(one.is_done for one in waiting)]
    with pytest.raises(StoreUnavailableError, match="3 questions wait"):
        late.result()
    gate.open()
    assert asking.close(60.0)
    assert first.is_done
    assert [7, 7] == [one.result() for one in waiting]


def test_question_that_comes_behind_the_end_has_an_answer():
    """Who asks while another thread closes is told so, and does not wait in vain."""
    asking = Questions(threading.Lock(), SYSTEM)
    asking.start()
    assert asking.close(60.0)
    late = asking.ask(lambda: 7)
    with pytest.raises(PipelineClosedError, match="closed meanwhile"):
        late.result()
    assert late.is_done


def test_question_to_a_store_that_hangs_has_an_answer_behind_the_close():
    """Who asks just behind a close that waited for a store in vain does not wait for it, too."""
    asking, gate = Questions(threading.Lock(), SYSTEM), Gate()
    asking.start()
    first = asking.ask(gate)
    gate.wait_reached()
    assert not asking.close(0.0)
    late = asking.ask(lambda: 7)
    assert first.is_done
    assert late.is_done
    with pytest.raises(PipelineClosedError, match="closed meanwhile"):
        late.result()
    gate.open()
    assert asking.close(60.0)
