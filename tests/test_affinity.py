# SPDX-License-Identifier: Apache-2.0
"""CPUs of copy threads: on machines made of files, and on this one."""

import asyncio
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm import affinity
from ucm.affinity import (
    AffinityPlan,
    bind_thread,
    engine_cpus,
    format_cpulist,
    num_hashing,
    parse_cpulist,
    plan_affinity,
    plan_beside_cpu,
    plan_beside_engine,
    process_cpus,
)
from ucm.line_writer import LineWriter
from ucm.pipeline.workers import CopyThread
from ucm.threads import SYSTEM

ALL = range(16)
NOWHERE = 65535
"""A CPU that no machine has."""
cpu_sets = st.frozensets(st.integers(0, 15))


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory):
    """Two nodes of four cores with two hardware threads each; one node has no CPU."""
    root = tmp_path_factory.mktemp("sysfs")
    for node, cpus in enumerate(("0-7", "8-15", "")):
        write(root / "node" / f"node{node}" / "cpulist", cpus)
    for cpu in ALL:
        core = cpu & 0b1011
        siblings = root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        write(siblings, f"{core},{core + 4}")
    return root


def write(path, text):
    """Make a file as the kernel shows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.fsencode(f"{text}\n"))


def plan(sysfs, *, setting="numa", node=1, engine=ALL, allowed=ALL):
    """Choose CPUs; return them as Linux writes them, and the reason."""
    chosen = plan_affinity(
        setting, node=node, engine=engine, allowed=allowed, sysfs=sysfs
    )
    return format_cpulist(chosen.cpus), chosen.reason


class Noting:
    """Where lines go, and the CPUs of who writes them."""

    def __init__(self, found):
        self._found = found

    def write(self, text):
        """Take note of them."""
        self._found.append(os.sched_getaffinity(0))
        return 0

    def close(self):
        """Nothing is ours."""


def on_thread(function):
    """Return what *function* returns on a thread of its own, and that thread's CPUs."""
    results = []

    def run():
        results.append(function())
        results.append(os.sched_getaffinity(threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    return tuple(results)


class TestCpulist:
    @pytest.mark.parametrize(
        ("text", "cpus"),
        [
            ("", set()),
            ("\n", set()),
            ("0", {0}),
            ("8-10,24\n", {8, 9, 10, 24}),
            ("3-3", {3}),
            ("5,1-2,2", {1, 2, 5}),
        ],
    )
    def test_list_is_read_as_linux_writes_it(self, text, cpus):
        """Single CPUs and ranges are read, in any order, with a newline behind them."""
        assert cpus == parse_cpulist(text)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("a", "'a'"),
            ("1,,2", "''"),
            ("1-", "'1-'"),
            ("-1", "'-1'"),
            ("0-31:2", "'0-31:2'"),
            ("1 2", "'1 2'"),
            ("²", "'²'"),
            ("7-3", "'7-3' goes backwards"),
            ("0-999999999999", "'0-999999999999'"),
        ],
    )
    def test_what_is_no_list_is_refused(self, text, part):
        """The error says which part is wrong, and no range is too long to be read."""
        with pytest.raises(ValueError, match=r"CPU|backwards") as caught:
            parse_cpulist(text)
        assert part in str(caught.value)

    @given(st.frozensets(st.integers(0, 300)))
    def test_writing_and_reading_are_inverse(self, cpus):
        """Any set of CPUs survives being written and read."""
        assert cpus == parse_cpulist(format_cpulist(cpus))

    def test_neighbours_are_written_as_a_range(self):
        """Runs of CPUs become ranges, as people read them."""
        assert "0,2-4,8-9" == format_cpulist([9, 3, 2, 4, 0, 8])


