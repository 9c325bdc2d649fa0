# SPDX-License-Identifier: Apache-2.0
"""The table of events says what every line of ours may say; see also ``tests.kit``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from ucm import tracing
from ucm.events import COMMON, EVENTS, KEYS, VERSION, unknown_keys

PACKAGE = Path(__file__).resolve().parents[1] / "ucm"
LEVELS = ("debug", "info", "warning", "error", "exception")
NAMES = {
    name: word
    for name, word in vars(tracing).items()
    if name.isupper() and isinstance(word, str)
}
FROZEN = """
adapter.passed agent.ended agent.joined agent.lost agent.refused agent.started
checksums.left engine.untried event.refused hold.quarantined hold.released
hold.taken log.dropped memory.pinned memory.unmapped memory.unpinned
prefix.matched prefix.missed request.ended runtime.closed runtime.failed
runtime.started save.passed scheduler.closed scheduler.started setting.ignored
setting.translated setting.unsafe source.released stage.failed stage.finished
stage.started store.answers store.bypassed store.caveat store.describe_failed
store.grown store.hung store.short summary thread.bound ticket.accepted
ticket.refused ticket.settled tier.answers tier.failed tier.silent trace.ring
weights.doubted weights.mixed weights.proven weights.read weights.unreadable
wish.ignored
"""
"""The words of ``VERSION`` 1."""


@attrs.frozen
class Call:
    """A call of a log, as it stands in the code."""

    where: str
    levels: tuple[str, ...]
    name: str
    keys: tuple[str, ...]


def levels_of(func: ast.expr) -> tuple[str, ...]:
    """Return at which levels a callee logs: ``log.info``, or one of two of them."""
    if isinstance(func, ast.IfExp):
        return levels_of(func.body) + levels_of(func.orelse)
    if isinstance(func, ast.Attribute) and func.attr in LEVELS:
        return (func.attr,)
    return ()


def calls() -> Iterator[Call]:
    """Yield every call in the package that logs an event of ours."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and levels_of(node.func)):
                continue
            event = node.args[0]
            if isinstance(event, ast.Name) and event.id.isupper():
                yield Call(
                    f"{path.relative_to(PACKAGE)}:{node.lineno}",
                    levels_of(node.func),
                    event.id,
                    tuple(each.arg for each in node.keywords if each.arg),
                )


CALLS = tuple(calls())


class TestTable:
    def test_it_has_every_event_and_no_other(self) -> None:
        """Each constant has its row, and each row its constant, named like it."""
        assert sorted(NAMES.values()) == sorted(EVENTS)
        for name, word in NAMES.items():
            assert name.lower() == word.replace(".", "_")

    def test_every_key_has_a_unit_and_a_meaning(self) -> None:
        """A reader need not guess; and no meaning is left of a key that is gone."""
        used = {key for event in EVENTS.values() for key in event.keys}
        assert used | set(COMMON) == set(KEYS)
        assert all(unit and text for unit, text in KEYS.values())

    def test_version_is_the_one_of_the_words(self) -> None:
        """Operators' dashboards read them: one that is renamed or gone raises it, and one
        that is new is added here."""
        assert 1 == VERSION
        assert FROZEN.split() == sorted(EVENTS)

    def test_key_that_is_not_in_the_table_is_found(self) -> None:
        """What reads lines back can tell; stages of a host's own are known by edges."""
        line = {"event": "ticket.settled", "v": 1, "edges": [["audit", 0, 1]]}
        assert set() == unknown_keys(line | {"audit_s": 1.0, "blocks": 1})
        assert {"gather_s", "block"} == unknown_keys(line | {"gather_s": 1, "block": 1})
        with pytest.raises(KeyError):
            unknown_keys({"event": "ticket.lost"})


class TestCalls:
    def test_calls_are_found(self) -> None:
        """The search sees them all, or the tests below would prove nothing."""
        assert len(CALLS) > 40

    @pytest.mark.parametrize("call", CALLS, ids=lambda call: call.where)
    def test_call_says_what_the_table_says(self, call: Call) -> None:
        """Name, level and keys of each line are those of its row."""
        event = EVENTS[NAMES[call.name]]
        assert set(call.levels) <= set(event.level.split())
        assert set(call.keys) <= set(event.keys)
