# SPDX-License-Identifier: Apache-2.0
"""``ucm config``: what the settings are, where they come from, and whether they can be used."""

import json

import attrs
import click

from ucm.cli.given import read_given, settings_options
from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.telling import examples
from ucm.configuration.foreign import Translation
from ucm.configuration.schema import schema
from ucm.configuration.sources import Configuration, flat
from ucm.doctor.start import check_start
from ucm.errors import ConfigError

__all__ = ["config"]


@click.group(no_args_is_help=False)
def config() -> None:
    """
    Check and show settings.

    Of two places that give one key, the first counts: what the engine passes
    (kv_connector_extra_config); variables such as UCM_STORE__CAPACITY=8GiB; a file
    (config_file, or the variable UCM_CONFIG_FILE); the default.
    """


@config.command(
    name="check", epilog=examples("ucm config check --file examples/serve.yaml")
)
@settings_options
@json_option
def _check(file: str | None, transfer: str | None, *, as_json: bool) -> None:
    """
    Say whether an engine would start with these settings on this machine.

    Nothing is opened: whether it is well, and other machines answer, the doctor says. Keys of unified-cache-manager are translated; the equivalent is printed, and what has
    none is named.

    Exit codes: 0 they can be used, 2 they cannot, 3 the file cannot be read.
    """
    given = read_given(file, transfer)
    configuration = given.configuration
    for each in (given, *given.others):
        try:
            check_start(each.configuration.config, each.transfer)
        except ConfigError as exc:
            raise exc.given_in(_place_of(exc.key, each.configuration)) from exc
    translation = configuration.translation
    if as_json:
        say_json(
            {
                "usable": True,
                "given": dict(configuration.origins),
                "translation": _told(translation),
            }
        )
        return
    num_given = len(configuration.origins)
    click.echo(f"These settings can be used: {num_given} given, the rest are defaults.")
    if translation.equivalents:
        click.echo("\nKeys of unified-cache-manager were found. The same in ours:")
        click.echo(json.dumps(translation.settings(), indent=2))
    if translation.left_out:
        rows = [(each.theirs, each.reason) for each in translation.left_out]
        console().print(table("Without equivalent", ("key", "because"), rows))


@config.command(
    name="show", epilog=examples("UCM_STORE__CAPACITY=8GiB ucm config show")
)
@settings_options
@json_option
def _show(file: str | None, transfer: str | None, *, as_json: bool) -> None:
    """
    Show every setting with its value and where that comes from.

    Exit codes: 0 shown, 2 a setting cannot be used, 3 the file cannot be read.
    """
    configuration = read_given(file, transfer).configuration
    values = flat(configuration.config)
    if as_json:
        say_json(
            {
                key: {"value": value, "source": configuration.origin(key)}
                for key, value in values.items()
            }
        )
        return
    rows = [
        (key, json.dumps(value), configuration.origin(key))
        for key, value in values.items()
    ]
    console().print(table("", ("key", "value", "source"), rows))


@config.command(name="schema", epilog=examples("ucm config schema > ucm.schema.json"))
def _schema() -> None:
    """Print the JSON schema of all settings, for editors and charts."""
    say_json(schema())


def _place_of(key: str, configuration: Configuration) -> str:
    """Return where a setting was given; empty if nobody did, or it is the engine's own."""
    origins = configuration.origins
    return origins.get(key) or origins.get(key.partition(".")[0], "")  # tiers are one


def _told(translation: Translation) -> dict[str, object]:
    return {
        "equivalent": translation.settings(),
        "translated": [attrs.asdict(each) for each in translation.equivalents],
        "left_out": [attrs.asdict(each) for each in translation.left_out],
    }
