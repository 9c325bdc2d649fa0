# SPDX-License-Identifier: Apache-2.0
"""What an agent's log says of tiers that take no blocks, or bring damaged ones."""

from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.troubles import ServerTroubles, Troubles, servers_of
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import WrapperBackend
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys, save
from ucm.tracing import TIER_FAILED

FULL, DAMAGED = Reason.STORE_FULL, Reason.CORRUPT
MEDIA = ["disk", "redis"]


class Log:
    """Takes lines down."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def warning(self, event: str, **fields: object) -> None:
        """Take a line."""
        assert TIER_FAILED == event
        self.lines.append(tuple(fields.values()))


def test_trouble_is_told_at_once_and_then_once_a_minute() -> None:
    """R-52: each reason of each tier by name, with the blocks since it was told last."""
    log, now = Log(), [0.0]
    troubles = Troubles(log, lambda: now[0])
    troubles.look(MEDIA, {(0, FULL): 0})
    assert [] == log.lines
    troubles.look(MEDIA, {(1, FULL): 2})
    troubles.look(MEDIA, {(1, FULL): 5, (0, FULL): 1, (1, DAMAGED): 1})
    expected = [(1, "redis", FULL, 2), (0, "disk", FULL, 1), (1, "redis", DAMAGED, 1)]
    assert expected == log.lines
    now[0] = 60.0
    for _ in range(2):
        troubles.look(MEDIA, {(1, FULL): 9, (0, FULL): 1, (1, DAMAGED): 1})
    assert [*expected, (1, "redis", FULL, 7)] == log.lines


def test_what_a_call_raised_is_told_once_of_each_kind() -> None:
    """R-62: by its tier; the same again would fill the log."""
    log = Log()
    troubles = Troubles(log, lambda: 0.0)
    for tier, error in [(0, "KeyError(1)"), (0, "KeyError(2)"), (1, "KeyError(3)")]:
        troubles.tell_bug(tier, MEDIA[tier], "KeyError", error)
    assert [
        (0, "disk", Reason.ERROR, "KeyError(1)"),
        (1, "redis", Reason.ERROR, "KeyError(3)"),
    ] == log.lines


def test_what_a_tier_damages_or_does_not_take_is_counted_by_its_number(
    tmp_path,
) -> None:
    """R-52: also where the next tier brings the block, so that no request falls short."""
    keys = make_keys(3)
    first, second = Unruly(), Unruly(max_block_bytes=1)

    async def run(slab):
        async with open_core(slab, first, second) as core:
            await lay(first, keys[:2])
            await lay(second, keys[:2])
            first.does.flips = True
            want = want_of(keys[:2])
            await core.fetch(want)
            save(slab, keys[2:])
            await core.drain()
            return want.found, +core.troubles()

    with open_slab(tmp_path / "slab", 64) as slab:
        found, troubles = run_virtual(lambda: run(slab))
    assert 2 == found
    assert 2 == troubles[0, DAMAGED]
    assert troubles[1, FULL] >= 1
    assert (1, DAMAGED) not in troubles


class Several(WrapperBackend):
    """A tier of servers that are as a test says."""

    away = ()
    refusing = ()

    def __init__(self) -> None:
        super().__init__(MemoryBackend(Shelf(1)))


class Named:
    """Takes lines about servers down."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        """Take a line."""
        assert (1, "memory") == (fields["tier"], fields["medium"])
        self.lines.append(f"{event} {fields['server']} {fields.get('direction', '')}")

    info = warning


def test_server_is_told_of_once_for_all_that_becomes_of_it() -> None:
    """R-52: one that goes while it takes nothing has not begun to take; one that comes back and takes nothing
    answers, and what is told of its end is told of what was."""
    log, tier = Named(), Several()
    troubles = ServerTroubles(log)
    steps = [
        ([], ["a"], ["tier.silent a save"]),
        (["a"], [], ["tier.silent a "]),
        ([], ["a"], ["tier.answers a ", "tier.silent a save"]),
        (["b"], ["a"], ["tier.silent b "]),
        ([], [], ["tier.answers a save", "tier.answers b "]),
    ]
    for tier.away, tier.refusing, expected in steps:
        for told in (expected, []):
            troubles.look([Several(), tier])
            assert told == log.lines
            log.lines.clear()


def test_servers_of_a_large_cluster_are_named_up_to_a_bound() -> None:
    """R-52: an agent's status and its log name so many of each kind; how many there are is told as well."""
    log, tier = Named(), Several()
    names = [f"10.0.0.{number:03}:6379" for number in range(200)]
    tier.away, tier.refusing = names[:90], names[90:]
    ServerTroubles(log).look([Several(), tier])
    assert 64 == len(log.lines)
    expected = {"away": names[:32], "num_away": 90}
    expected |= {"refusing": names[90:122], "num_refusing": 110}
    assert expected == servers_of(tier)
