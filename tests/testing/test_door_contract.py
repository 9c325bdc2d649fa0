# SPDX-License-Identifier: Apache-2.0
"""The contract of doors: a host of ours passes it, and those that are wrong do not."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.testing.small_door import SmallDoor, SmallHost
from ucm.testing.door_contract import Damage, Door, DoorContract, Prompts, Running


@pytest.mark.slow
class TestHostOfOurs(DoorContract):
    """R-81: the library under a host without an engine, in a process of its own."""

    @classmethod
    def make_door(cls) -> Door:
        """Return the host as it should be."""
        return SmallDoor()


class Trusting(SmallHost):
    """Believes that all it found has come."""

    def trusts(self, found: int, leading: int) -> int:
        """Return what it found."""
        return found


class Boasting(SmallHost):
    """Counts what it found as loaded."""

    def counts(self, found: int, leading: int) -> int:
        """Return what it found."""
        return found


class Anonymous(SmallHost):
    """Gives all models one name."""

    def named(self) -> str:
        """Return the name of no model."""
        return "any"


class Forgetful(SmallHost):
    """Never saves anything."""

    def stores(self, keys: list[bytes], blocks: list[int], done: int) -> None:
        """Save nothing."""


class Scribbling(SmallHost):
    """Changes its blocks before they are saved."""

    def stores(self, keys: list[bytes], blocks: list[int], done: int) -> None:
        """Save other bytes than the answer is made of."""
        self.pool[:, blocks] ^= 1
        super().stores(keys, blocks, done)
        self.settle()
        self.pool[:, blocks] ^= 1


class Shifted(SmallHost):
    """Saves blocks under the keys of their neighbours."""

    def stores(self, keys: list[bytes], blocks: list[int], done: int) -> None:
        """Save in the wrong order."""
        super().stores(keys, [*blocks[:done], *reversed(blocks[done:])], done)


class Leaking(SmallHost):
    """Never lets go of a request."""

    def left(self) -> dict[str, int]:
        """Tell of what is left."""
        return {"requests": 1}


class Homebound(SmallHost):
    """Never asks a tier."""

    def finds(self, keys: list[bytes]) -> int:
        """Return what the slab has."""
        return int(self.cache.match(keys))


class Deaf(SmallHost):
    """Says the same whatever its blocks hold."""

    def generate(self, prompts: Prompts, num_tokens: int) -> Prompts:
        """Answer by the length of a prompt."""
        return [[len(prompt)] * num_tokens for prompt in prompts]


class Suite(DoorContract):
    """The tests of the contract, called one by one."""

    __test__ = False

    @classmethod
    def make_door(cls) -> Door:
        """Have none: each test gives its own."""
        raise NotImplementedError


def damaged(suite: Suite, running: Running) -> None:
    """Run the test of damaged blocks."""
    suite.test_damaged_blocks_are_computed(running, Damage.BITS)


@pytest.mark.parametrize(
    ("host", "test"),
    [
        (Trusting, damaged),
        (Boasting, damaged),
        (Anonymous, Suite.test_blocks_of_another_model_are_not_loaded),
        (Forgetful, Suite.test_cold_and_warm_answers_are_exact),
        (Shifted, Suite.test_cold_and_warm_answers_are_exact),
        (Scribbling, Suite.test_cold_and_warm_answers_are_exact),
        (Leaking, Suite.test_requests_that_are_given_up_leave_nothing),
        (Homebound, Suite.test_prompts_are_warm_through_a_tier_on_another_machine),
        (Deaf, Suite.test_output_depends_on_every_block),
    ],
    ids=lambda each: each.__name__,
)
def test_host_that_is_wrong_in_one_way_is_noticed(
    host: type[SmallHost],
    test: Callable[[Suite, Running], None],
    tmp_path: Path,
) -> None:
    """R-81: none of the tests passes whatever the host does."""
    for kind, is_wrong in ((SmallHost, False), (host, True)):
        root = tmp_path / kind.__name__
        root.mkdir()
        running = Running(SmallDoor(kind, is_apart=False), root)
        try:
            with pytest.raises(AssertionError) if is_wrong else nullcontext():
                test(Suite(), running)
        finally:
            running.stop()
