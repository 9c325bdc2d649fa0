# SPDX-License-Identifier: Apache-2.0
"""
Classes that call a connector as vllm-ascend's wrapper does, made from what is written
down of each of its releases in ``tests/golden/vllm_ascend_api.json``.
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)

__all__ = ["API", "FIRST", "PRESENT", "forwarded", "wrapper_class"]

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "vllm_ascend_api.json"
API: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
FIRST = "0.18.0"
"""A release whose wrapper gives two arguments."""
PRESENT = "0.23.0"
"""The release whose engine is the oldest that is supported."""

_ENGINE = "self._ucm_engine."
_RESERVED = "self._call_ucm_reserved_hook"
_CLASS = "UCMConnector."


def forwarded(version: str) -> dict[str, tuple[str, str]]:
    """Return for each method of a wrapper how it finds our hook, and which."""
    found = {}
    for name, said in API[version]["methods"].items():
        for text in said["calls"]:
            call = ast.parse(text, mode="eval").body
            assert isinstance(call, ast.Call)
            target = ast.unparse(call.func)
            for kind in (_ENGINE, _CLASS):
                if target.startswith(kind):
                    found[name] = kind, target.removeprefix(kind)
            if target == _RESERVED and isinstance(call.args[0], ast.Constant):
                found[name] = _RESERVED, str(call.args[0].value)
    return found


def _method(kind: str, hook: str) -> Callable[..., Any]:
    def through_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._ucm_engine, hook)(*args, **kwargs)

    def reserved(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = self._ucm_engine
        if hook not in type(owner).__dict__:
            owner = getattr(owner, "connector", None) or owner
        found = getattr(owner, hook, None)
        return found(*args, **kwargs) if callable(found) else None

    return through_engine if kind == _ENGINE else reserved


def wrapper_class(version: str, ours: type) -> type:
    """Return a class that calls *ours* as a release's wrapper does, and no more."""
    gives = API[version]["methods"]["__init__"]["calls"][0].count(",") + 1

    def make(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        given = (vllm_config, role, kv_cache_config)[:gives]
        self._ucm_engine = ours(*given)

    body: dict[str, Any] = {"__init__": make}
    for name, (kind, hook) in forwarded(version).items():
        if kind == _CLASS:
            body[name] = classmethod(
                lambda _, *args, at=hook, **kwargs: getattr(ours, at)(*args, **kwargs)
            )
        else:
            body[name] = _method(kind, hook)
    bases = (KVConnectorBase_V1, SupportsHMA)
    takes_groups = "request_finished_all_groups" in body
    return type("UCMConnectorV1", bases if takes_groups else bases[:1], body)
