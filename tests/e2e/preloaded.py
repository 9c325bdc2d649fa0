# SPDX-License-Identifier: Apache-2.0
"""What an engine imports until it serves; see ``tests.e2e.forked``."""

import gc
import importlib
import os
import warnings
from contextlib import suppress

gc.disable()  # nearly all that is made here stays

import tests.conftest
import tests.engine_imports  # noqa: F401 - its import is what counts
from tests.e2e import spinning
from tests.e2e.engine import leave_the_heap_alone
from tests.e2e.forked import stand_in_for_spawn

_LATE = (
    # The server and its routes, and what an engine looks at as it starts.
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    # What our connector and its libraries import late.
    "anyio._backends._asyncio",
    "numpy.ma",
    "ucm.devices.cpu",
)
"""Imported where they are: their names are the release's business."""

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
    for name in _LATE if _ON_CPU else ():
        with suppress(ImportError):
            importlib.import_module(name)

stand_in_for_spawn()
if "PYTEST_VERSION" in os.environ:  # and not where something is measured
    spinning.leave_the_cpu()
# An engine runs the collector a dozen times. To look at a million objects of modules takes
# half a second each, as that copies the memory that a fork shares.
gc.freeze()
gc.unfreeze = leave_the_heap_alone
gc.enable()
