# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine's environment, which must stand before vLLM is imported, and of Hypothesis."""

import contextlib
import gc
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

with contextlib.suppress(ImportError):  # benchmarks read this where it is not installed
    from hypothesis import HealthCheck, settings

    # A limit is for hangs: what an example takes depends on who else computes.
    slow = [HealthCheck.too_slow]  # as a busy machine is
    settings.register_profile("ucm", deadline=None, suppress_health_check=slow)
    settings.load_profile("ucm")

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # What the wheel of its kernels brings is a gigabyte; the engine has another.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Stdout belongs to results that processes hand back.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin at the end of each loop starve each other on a busy machine.
    "GOMP_SPINCOUNT": "100",
    # Slabs are memory. What is to lie on a disk has a fixture of its own.
    "PYTEST_DEBUG_TEMPROOT": "/dev/shm",
    # On a GPU: kernels for float32 that keep all its digits, as the CPU's do.
    "TRITON_F32_DEFAULT": "ieee",
}


OF_TESTS = {
    # Threads that wait for each other after each of many small loops starve on a busy
    # machine, and all engines would have theirs bound to the same CPUs.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # An engine kills ranks that take five seconds to end, amid the close of what they log;
    # and is killed then. On a busy machine that is short.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "30",
}
"""Not for what is measured, which reads this as well."""


def pytest_configure(config: "pytest.Config") -> None:
    """Let engines of tests share the CPUs, and count for no coverage."""
    from tests import uncounted

    os.environ.update(OF_TESTS)
    config.pluginmanager.register(uncounted)


def pytest_collectstart() -> None:
    """Collect no garbage while tests are found; nearly all that is made then stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """
    Take what is imported and found out of every later collection of garbage.

    These are millions of objects. To look at them takes a second each time, and there are
    tests that have garbage collected to see what is let go of.
    """
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    """Begin with the tests that take longest: at the end one worker would wait for another."""
    items.sort(key=lambda item: item.path.name != "test_slab_crash.py")
