# SPDX-License-Identifier: Apache-2.0
"""A backend with bugs, behind deadlines that tell of them."""

import asyncio

import anyio
import pytest

from tests.clocks import leaping
from ucm.backends.abc import Presence
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import DeadlineBackend
from ucm.testing.store_blocks import make_keys


class Buggy(MemoryBackend):
    """Raises something the first two times that somebody attends to it."""

    num_attended = 0

    async def attend(self):
        """Fail, or be done."""
        self.num_attended += 1
        if self.num_attended < 3:
            raise KeyError(self.num_attended)


@leaping
async def test_backend_whose_attending_raises_is_attended_to_again():
    """What was away then was looked for no more, for as long as the agent lived."""
    inner, told = Buggy(Shelf(1)), []
    await DeadlineBackend(inner, 2.0, lambda *bug: told.append(bug)).attend()
    assert [("KeyError", "KeyError(1)"), ("KeyError", "KeyError(2)")] == told
    assert 4.0 == pytest.approx(asyncio.get_running_loop().time())
    with pytest.raises(KeyError):  # nobody is told of it
        await DeadlineBackend(Buggy(Shelf(1)), 2.0).attend()


class SpeechlessError(Exception):
    """Cannot say what it is."""

    def __repr__(self):
        """Fail as well."""
        raise KeyError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SpeechlessError(), "SpeechlessError"),
        (OSError("at redis://me:word@there"), "OSError('at redis://***@there')"),
    ],
)
@leaping
async def test_what_a_call_raised_is_told_without_secrets(error, told):
    """A word that is in the log is everybody's; an error without one ended the agent."""

    class Wrong(MemoryBackend):
        async def exists(self, keys):
            raise error

    bugs = []
    backend = DeadlineBackend(Wrong(Shelf(1)), 2.0, lambda *bug: bugs.append(bug))
    assert [Presence.UNKNOWN] == await backend.exists(make_keys(1))
    assert told == backend.trouble
    assert [(type(error).__name__, told)] == bugs


@leaping
async def test_call_that_is_late_behind_a_bug_is_no_bug():
    """A server that hangs was told to have what a call before it had raised."""
    inner, told = MemoryBackend(Shelf(1)), []
    backend = DeadlineBackend(inner, 2.0, lambda _, text: told.append(text))
    inner.delete = lambda keys: None  # which nobody can await
    await backend.delete(make_keys(1))
    assert told == [backend.trouble]
    inner.delete = lambda keys: anyio.sleep_forever()
    await backend.delete(make_keys(1))
    assert ("", 1) == (backend.trouble, backend.num_late)
