# SPDX-License-Identifier: Apache-2.0
"""The settings that a subcommand is asked about: of a file, an engine's, or as it would start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

from ucm.configuration.engine import parse_transfers, transfers_of
from ucm.configuration.files import read_settings
from ucm.configuration.sources import ENGINE, FILE_VARIABLE, Configuration, load
from ucm.errors import ConfigError, ConfigFileError

__all__ = ["Given", "read_given", "settings_options"]


@attrs.frozen
class Given:
    """
    Settings, and what the engine was told beside them.

    Args:
        configuration: The settings with their sources.
        transfer: The engine's ``kv-transfer-config``; None if none was named.
        engine: All that its file says; empty if it is none of an engine.
        others: Likewise of further ones inside of the same connector of the engine's.
    """

    configuration: Configuration
    transfer: dict[str, Any] | None = None
    engine: dict[str, Any] = attrs.Factory(dict)
    others: "tuple[Given, ...]" = ()


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a subcommand take what ``read_given`` reads."""
    transfer = click.option(
        "--kv-transfer-config",
        "transfer",
        metavar="JSON",
        help="What the engine is started with.",
    )
    file = click.option(
        "--file",
        "-f",
        "file",
        metavar="FILE",
        help="Settings, or what 'vllm serve --config' reads: YAML, TOML or JSON. "
        f"If left out: {FILE_VARIABLE}.",
    )
    return file(transfer(command))


def read_given(file: str | None, transfer: str | None) -> Given:
    """
    Return the settings as an engine would read them here, variables included.

    Raises:
        ConfigError: They cannot be used.
        ConfigFileError: The file cannot be read.
    """
    if transfer is not None:
        own = parse_transfers(transfer)
        if file is not None:
            for each in own:
                each[ENGINE].setdefault("config_file", file)
        return _of_engine(own, ENGINE, {})
    if file is None:
        return Given(load({}))
    try:
        said = read_settings(Path(file))
        found = transfers_of(said)
    except ConfigFileError:
        raise
    except ConfigError as exc:
        raise exc.given_in(file) from exc
    if not found:
        return Given(load({"config_file": file}))
    return _of_engine(found, f"{ENGINE} of {file}", said)


def _of_engine(found: list[dict[str, Any]], name: str, said: dict[str, Any]) -> Given:
    first, *others = [
        Given(load(each[ENGINE], name=name), each, said) for each in found
    ]
    return attrs.evolve(first, others=tuple(others))
