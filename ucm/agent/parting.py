# SPDX-License-Identifier: Apache-2.0
"""
Having an agent's tiers part with blocks, for who is no engine: a command, which waits for it.

What the slab has parted with is asked for behind that, as an engine does, so that nothing of it
is spilled again. Each question has its deadline; an agent that does not answer one is asked no more.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import attrs

from ucm.agent.dialing import dial, receive
from ucm.agent.protocol import (
    FORGETS,
    LOCK_NAME,
    LONGEST_S,
    MOST_KEYS,
    PROTOCOL_VERSION,
    Done,
    Forget,
    FromAgent,
    Hello,
    Refused,
    Welcome,
    check_media,
    encode_frame,
)
from ucm.blocks import PackedKey
from ucm.errors import MessageError

__all__ = ["Parting"]

_ANSWER_S: Final = 5.0
"""More than the agent's answer may take beyond what it is asked for."""


@attrs.define
class Parting:
    """
    What becomes of blocks in the tiers of a slab's agent.

    Args:
        path: The slab's directory.
    """

    path: Path
    forgotten: int = 0
    """Blocks that some tier had, and has no more."""
    unasked: int = 0
    """Blocks of which no agent has said anything: tiers may have them."""
    kept: set[str] = attrs.Factory(set)
    """Tiers that may have some of the others yet."""
    problem: str = ""
    """Why no agent was asked, or said nothing."""

    @property
    def had_agent(self) -> bool:
        """Whether this slab ever had one: else nothing of it is in a tier."""
        return (self.path / LOCK_NAME).exists()

    def forget(self, keys: Sequence[PackedKey], slot_bytes: int) -> None:
        """Have tiers part with blocks that lie in slots of one size; waits a minute at most for each 65 536."""
        for at in range(0, len(keys), MOST_KEYS):
            some = list(keys[at : at + MOST_KEYS])
            if not self.problem:
                try:
                    asyncio.run(self._ask(some, slot_bytes))
                except TimeoutError:
                    self.problem = "it does not answer in time"
                except (FileNotFoundError, ConnectionRefusedError):
                    self.problem = "none is there"
                except (OSError, EOFError, MessageError) as exc:
                    self.problem = str(exc)
            if self.problem:
                self.unasked += len(some)

    async def _ask(self, keys: list[PackedKey], slot_bytes: int) -> None:
        reader, writer = await dial(self.path)
        try:
            writer.write(encode_frame(Hello(PROTOCOL_VERSION, slot_bytes)))
            with anyio.fail_after(_ANSWER_S):
                media = _media_of(await receive(reader))
            writer.write(encode_frame(Forget(1, list(keys), LONGEST_S)))
            with anyio.fail_after(LONGEST_S + _ANSWER_S):
                while not isinstance(said := await receive(reader), Done):
                    pass
            check_media(said, len(media))
            if said.reason not in FORGETS:
                raise MessageError(f"it asks no tier ({said.reason})")
            self.forgotten += said.found
            self.kept |= {media[number - 1] for number in said.media if number}
        finally:
            writer.transport.abort()


def _media_of(answer: FromAgent) -> Sequence[str]:
    if isinstance(answer, Refused):
        raise MessageError(answer.problem)
    if not isinstance(answer, Welcome):
        raise MessageError("the agent's first message is no welcome")
    return answer.media
