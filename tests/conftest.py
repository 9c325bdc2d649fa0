# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine's environment; they must stand before vLLM is imported."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Stdout belongs to results that processes hand back.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin at the end of each loop starve each other on a busy machine.
    "GOMP_SPINCOUNT": "100",
}
