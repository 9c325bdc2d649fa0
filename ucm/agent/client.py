# SPDX-License-Identifier: Apache-2.0
"""
The end of the socket at who wants blocks: asks the node's agent, and never waits for it.

Threading: ``want``, ``forget``, ``is_pending`` and ``drop`` are called on any thread, of one request
on one at a time; each costs a few look-ups, and ``is_pending``, which an engine asks in every step for
every request that waits, one. All else, the socket too, is a loop's on a thread of its own. An agent
that is not there is "no" at once; one that does not answer in time is "no" until it says something.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from ucm.agent.dialing import Agents, dial, receive, why_lost
from ucm.agent.launch import Pauses
from ucm.agent.mirror import Follower
from ucm.agent.protocol import (
    MOST_KEYS,
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Done,
    Drop,
    Forget,
    FromAgent,
    GetStatus,
    Hello,
    Refused,
    Status,
    ToAgent,
    Told,
    Welcome,
    check_media,
    encode_frame,
)
from ucm.blocks import PackedKey
from ucm.errors import MessageError
from ucm.threads import SYSTEM, Thread, Threads
from ucm.tracing import AGENT_JOINED, AGENT_LOST, Log

__all__ = ["AgentClient", "Answer"]

_CONNECT_S: Final = 5.0
_CLOSE_S: Final = 2.0
_LEAST_S: Final = 0.1
"""Who has less is hardly answered in its time: that says nothing of the agent."""
_AHEAD: Final = 0.9
"""The agent answers within this share of the time, so that its answer is here in time."""
_NOBODY: Final = (ConnectionError, FileNotFoundError, EOFError)
"""What it looks like where no agent is."""
_MOST_WAITING: Final = 96 << 20
"""Bytes that the agent has not taken yet; more is no longer asked. As many keys as it forgets at a
time, a million, fit in."""


class AgentClient:
    """
    Asks the agent of one slab.

    Args:
        directory: The slab's.
        slot_bytes: Of the slots that this engine's blocks lie in.
        log: Told when the agent is there and when it is gone.
        launch: Starts an agent if there is none, and returns why the one before could
            not be used; called on our thread, best effort.
        tiers: That it is to have, as ``digest_of`` tells; whichever, if left out.
        is_coming: Says whether one that was started is on its way; called likewise.
        threads: Where clock and thread come from.
    """

    def __init__(
        self,
        directory: Path,
        slot_bytes: int,
        log: Log,
        launch: Callable[[], str] = lambda: "",
        tiers: str = "",
        is_coming: Callable[[], bool] = lambda: False,
        threads: Threads = SYSTEM,
    ) -> None:
        self._directory = directory
        self._hello = Hello(PROTOCOL_VERSION, slot_bytes, tiers)
        self._log = log
        self._launch = launch
        self._pauses = Pauses(is_coming)
        self._clock = threads.monotonic
        self._numbers = itertools.count(1)
        self._pending: dict[int, float] = {}
        """By number, until when an answer is of use."""
        self._open: dict[str, int] = {}
        """Numbers of wants that were not dropped."""
        self._answers: dict[int, Answer] = {}
        self._tellers: dict[int, Callable[[], None]] = {}
        """By number, who is to hear that no answer is to come any more."""
        self._silent_until = 0.0
        """If no word comes by then, the agent is taken for stopped; 0: none is due."""
        self._is_up = self._is_told_silent = False
        self._follower: Follower | None = None
        self.media: Sequence[str] = ()
        """Those of the tiers of the agent that was there last."""
        self.status: Mapping[str, object] = {}
        """How the agent said last that it is; see ``look``."""
        self.agents = Agents()
        self._refusal = ""
        """Why no agent serves us, as it was told last since one did."""
        self._is_closing = threads.event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waker = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._thread: Thread | None = threads.thread(self._run, "ucm-agent-client")
        try:
            self._thread.start()
        except RuntimeError as exc:  # the system has no more: there is no agent for us
            self._thread = None
            self._tell_refusal(f"who would talk to one did not start: {exc}")

    # On the engine's thread.

    @property
    def is_up(self) -> bool:
        """Whether the agent would be asked now."""
        is_late = 0 < self._silent_until < self._clock()
        return self._is_up and not is_late

    def want(
        self,
        request_id: str,
        keys: Sequence[PackedKey],
        sizes: Sequence[int],
        *,
        seconds: float,
        hold_s: float,
        compute_s: float = 0.0,
        only: Sequence[tuple[str, str]] | None = None,
        priority: int = 0,
        tenant: int = 0,
        hits: tuple[list[int], list[int]] | None = None,
        tell: Callable[[], None] | None = None,
    ) -> bool:
        """
        Ask for a request's blocks, once; False: there is no agent, and nothing is pending.

        Args:
            request_id: Whose; pending from now on.
            keys: In the order in which they are of use; as many as a message takes.
            sizes: The bytes of each.
            seconds: After which the answer is of no use.
            hold_s: For how long what was found has to stay then.
            compute_s: How long computing them all would take; 0: not known.
            only: Of which tiers; see ``Ask``.
            priority: The lowest is served first.
            tenant: Whose share of the slab they take; 0: nobody's.
            hits: Which of several hits need each; see ``Ask``. Then there are no more keys.
            tell: Called once on our thread, behind the answer or the loss of the agent, but
                not at the deadline, nor of a want that was dropped; brief, raises nothing.
        """
        if not self.is_up:
            return False
        ask = Ask(
            self._begin(request_id, seconds, tell),
            list(keys[:MOST_KEYS]),
            list(sizes[:MOST_KEYS]),
            deadline_s=_AHEAD * seconds,
            hold_s=hold_s + (1 - _AHEAD) * seconds,
            compute_s=compute_s,
            only=None if only is None else list(only),
            priority=priority,
            tenant=tenant,
            hits=hits,
        )
        self.call(lambda: self._ask(ask))
        return True

    def forget(
        self,
        keys: Sequence[PackedKey],
        name: str = "",
        *,
        seconds: float = 0.0,
        tell: Callable[[], None] | None = None,
    ) -> bool:
        """
        Have tiers part with what the slab has parted with; False: there is no agent.

        Args:
            keys: Of the blocks; with a name as many as a message takes.
            name: As a request's, of who waits for the answer; left out: nobody does.
            seconds: After which the answer is of no use; what was begun goes on.
            tell: See ``want``.
        """
        if not self.is_up:
            return False
        number = self._begin(name, seconds, tell) if name else 0
        for at in range(0, len(keys), MOST_KEYS):
            some: list[bytes] = list(keys[at : at + MOST_KEYS])
            self.call(partial(self._ask, Forget(number, some, _AHEAD * seconds)))
        return True

    def _begin(self, name: str, seconds: float, tell: Callable[[], None] | None) -> int:
        """Take a question down, in place of the one of that name; return its number."""
        self.drop(name)
        number, now = next(self._numbers), self._clock()
        self._open[name] = number
        self._pending[number] = now + seconds
        if tell is not None:
            self._tellers[number] = tell
        due = now + max(seconds, _LEAST_S)  # before the word on a question of more time
        self._silent_until = min(self._silent_until or due, due)
        return number

    def is_pending(self, request_id: str) -> bool:
        """Return whether an answer is still to come, and in time."""
        until = self._pending.get(self._open.get(request_id, 0))
        return until is not None and self._clock() < until

    def answer(self, request_id: str) -> Answer | None:
        """Return what was said of a request's want; None: nothing, or not yet."""
        return self._answers.get(self._open.get(request_id, 0))

    def drop(self, request_id: str) -> None:
        """Let the agent know that a request needs its blocks, or an answer, no more."""
        if (number := self._open.pop(request_id, None)) is not None:
            self._pending.pop(number, None)
            self._answers.pop(number, None)
            self._tellers.pop(number, None)
            self.call(lambda: self.send(Drop(number)))

    def follow(self, follower: Follower) -> None:
        """Have somebody told whenever an agent is there, and what its ledger says."""
        self._follower = follower
        self.call(lambda: follower.joined(self.media) if self._is_up else None)

    def look(self) -> None:
        """Have the agent say how it is, for ``status``; log it if it does not answer."""
        self.call(self._look)

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "wants": len(self._open),
            "answers": len(self._answers),
            "tellers": len(self._tellers),
        }

    def close(self) -> None:
        """Leave the agent. Idempotent."""
        self._is_closing.set()
        self.call(self._leave)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def call(self, function: Callable[[], None]) -> None:
        """Have *function*, which must not raise, called on the client's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(function)

    # On our thread.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._is_closing.is_set():
            began = self._clock()
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader = await self._connect()
                if self._is_closing.is_set():  # before there was anything to hang up
                    raise ConnectionAbortedError("this engine leaves")
                await self._listen(reader)
            except _NOBODY as exc:
                self._lost(exc)
                if not self._is_closing.is_set():
                    self._tell_refusal(self._launch())
            except (OSError, MessageError) as exc:  # it is there, and does not serve us
                self._lost(exc)
            pause = self._pauses.next(self._clock() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._waker.wait()

    async def _connect(self) -> asyncio.StreamReader:
        reader, self._writer = await dial(self._directory)
        self._writer.write(encode_frame(self._hello))
        answer = await receive(reader)
        if isinstance(answer, Refused):
            raise MessageError(answer.problem)
        if not isinstance(answer, Welcome) or answer.version != PROTOCOL_VERSION:
            raise MessageError("the agent's first message is no welcome")
        self._silent_until = 0.0  # a want may have come while the last one was lost
        self._is_up, self._refusal = True, ""
        self.media = tuple(answer.media)
        self.agents.met(answer)
        self._log.info(AGENT_JOINED, media=answer.media)
        if self._follower is not None:
            self._follower.joined(self.media)
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = await receive(reader)
            check_media(message, len(self.media))
            self._silent_until = self._next_word(message)
            if self._is_told_silent:
                self._is_told_silent = False
                self._log.info(AGENT_JOINED, media=self.media)
            # Of a want that was dropped or is over, nobody asks any more.
            if isinstance(message, Done) and message.number in self._pending:
                answer = Answer(*msgspec.structs.astuple(message)[1:])
                self._answers[message.number] = answer
                if self._pending.pop(message.number, None) is None:  # dropped just now
                    self._answers.pop(message.number, None)
                elif (tell := self._tellers.pop(message.number, None)) is not None:
                    tell()
            elif isinstance(message, Told) and self._follower is not None:
                self._follower.told(message)
            elif isinstance(message, Status):
                self.status = message.told

    def _next_word(self, message: FromAgent) -> float:
        """Return by when the agent has to say something behind this; 0: nothing is due."""
        number = message.number if isinstance(message, Done) else 0
        now, due = self._clock(), self._pending.copy().items()
        first = min((at for one, at in due if at > now and one != number), default=0.0)
        return first and max(first, now + _LEAST_S)

    def _tell_refusal(self, problem: str) -> None:
        """Tell why no agent serves us, once; it is asked and started again and again."""
        if problem and problem != self._refusal:
            self._refusal = problem
            self._log.warning(AGENT_LOST, error=problem)

    def _look(self) -> None:
        if self.is_up:
            self.send(GetStatus())
        elif self._is_up and not self._is_told_silent:
            self._is_told_silent = True
            self._log.warning(AGENT_LOST, error="it does not answer in time")

    def send(self, message: ToAgent) -> None:
        """Send if an agent is there; on the client's thread."""
        if self._writer is None or self._writer.is_closing() or not self._is_up:
            return
        if self._untaken > _MOST_WAITING:
            self._hang_up()
            return
        self._writer.write(encode_frame(message))

    @property
    def _untaken(self) -> int:
        """Bytes that the agent has not taken yet."""
        writer = self._writer
        return 0 if writer is None else writer.transport.get_write_buffer_size()

    def _ask(self, ask: Ask | Forget) -> None:
        """Send a question; one that came just as its agent was lost, or is full, has its end."""
        is_full = isinstance(ask, Forget) and self._untaken > _MOST_WAITING
        if self._is_up and not is_full:
            self.send(ask)
            return
        self._pending.pop(ask.number, None)
        if (tell := self._tellers.pop(ask.number, None)) is not None:
            tell()

    def _leave(self) -> None:
        self._waker.set()  # for good: from now on nobody pauses
        self._hang_up()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _lost(self, problem: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        was_up, self._is_up = self._is_up, False
        self._silent_until, self._is_told_silent = 0.0, False
        for each in (self._pending, self._open, self._answers):
            each.clear()
        # One by one: of wants that come meanwhile ``_ask`` tells, and some are just dropped.
        for number in list(self._tellers):
            if (tell := self._tellers.pop(number, None)) is not None:
                tell()
        if self._is_closing.is_set():
            return
        if was_up:
            self._log.warning(AGENT_LOST, error=why_lost(problem))
        elif not isinstance(problem, _NOBODY):
            self._tell_refusal(why_lost(problem))
