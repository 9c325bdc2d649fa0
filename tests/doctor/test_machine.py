# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the machine."""

import os

import attrs
import pytest

from tests.stores.test_slab_room import make_system
from ucm.config import StoreConfig, ThreadConfig, UCMConfig
from ucm.doctor.findings import Severity
from ucm.doctor.machine import MachineFacts, check_machine, gather_machine

FACTS = MachineFacts(kernel="6.1.0", nodes="0", cpus=8, packages={"ucm": "1"})


def noted(config=None, **facts):
    """Return what is noted of a machine."""
    found = check_machine(attrs.evolve(FACTS, **facts), config or UCMConfig())
    return [each.check for each in found if each.severity is Severity.NOTE]


@pytest.mark.parametrize(
    ("facts", "checks"),
    [
        ({}, []),
        ({"kernel": "5.14.0-70.el9"}, []),
        ({"kernel": "5.10.0-30-amd64"}, ["versions"]),
        ({"nodes": "0-1"}, ["NUMA"]),
        ({"nodes": "0,2"}, ["NUMA"]),
        ({"nodes": ""}, []),
        ({"cpus": 1}, ["CPUs"]),
    ],
)
def test_what_matters_of_a_machine_is_noted(facts, checks):
    """None of it stops an engine; each has its remedy."""
    assert checks == noted(**facts)


def test_nodes_that_are_chosen_need_no_note():
    """Who has set it knows."""
    chosen = UCMConfig(store=StoreConfig(numa="interleave"))
    assert [] == noted(chosen, nodes="0-1")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("99999", "the system refuses CPUs 99999"),
        ("{},99999", "CPUs 99999 are offline or not allowed"),
    ],
)
def test_cpus_for_copies_that_there_are_not_are_found(asked, told):
    """Copies run elsewhere then, of which the engine's log alone tells: it was called well."""
    asked = asked.format(min(os.sched_getaffinity(0)))
    config = UCMConfig(threads=ThreadConfig(affinity=asked))
    found = [*check_machine(FACTS, config)]
    (text,) = [each.text for each in found if each.severity is Severity.WARNING]
    assert text.startswith(f"threads.affinity='{asked}': ")
    assert told in text


def test_cpus_for_copies_that_there_are_are_well():
    """The doctor's own threads stay where they were."""
    before = os.sched_getaffinity(0)
    config = UCMConfig(threads=ThreadConfig(affinity=str(min(before))))
    found = check_machine(FACTS, config)
    assert {Severity.FINE} == {each.severity for each in found}
    assert before == os.sched_getaffinity(0)


def test_versions_are_told():
    """What a bug report needs is in the first line."""
    told = next(iter(check_machine(FACTS, UCMConfig())))
    assert "Linux 6.1.0, ucm 1" in told.text


def test_machine_is_asked(tmp_path):
    """What Linux does not tell is left empty."""
    system = make_system(tmp_path, {"sys/devices/system/node/has_memory": "0-3\n"})
    assert "0-3" == gather_machine(system).nodes
    facts = gather_machine(tmp_path / "nothing")
    assert "" == facts.nodes
    assert facts.cpus > 0
    assert "click" not in facts.packages
    assert "ucm" in facts.packages