class TestPlan:
    def test_off_leaves_threads_as_they_are(self, sysfs):
        """By default no thread is bound to anything."""
        assert ("", "threads.affinity is off") == plan(sysfs, setting="off")

    def test_list_is_taken_as_it_is(self, sysfs):
        """Who names CPUs gets these, whatever the engine has."""
        cpus, reason = plan(sysfs, setting="8-9,24", engine={8}, allowed={0, 8})
        assert ("8-9,24", "threads.affinity lists them") == (cpus, reason)

    def test_copies_run_on_the_node_of_the_device(self, sysfs):
        """An engine that is bound to no CPU in particular keeps none for itself."""
        assert ("8-15", "near the device on NUMA node 1") == plan(sysfs)
        assert "0-7" == plan(sysfs, node=0)[0]

    def test_engine_keeps_its_core(self, sysfs):
        """The CPU that the engine's thread is bound to is left to it, with the other
        hardware thread of its core."""
        cpus, reason = plan(sysfs, engine={9})
        assert "8,10-12,14-15" == cpus
        assert "near the device on NUMA node 1, off the engine's CPUs 9" == reason

    def test_sibling_is_better_than_nothing(self, sysfs):
        """Where only the other hardware thread of the engine's core is left, copies run
        there."""
        assert "13" == plan(sysfs, engine={9}, allowed={0, 9, 13})[0]

    def test_engine_on_the_other_node_is_in_nobodys_way(self, sysfs):
        """CPUs of another node need not be kept off."""
        cpus, reason = plan(sysfs, engine={1})
        assert ("8-15", "near the device on NUMA node 1") == (cpus, reason)

    def test_cpus_that_are_not_allowed_or_offline_are_left_out(self, sysfs):
        """A restricted cpuset counts, and so does a CPU that was taken offline: Linux
        allows it to no process."""
        assert "8,14-15" == plan(sysfs, allowed={0, 1, 8, 14, 15})[0]

    def test_process_on_the_other_node_is_not_bound(self, sysfs):
        """A process that may use no CPU of the node is told which it may use."""
        cpus, reason = plan(sysfs, engine=range(4), allowed=range(4))
        assert "" == cpus
        assert "(8-15)" in reason
        assert "only 0-3" in reason

    def test_engine_on_all_cpus_of_the_node_is_left_alone(self, sysfs):
        """Copies are not crowded onto the engine's own CPUs."""
        cpus, reason = plan(sysfs, engine=range(8, 16))
        assert "" == cpus
        assert "bound to all CPUs of NUMA node 1" in reason

    @pytest.mark.parametrize("node", [None, -1])
    def test_unknown_node_binds_nothing(self, sysfs, node):
        """Neither a device that does not know its node nor a machine without nodes
        leads to a guess."""
        assert ("", "the device's NUMA node is unknown") == plan(sysfs, node=node)

    def test_node_without_cpus_binds_nothing(self, sysfs):
        """A node of memory only has no CPU to offer."""
        cpus, reason = plan(sysfs, node=2)
        assert "" == cpus
        assert "of NUMA node 2" in reason

    @pytest.mark.parametrize(
        "content", [None, b"garbage", b"7-3", b"\xff\xfe", b"0-7;8"]
    )
    def test_node_that_cannot_be_read_binds_nothing(self, tmp_path, content):
        """A file that is missing or garbage is a reason and never an error."""
        if content is not None:
            write(tmp_path / "node" / "node1" / "cpulist", "")
            (tmp_path / "node" / "node1" / "cpulist").write_bytes(content)
        cpus, reason = plan(tmp_path)
        assert "" == cpus
        assert reason.startswith("the CPUs of NUMA node 1 are unknown: ")

    @pytest.mark.parametrize("content", [None, "garbage"])
    def test_unknown_siblings_are_nobody(self, tmp_path, content):
        """Without the machine's word on cores, just the engine's CPUs are kept off."""
        write(tmp_path / "node" / "node1" / "cpulist", "8-15")
        if content is not None:
            siblings = tmp_path / "cpu" / "cpu9" / "topology" / "thread_siblings_list"
            write(siblings, content)
        assert "8,10-15" == plan(tmp_path, engine={9})[0]

    @given(engine=cpu_sets, others=cpu_sets, node=st.integers(-1, 3))
    def test_choice_is_always_within_what_is_allowed(self, sysfs, engine, others, node):
        """On any machine copies get allowed CPUs of the node that the engine is not
        bound to, or none with a reason."""
        allowed = engine | others
        chosen = plan_affinity(
            "numa", node=node, engine=engine, allowed=allowed, sysfs=sysfs
        )
        of_node = {0: range(8), 1: range(8, 16)}.get(node, range(0))
        assert chosen.cpus <= allowed & set(of_node)
        assert engine == allowed or not chosen.cpus & engine
        free = allowed & set(of_node) - (set() if engine == allowed else engine)
        assert bool(free) == bool(chosen.cpus)
        assert chosen.reason


