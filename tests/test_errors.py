# SPDX-License-Identifier: Apache-2.0
"""The hierarchy of errors is the one that its module draws."""

import copy
import pickle

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
    ("key", "value"),
    [
        ("tiers.0.url", "redis://user:hidden@host:6379/0"),
        ("tiers.0", {"options": {"aws_secret_access_key": "hidden", "x": 1}}),
        ("tiers", [{"url": "s3://hidden@host"}, {"token": "hidden"}]),
        ("tiers.0.options.password", "hidden"),
        ("tiers.0.url", "redis://cache:6379/0?db=1&password=hidden"),
        ("tiers.0.url", "https://cache/x?X-Amz-Security-Token=hidden&sig=hidden"),
        ("tiers.0.url", "redis://:hid/hidden@cache:6379/0"),
        ("tiers.0", {"options": {"headers": {"Authorization": "Bearer hidden"}}}),
        ("tiers.0", {"options": {"sse_customer_key": "hidden"}}),
        ("tiers.0.token", "hidden"),
    ],
)
def test_a_setting_that_is_secret_is_not_told(key: str, value: object) -> None:
    """What stops a start is read by many; a credential in it is by nobody."""
    error = errors.ConfigError(key, value, "is wrong", "Mend it.")
    assert "hidden" not in str(error)
    assert "***" in str(error)
    assert key in str(error)


def test_a_value_without_end_is_told_in_a_few_words() -> None:
    """A value that is nested as deep as a parser goes does not end the message."""
    value: list[object] = []
    for _ in range(900):
        value = [value]
    assert "..." in str(errors.ConfigError("key", value, "is wrong", "Mend it."))
    assert str(errors.ConfigError("key", "x" * 9999, "is wrong", "M.")).endswith("M.")
    assert len(str(errors.ConfigError("key", "x" * 9999, "is wrong", "M."))) < 500


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


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("store.path", "x", "is not absolute", "Start with /."),
        errors.ConfigFileError("UCM_CONFIG", "x", "is missing", "Make it.", "a file"),
        errors.BlockNotFoundError(b"\x01\xff"),
        errors.BlockCorruptError(b"\x01", "short"),
        errors.BlockInUseError(7),
        errors.StageFailedError("gather", 7),
        errors.DeviceTimeoutError("no end"),
        errors.PipelineError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_whole_from_another_process(error: errors.UCMError) -> None:
    """A pool of processes whose worker raises it would wait for ever for one it cannot read."""
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(error) is type(again)
        assert (str(error), vars(error)) == (str(again), vars(again))
