# SPDX-License-Identifier: Apache-2.0
"""What is known of an engine's own configuration, held against the engine's source."""

import ast
import importlib.util
from pathlib import Path

import pytest

from ucm.configuration.engine import transfers_of


def test_each_key_of_the_engine_is_known():
    """What the installed engine takes is refused by nobody of us."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("there is no engine")
    text = (Path(spec.origin).parent / "config" / "kv_transfer.py").read_text()
    (found,) = (
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.ClassDef) and each.name == "KVTransferConfig"
    )
    keys = [each.target.id for each in found.body if isinstance(each, ast.AnnAssign)]
    assert len(keys) > 8
    given = {**dict.fromkeys(keys), "kv_connector": "UCMConnector"}
    (ours,) = transfers_of({"kv-transfer-config": given})
    assert keys == list(ours)