class TestBinding:
    def test_copy_thread_binds_itself_alone(self):
        """A copy thread has the CPUs of its plan, and the thread that started it those
        that it had."""
        before = os.sched_getaffinity(0)
        wanted = AffinityPlan(frozenset({max(before)}), "test")

        async def bind():
            thread = CopyThread(
                "copy",
                deaths.append,
                on_start=lambda: found.append(bind_thread(wanted)),
            )
            thread.start()
            thread.put(lambda _: found.append(os.sched_getaffinity(0)), None)
            thread.stop()
            assert thread.join(60.0)

        deaths, found = [], []
        asyncio.run(bind())
        assert [wanted, wanted.cpus] == found
        assert before == os.sched_getaffinity(0)
        assert [] == deaths

    def test_plan_without_cpus_changes_nothing(self):
        """A thread that is not to be bound keeps the CPUs that it inherited."""
        nothing = AffinityPlan(frozenset(), "no reason")
        assert (nothing, os.sched_getaffinity(0)) == on_thread(
            lambda: bind_thread(nothing)
        )

    def test_cpus_that_the_system_refuses_are_a_reason(self):
        """A thread whose CPUs do not exist goes on where it was, and says why."""
        wanted = AffinityPlan(frozenset({NOWHERE}), "test")
        bound, cpus = on_thread(lambda: bind_thread(wanted))
        assert os.sched_getaffinity(0) == cpus
        assert frozenset() == bound.cpus
        assert f"the system refuses CPUs {NOWHERE}: " in bound.reason

    def test_cpus_that_are_lost_are_told(self):
        """Where the system grants some of the CPUs only, the thread says which not."""
        real = min(os.sched_getaffinity(0))
        wanted = AffinityPlan(frozenset({real, NOWHERE}), "listed")
        bound, cpus = on_thread(lambda: bind_thread(wanted))
        assert {real} == cpus == bound.cpus
        assert f"listed; CPUs {NOWHERE} are offline or not allowed" == bound.reason


class TestBesideOne:
    @pytest.mark.parametrize(
        ("cpu", "engine", "cpus"),
        [(1, "0-15", "0-7"), (9, "0-3,8-11", "8-11"), (2, "2", "2"), (8, "0-8", "8")],
    )
    def test_thread_on_one_cpu_gets_those_of_the_engine_on_its_node(
        self, sysfs, cpu, engine, cpus
    ):
        """What it copies lies there, in the memory of the engine that it was started by."""
        found = plan_beside_cpu(cpu, parse_cpulist(engine), sysfs)
        assert cpus == format_cpulist(found)

    @pytest.mark.parametrize("text", ["", "x", "4-5"])
    def test_unknown_node_leaves_all_cpus_of_the_engine(self, tmp_path, text):
        """R-18: whatever the machine says of its nodes, nobody stays on the engine's core."""
        write(tmp_path / "node" / "node0" / "cpulist", text)
        assert {0, 1} == plan_beside_cpu(0, frozenset({0, 1}), tmp_path)


