# SPDX-License-Identifier: Apache-2.0
"""
On which CPUs our threads run.

A copy thread that runs on the other socket reads host memory across the link between
the sockets, and one that runs on the engine's CPU takes that CPU's time away from it.
Setting ``threads.affinity`` keeps copy threads near the device and off the engine, where
the machine says enough about itself; otherwise they run wherever the system puts them.

Linux lets each thread have CPUs of its own, and a new thread has those of the thread that
started it. An engine that computes on the CPU binds each of its threads to a core: all of ours
would share that of its main thread, and take its time, while cores stand idle. So a thread of
ours that finds itself on one CPU takes those of its NUMA node that the engine may use. Several
CPUs are left as they are. What is started beside an engine gets all that the engine may use
(``engine_cpus``), as it serves other ranks too.

Threading: ``plan_beside_engine`` is called on the engine's thread, ``leave_one_cpu`` by each
of ours on itself before anything else, ``bind_thread`` by each copy thread behind that, ``give_way``
by the one that gives a slab its memory.
"""

import contextlib
import multiprocessing
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

import attrs

__all__ = [
    "NUMA",
    "OFF",
    "AffinityPlan",
    "bind_thread",
    "engine_cpus",
    "format_cpulist",
    "give_way",
    "leave_one_cpu",
    "num_hashing",
    "parse_cpulist",
    "plan_affinity",
    "plan_beside_cpu",
    "plan_beside_engine",
    "process_cpus",
    "text_in",
]

OFF = "off"
"""The setting that leaves threads as they are."""
NUMA = "numa"
"""The setting that goes by the device's NUMA node."""
_SYSFS = Path("/sys/devices/system")
_LOW_PRIORITY = 10
"""A tenth of what others get where all cores are busy. Less, and who holds the interpreter lock then would
keep an engine waiting for a fifth of a second."""
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@attrs.frozen
class AffinityPlan:
    """
    Where copy threads are to run.

    Args:
        cpus: Empty: threads are left as they are.
        reason: Why these, or why none; for people.
    """

    cpus: frozenset[int]
    reason: str


def parse_cpulist(text: str) -> frozenset[int]:
    """
    Read CPUs as Linux writes them, such as ``8-15,24``; nothing is no CPU.

    Raises:
        ValueError: It is no such list; says which part is wrong.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"the range {part!r} goes backwards")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """Write CPUs as Linux does; the mirror of ``parse_cpulist``."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in ranges
    )


def plan_affinity(
    setting: str,
    *,
    node: int | None,
    engine: Collection[int],
    allowed: Collection[int],
    sysfs: Path = _SYSFS,
) -> AffinityPlan:
    """
    Choose the CPUs of copy threads.

    A list is taken as it is. ``numa`` takes the allowed CPUs of the device's node, except
    those that the engine's thread is bound to and, where others are left, the hardware
    threads that share a core with these.

    Args:
        setting: ``off``, ``numa`` or a list of CPUs.
        node: The device's NUMA node; None, or negative as Linux says, when unknown.
        engine: CPUs of the engine's thread. All of the process's mean that it is
            not bound to any.
        allowed: CPUs of the whole process.
        sysfs: Where the machine describes itself.

    Raises:
        ValueError: The setting is none of these; ``ucm.config`` has seen to that.
    """
    if setting == OFF:
        return AffinityPlan(frozenset(), "threads.affinity is off")
    if setting != NUMA:
        return AffinityPlan(parse_cpulist(setting), "threads.affinity lists them")
    if node is None or node < 0:
        return _unbound("the device's NUMA node is unknown")
    try:
        of_node = _read_cpulist(sysfs / "node" / f"node{node}" / "cpulist")
    except (OSError, ValueError) as exc:
        return _unbound(f"the CPUs of NUMA node {node} are unknown: {exc}")
    near = of_node & frozenset(allowed)
    if not near:
        return _unbound(
            f"of the CPUs of NUMA node {node} ({format_cpulist(of_node)}) this process "
            f"may use none, only {format_cpulist(allowed)}"
        )
    bound = frozenset() if set(engine) >= set(allowed) else frozenset(engine)
    free = near - bound
    if not free:
        return _unbound(
            f"the engine's thread is bound to all CPUs of NUMA node {node} that this "
            f"process may use ({format_cpulist(near)})"
        )
    beside = free - _siblings(bound, sysfs)
    reason = f"near the device on NUMA node {node}"
    if bound & near:
        reason += f", off the engine's CPUs {format_cpulist(bound)}"
    return AffinityPlan(beside or free, reason)


def process_cpus() -> frozenset[int]:
    """Return the CPUs that any thread of the process may use; each may have its own."""
    cpus = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # no /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                cpus |= os.sched_getaffinity(int(thread))
    return frozenset(cpus)


