# SPDX-License-Identifier: Apache-2.0
"""The hierarchy of errors is the one that its module draws."""

import pytest

from ucm import errors


def draw(error: type[BaseException], depth: int = 0) -> list[str]:
    """Draw an error and those below it as the module's text does."""
    foreign = [
        base.__name__ for base in error.__bases__ if base.__module__ == "builtins"
    ]
    told = f" ({', '.join(foreign)})" if depth and foreign else ""
    below = [
        line
        for child in error.__subclasses__()
        if child.__module__ == errors.__name__
        for line in draw(child, depth + 1)
    ]
    return [f"{'    ' * depth}- {error.__name__}{told}", *below]


def test_the_drawn_hierarchy_is_the_real_one() -> None:
    """Every error, its place and its built-in base stand in the module's text."""
    lines = (errors.__doc__ or "").splitlines()
    drawn = [line.split(":")[0] for line in lines if line.lstrip().startswith("- ")]
    assert draw(errors.UCMError) == drawn


def test_a_setting_that_is_wrong_tells_what_to_do() -> None:
    """The message names the key, the value, the problem and the remedy."""
    error = errors.ConfigError("store.path", "x", "is not absolute", "Start with /.")
    assert "store.path='x': is not absolute. Start with /." == str(error)
    assert ("store.path", "x", "Start with /.") == (
        error.key,
        error.value,
        error.remedy,
    )


@pytest.mark.parametrize(
    ("error", "told", "cause"),
    [
        (errors.BlockNotFoundError(b"\x01\xff"), "01ff", ("key", b"\x01\xff")),
        (
            errors.BlockCorruptError(b"\x01", "short"),
            "01 is corrupt: short",
            ("key", b"\x01"),
        ),
        (
            errors.StageFailedError("gather", 7),
            "gather failed for transfer 7",
            ("transfer_id", 7),
        ),
        (errors.StageFailedError("gather", 7), "stage gather", ("stage", "gather")),
    ],
)
def test_an_error_carries_what_it_is_about(
    error: errors.UCMError, told: str, cause: tuple[str, object]
) -> None:
    """What failed is part of the message and an attribute."""
    assert told in str(error)
    assert cause[1] == getattr(error, cause[0])
