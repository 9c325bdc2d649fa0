# SPDX-License-Identifier: Apache-2.0
"""Whose code a model of torch computes with is found where it is, or said to be nowhere."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from ucm.integration.computing import code_of

HERE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def mine(*of: object) -> object:
    """Compute something with what was given."""
    return of


def parts_of(*called: object, part: torch.nn.Module | None = None) -> list[str]:
    """Return digests of what a model of torch's own computes with besides."""
    model = torch.nn.Sequential(*([part] if part else []))
    return code_of(model, *called)[1]


class TestCode:
    @pytest.mark.parametrize(
        "called",
        [
            mine,
            functools.partial(mine, 1),
            functools.wraps(torch.relu)(lambda *of: of),
            functools.wraps(torch.nn.functional.silu)(lambda *of: of),
            torch.no_grad()(mine),
        ],
        ids=["plain", "partial", "named as native", "named as theirs", "wrapped"],
    )
    def test_function_of_others_is_found_whatever_name_it_bears(
        self, called: Callable[..., object]
    ) -> None:
        """R-05: one that wraps another says that it is that one, and computes otherwise."""
        assert [HERE] == parts_of(called)

    def test_functions_of_python_and_torch_and_none_are_no_others(self) -> None:
        """Their release says what they are."""
        assert [] == parts_of(None, math.sin, torch.nn.functional.silu, torch.relu)

    def test_native_function_has_the_code_of_its_module(self) -> None:
        """It is in no file of its own, and was refused for that."""
        native = numpy.random.mtrand.seed
        with pytest.raises(TypeError):
            inspect.getfile(native)
        assert 1 == len(parts_of(native))

    def test_function_that_wraps_itself_ends(self) -> None:
        """A mistake of others that has no effect when it is called."""

        def own() -> None:
            """Do nothing."""

        assert [HERE] == parts_of(functools.wraps(own)(own))

    def test_code_in_no_file_is_refused_by_the_name_of_its_class(self) -> None:
        """R-05: two of the same name could not be told apart."""
        part = type("Part", (torch.nn.Identity,), {"__module__": "nowhere"})()
        with pytest.raises(
            OSError, match="the code of Part, of nowhere, is in no file"
        ):
            parts_of(part=part)

    def test_what_torch_has_compiled_by_itself_is_refused(self) -> None:
        """R-05: all such parts are of one class, whatever they compute."""
        with pytest.raises(OSError, match=r"torch\.jit"):
            parts_of(part=torch.jit.ScriptModule())
