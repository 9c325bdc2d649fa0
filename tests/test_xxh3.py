# SPDX-License-Identifier: Apache-2.0
"""Functions of xxhash's library: those that are found say what xxhash says."""

import pytest

from ucm import xxh3


def test_functions_are_found_in_the_wheel():
    """What is installed with us exports them."""
    assert xxh3.find_digester() is not None
    assert xxh3.find_whole() is not None


@pytest.mark.parametrize("name", ["XXH3_64bits_reset", "XXH64_reset"])
def test_functions_that_say_something_else_are_not_used(name, monkeypatch):
    """What they tell would seal blocks that nobody could load."""
    monkeypatch.setattr(xxh3, "_RESET", name)
    assert xxh3.find_digester() is None


@pytest.mark.parametrize("name", ["_CREATE", "_DESTROY", "_RESET", "_TELL"])
def test_library_without_a_function_is_not_used(name, monkeypatch):
    """Another build of xxhash may export none."""
    monkeypatch.setattr(xxh3, name, "XXH3_none")
    assert xxh3.find_digester() is None


def test_function_for_any_cpu_is_the_second_choice(monkeypatch):
    """What picks the CPU's widest way is there on x86-64 only."""
    monkeypatch.setattr(xxh3, "_UPDATE", ("XXH3_none", xxh3._UPDATE[-1]))
    monkeypatch.setattr(xxh3, "_WHOLE", ("XXH3_none", xxh3._WHOLE[-1]))
    assert xxh3.find_digester() is not None
    assert xxh3.find_whole() is not None


def test_library_that_is_not_there_is_none(monkeypatch):
    """Python's xxhash may be no package of a library."""

    def missing(_):
        raise ModuleNotFoundError("No module named 'xxhash._xxhash'")

    monkeypatch.setattr(xxh3.importlib.util, "find_spec", missing)
    assert xxh3.find_digester() is None