def engine_cpus() -> frozenset[int]:
    """
    Return the CPUs that the engine may use, of which this process may be one rank.

    A rank may be bound to one core in all its threads. Who started it is not; which process
    that is, is known of those that ``multiprocessing`` starts, as engines do.
    """
    cpus = process_cpus()
    if (parent := multiprocessing.parent_process()) is not None and parent.pid:
        with contextlib.suppress(OSError):  # it has ended
            cpus |= os.sched_getaffinity(parent.pid)
    return cpus


def leave_one_cpu() -> None:
    """Let the calling thread, if one CPU is all that it has, run beside it. Never raises."""
    with contextlib.suppress(OSError):
        if len(own := os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, plan_beside_cpu(min(own), engine_cpus()))


def give_way() -> None:
    """
    Let the calling thread, and those that it starts (who pins memory, say), give way to others. Never raises.

    Linux gives each thread a priority of its own, for whoever names it by 0 (setpriority(2)). One that
    is lower already stays.
    """
    with contextlib.suppress(OSError):
        lowest = max(os.getpriority(os.PRIO_PROCESS, 0), _LOW_PRIORITY)
        os.setpriority(os.PRIO_PROCESS, 0, lowest)


def plan_beside_cpu(
    cpu: int, engine: frozenset[int], sysfs: Path = _SYSFS
) -> frozenset[int]:
    """Return which CPUs of an engine are on the NUMA node of one; all, where nothing says so."""
    for node in sorted((sysfs / "node").glob("node*/cpulist")):
        with contextlib.suppress(OSError, ValueError):
            if cpu in (near := _read_cpulist(node)):
                return engine & near
    return engine


def num_hashing(
    setting: int,
    plan: AffinityPlan | None = None,
    system: Path = Path("/"),
    *,
    share: int = 2,
) -> int:
    """
    Return how many threads compute checksums at once, by what is set if anything is.

    Otherwise eight at most: the CPUs of copy threads where these have some of their own,
    half of what the process may use where not, by its cgroups too; or another share.

    Args:
        setting: ``threads.verify``.
        plan: Of the copy threads, who are helped on their own CPUs.
        system: Where ``/proc`` and ``/sys`` are.
        share: 1: all of them, where an engine that computes on them waits for a load.
    """
    if setting:
        return setting
    own = len(plan.cpus) if plan else 0
    num_cpus = own or len(process_cpus()) // share
    return max(1, min(8, num_cpus, *(quota // share for quota in _quotas(system))))


def _quotas(system: Path) -> Iterator[int]:
    """Yield how many CPUs the cgroups, of either version, let us use that this process is in."""
    for line in text_in(system / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if "cpu" in controllers.split(","):
            top, names = "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            top, names = "", ["cpu.max"]
        inner = PurePosixPath(path.lstrip("/"))
        if ".." not in inner.parts and (top or line.startswith("0::")):
            for step in (inner, *inner.parents):
                directory = system / "sys/fs/cgroup" / top / step
                limit = " ".join(text_in(directory / name) for name in names).split()
                if len(limit) == 2 and all(map(str.isdecimal, limit)):
                    yield int(limit[0]) // max(1, int(limit[1]))


def text_in(path: Path) -> str:
    """Return what a file of the system says; nothing where there is none."""
    try:
        return os.fsdecode(path.read_bytes())  # names in it may be no UTF-8
    except OSError:
        return ""


def plan_beside_engine(
    setting: str, node: Callable[[], int | None]
) -> AffinityPlan | None:
    """Choose from what machine and device say now, on the engine's thread; None: the system does."""
    if setting == OFF:
        return None
    engine = os.sched_getaffinity(0)
    return plan_affinity(setting, node=node(), engine=engine, allowed=process_cpus())


def bind_thread(plan: AffinityPlan) -> AffinityPlan:
    """
    Let the calling thread run on the CPUs of *plan* only. Never raises.

    Returns:
        What holds now: fewer CPUs than planned where the system allows fewer, and none
        where it allows none and the thread was left as it was.
    """
    if not plan.cpus:
        return plan
    try:
        os.sched_setaffinity(0, plan.cpus)
        cpus = frozenset(os.sched_getaffinity(0))
    except OSError as exc:
        wanted = format_cpulist(plan.cpus)
        return _unbound(f"the system refuses CPUs {wanted}: {exc}")
    if cpus == plan.cpus:
        return plan
    lost = format_cpulist(plan.cpus - cpus)
    return AffinityPlan(cpus, f"{plan.reason}; CPUs {lost} are offline or not allowed")


def _unbound(reason: str) -> AffinityPlan:
    return AffinityPlan(frozenset(), reason)


def _read_cpulist(path: Path) -> frozenset[int]:
    return parse_cpulist(path.read_text(encoding="ascii"))


def _siblings(cpus: frozenset[int], sysfs: Path) -> frozenset[int]:
    """Return the hardware threads on the cores of *cpus*, as far as they are known."""
    found: set[int] = set()
    for cpu in cpus:
        with contextlib.suppress(OSError, ValueError):
            path = sysfs / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            found |= _read_cpulist(path)
    return frozenset(found)