class TestHashing:
    @pytest.mark.parametrize(
        ("cpus", "wanted"), [(1, 1), (2, 1), (4, 2), (16, 8), (64, 8)]
    )
    def test_half_of_the_cpus_compute_checksums(
        self, tmp_path, monkeypatch, cpus, wanted
    ):
        """The other half is the engine's; more than eight gain nothing."""
        monkeypatch.setattr(affinity, "process_cpus", lambda: frozenset(range(cpus)))
        assert wanted == num_hashing(0, None, tmp_path)
        assert wanted == num_hashing(0, AffinityPlan(frozenset(), ""), tmp_path)
        assert 3 == num_hashing(3, None, tmp_path)

    def test_copy_threads_are_helped_on_their_own_cpus(self, tmp_path):
        """Helpers have the CPUs of whom they help: more of them gain nothing."""
        plan = AffinityPlan(frozenset([8, 9, 24]), "listed")
        assert 3 == num_hashing(0, plan, tmp_path)

    @pytest.mark.parametrize(
        ("limits", "wanted"),
        [
            ({"": "max 100000", "a/b": "400000 100000"}, 2),
            ({"": "600000 100000", "a": "max 100000"}, 3),
            ({"a": "50000 100000"}, 1),
            ({"a/b": "garbage"}, 8),
            ({"c": "400000 100000"}, 8),
        ],
    )
    def test_half_of_what_cgroups_allow_computes_checksums(
        self, tmp_path, monkeypatch, limits, wanted
    ):
        """A container sees all CPUs, and stands still where it uses more than it may."""
        monkeypatch.setattr(affinity, "process_cpus", lambda: frozenset(range(64)))
        write(tmp_path / "proc" / "self" / "cgroup", "1:cpu:/c\n0::/a/b\n")
        for group, text in limits.items():
            write(tmp_path / "sys" / "fs" / "cgroup" / group / "cpu.max", text)
        assert wanted == num_hashing(0, None, tmp_path)

    def test_cgroups_of_the_first_version_limit_it_too(self, tmp_path, monkeypatch):
        """A container's own group may be mounted where its path would begin, whatever its name; -1 is none."""
        monkeypatch.setattr(affinity, "process_cpus", lambda: frozenset(range(64)))
        write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/p\udcfcd")
        for quota, wanted in (("600000", 3), ("-1", 8)):
            write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
            write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
            assert wanted == num_hashing(0, None, tmp_path)

    def test_all_cpus_compute_what_their_engine_waits_for(self, tmp_path, monkeypatch):
        """One that computes on them does nothing else until its load is there; what cgroups
        allow is the limit."""
        monkeypatch.setattr(affinity, "process_cpus", lambda: frozenset(range(6)))
        assert 6 == num_hashing(0, None, tmp_path, share=1)
        write(tmp_path / "proc" / "self" / "cgroup", "0::/a\n")
        write(tmp_path / "sys" / "fs" / "cgroup" / "a" / "cpu.max", "400000 100000")
        assert 4 == num_hashing(0, None, tmp_path, share=1)


class TestThisMachine:
    def test_process_has_the_cpus_of_all_its_threads(self):
        """A thread that is bound to one CPU does not narrow what the process has."""
        cpus = os.sched_getaffinity(0)
        one = AffinityPlan(frozenset({min(cpus)}), "test")
        found, own = on_thread(lambda: bind_thread(one) and process_cpus())
        assert cpus <= found
        assert one.cpus == own

    def test_copies_keep_off_the_cpu_of_a_bound_engine(self):
        """On this machine as it is, copies of an engine that is bound to a CPU are
        planned elsewhere, within what the process may use, or nowhere with a reason."""
        own = AffinityPlan(frozenset({min(os.sched_getaffinity(0))}), "test")
        it, _ = on_thread(lambda: bind_thread(own) and plan_beside_engine("numa", int))
        assert it.reason
        assert it.cpus <= process_cpus()
        assert process_cpus() == own.cpus or not it.cpus & own.cpus

    def test_no_thread_of_ours_stays_on_the_one_cpu_of_who_starts_it(self):
        """R-18: those of the pipeline and of the log run on the engine's other CPUs, too; the
        engine's own thread stays bound."""
        one, found = AffinityPlan(frozenset({min(os.sched_getaffinity(0))}), "test"), []
        sink = Noting(found)

        def start():
            bind_thread(one)
            thread = SYSTEM.thread(lambda: found.append(os.sched_getaffinity(0)), "t")
            thread.start()
            thread.join(60.0)
            writer = LineWriter(sink, str)
            writer.put("line\n")
            writer.close(60.0)

        _, own = on_thread(start)
        beside = plan_beside_cpu(min(one.cpus), engine_cpus())
        assert [beside] * 2 == found
        assert one.cpus == own

    def test_list_is_planned_without_a_look_at_the_machine(self):
        """A list needs no NUMA node."""
        assert frozenset({3, 4}) == plan_beside_engine("3-4", lambda: None).cpus
