# SPDX-License-Identifier: Apache-2.0
"""The page of the engine's features names only proofs that there are."""

import ast
from pathlib import Path

import pytest

from scripts.features_table import FEATURES, Feature, Verdict

TESTS = Path(__file__).parent


def names_in(path: Path) -> set[str]:
    """Return the tests of a file, methods as ``Class::test``, and its classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return {name for name in found if name.rpartition("::")[2][:4].lower() == "test"}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_proof_is_a_test(feature: Feature) -> None:
    """Each proof names a test that there is, and what is said to be handled has one."""
    for proof in feature.proofs:
        file, _, name = proof.partition("::")
        assert (TESTS / file).is_file(), proof
        assert not name or name in names_in(TESTS / file), proof
    assert feature.proofs or feature.verdict is Verdict.NOT_RUN
