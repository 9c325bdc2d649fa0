# SPDX-License-Identifier: Apache-2.0
"""
A package ``vllm_ascend`` with the names and signatures of a real release.

It is written to a directory from ``tests/golden/vllm_ascend_api.json``. The hooks of its
attention back ends go where the real ones do: to the connector of this process.
"""

from pathlib import Path

from tests.integration.vllm_ascend.wrappers import API

__all__ = ["GDN", "write_package"]

GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
"""The module of vLLM whose class vllm-ascend gives another core."""
_HEAD = "# SPDX-License-Identifier: Apache-2.0\nconnectors = []\n"
_BODIES = {
    "wait_for_kv_layer_from_connector": "wait_for_layer_load(layer_name)",
    "maybe_save_kv_layer_to_connector": (
        "save_kv_layer(layer_name, kv_cache_layer, 'metadata')"
    ),
}
_NOTIFY = """
def notify_kv_cache_written{takes}:
    for one in connectors:
        hook = getattr(one, 'on_kv_cache_written', None)
        if hook is not None:
            hook(layer_name)
"""
_WRAPPER = """
class UCMConnectorV1:
    def __init__(self, engine):
        self._ucm_engine = engine
"""


def write_package(root: Path, version: str) -> None:
    """Write the package of a release below *root*."""
    said = API[version]
    hooks = dict(said["hooks"])
    lines = [_HEAD]
    if "notify_kv_cache_written" in hooks:
        lines.append(_NOTIFY.format(takes=hooks.pop("notify_kv_cache_written")))
    for name, takes in hooks.items():
        call = f"    for one in connectors:\n        one.{_BODIES[name]}\n"
        lines.append(f"def {name}{takes}:\n{call}")
    _write(root / "vllm_ascend/attention/utils.py", "\n".join(lines))
    _write(root / said["wrapper"], _WRAPPER)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.parents:
        if folder.name == "vllm_ascend" or "vllm_ascend" in folder.parts:
            (folder / "__init__.py").touch()
    path.write_text(text, encoding="utf-8")
