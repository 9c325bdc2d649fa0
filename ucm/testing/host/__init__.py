# SPDX-License-Identifier: Apache-2.0
"""A fake engine that drives a connector by its hooks and is stricter than a real one."""

from ucm.testing.host.choices import Choices, SeededChoices
from ucm.testing.host.content import Memory
from ucm.testing.host.hooks import SchedulerHooks, WorkerHooks
from ucm.testing.host.host import FakeHost
from ucm.testing.host.replay import replay
from ucm.testing.host.rules import HostAssertionError, Rule
from ucm.testing.host.settings import HostSettings, Odds
from ucm.testing.host.trace import SCHEDULER, HookCall, HookTrace

__all__ = [
    "SCHEDULER",
    "Choices",
    "FakeHost",
    "HookCall",
    "HookTrace",
    "HostAssertionError",
    "HostSettings",
    "Memory",
    "Odds",
    "Rule",
    "SchedulerHooks",
    "SeededChoices",
    "WorkerHooks",
    "replay",
]
