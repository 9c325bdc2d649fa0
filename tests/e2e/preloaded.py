# SPDX-License-Identifier: Apache-2.0
"""What an engine imports until it serves; see ``tests.e2e.forked``."""

import importlib
import warnings

import tests.conftest
import tests.engine_imports  # noqa: F401 - its import is what counts
from tests.e2e.forked import stand_in_for_spawn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _ON_CPU = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    for name in (
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        # No other: the CPU's puts functions of its own in place of the GPU's.
        "vllm.v1.worker.cpu_worker" if _ON_CPU else "vllm.v1.worker.gpu_worker",
        "vllm.v1.executor.multiproc_executor",
        "ucm.integration.vllm.ucm_connector",
    ):
        importlib.import_module(name)

stand_in_for_spawn()
