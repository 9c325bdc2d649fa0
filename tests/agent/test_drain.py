# SPDX-License-Identifier: Apache-2.0
"""The end of an agent beside engines that are just joining."""

import signal
import socket
from contextlib import ExitStack, contextmanager

import pytest
from structlog.testing import CapturingLogger

from tests.agent.test_process import KEYS, LIMIT_S, Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent.client import AgentClient
from ucm.agent.protocol import PROTOCOL_VERSION, SOCKET_NAME, Hello, encode_frame
from ucm.testing.store_blocks import BLOCK_BYTES, save

pytestmark = pytest.mark.slow


@contextmanager
def joining(place: Place, slot_bytes: int):
    """Be an engine that has said hello, and was not heard yet."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(LIMIT_S)
        peer.connect(str(place.slab / SOCKET_NAME))
        peer.sendall(encode_frame(Hello(PROTOCOL_VERSION, slot_bytes)))
        yield peer


def is_hung_up(peer: socket.socket) -> bool:
    """Return whether the other end goes, maybe behind a welcome."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


class TestDrain:
    def test_engines_that_join_meanwhile_are_served_by_the_next_agent(
        self, place
    ) -> None:
        """R-55, R-63: an agent that is told to end spills what waits though engines come, one of
        them with slots of another size; it hangs up on them, and the next one serves them."""
        tier = {"type": "file-tier", "path": str(place.tier), "delay": 1.0}
        with ExitStack() as stack:
            slab = stack.enter_context(open_slab(place.slab, 64))
            agent = stack.enter_context(place.agent("--linger", "-1", tiers=[tier]))
            with place.client():
                save(slab, KEYS)
                until(lambda: place.status()["slots"]["4096"]["spilled"][0]["moving"])
                early = stack.enter_context(joining(place, 8192))
                agent.send_signal(signal.SIGTERM)
                late = AgentClient(place.slab, 4096, CapturingLogger())
                stack.callback(late.close)
                assert 0 == agent.wait(LIMIT_S)
            assert 6 == len(list(place.tier.iterdir()))
            assert is_hung_up(early)
            until(lambda: not late.is_up)
            assert not late.want("a", KEYS, [BLOCK_BYTES] * 6, seconds=9.0, hold_s=0.0)
            stack.enter_context(place.agent("--linger", "-1", tiers=[tier]))
            until(lambda: late.is_up)

    def test_agent_ends_over_a_call_that_nobody_can_end(self, place) -> None:
        """R-63: a native call of a tier's library that never returns keeps no agent beyond its
        time: it has the slab's lock, and no other could serve these engines."""
        tier = {"type": "file-tier", "path": str(place.tier), "delay": 600.0}
        brief = {"shutdown": 0.1, "tier": 0.1}
        options = {"tiers": [tier | {"endless": True}], "timeout": brief}
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1", **options) as agent,
            place.client(),
        ):
            save(slab, KEYS)
            until(lambda: place.status()["slots"]["4096"]["spilled"][0]["moving"])
            agent.send_signal(signal.SIGTERM)
            assert 1 == agent.wait(45.0)
        assert "does not end" in "".join(
            each.read_text() for each in place.log.iterdir()
        )
