# SPDX-License-Identifier: Apache-2.0
"""What an engine's own configuration says of us: a file of ``vllm serve --config``, or JSON."""

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ucm.config import UCMConfig
from ucm.errors import ConfigError

__all__ = ["CONNECTOR", "check_not_engines", "parse_transfers", "transfers_of"]

CONNECTOR = "UCMConnector"
_NAMES = ("kv-transfer-config", "kv_transfer_config")
_EXTRA = "kv_connector_extra_config"
_INNER = "connectors"
_POLICY = "kv_load_failure_policy"
_KNOWN: Final = (
    *("kv_connector", "kv_connector_module_path", _EXTRA, "kv_role", "engine_id"),
    *(_POLICY, "enable_permute_local_kv", "kv_port", "kv_ip"),
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size"),
)
"""Keys of vLLM's ``KVTransferConfig`` in any release; it refuses others."""


def transfers_of(document: Mapping[str, object]) -> list[dict[str, Any]]:
    """
    Return what is ours of the ``kv-transfer-config`` of an engine's file, nothing if it is no such file.

    Raises:
        ConfigError: It is none of our connector, or no such configuration; it has a key
            that an engine refuses.
    """
    for name in _NAMES:
        if name in document:
            found = document[name]
            return parse_transfers(found) if isinstance(found, str) else _ours(found)
    return _ours(document) if document.keys() & {"kv_connector", _EXTRA} else []


def parse_transfers(text: str) -> list[dict[str, Any]]:
    """
    Return what is ours of the value of ``--kv-transfer-config``: one, or several inside of another connector.

    Raises:
        ConfigError: It is no JSON, or none of our connector; it has a key that an engine
            refuses.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _error(text, f"not JSON: {exc}") from exc
    return _ours(found)


def check_not_engines(settings: Mapping[str, object]) -> None:
    """
    Refuse what is the engine's own where settings of ours are given.

    Raises:
        ConfigError: Says where to give it.
    """
    for key in settings:
        if key in _KNOWN:
            remedy = f"It is the engine's own: give it in {_NAMES[0]}, beside {_EXTRA}."
            raise ConfigError(key, settings[key], "no setting of ours", remedy)


def _ours(found: object) -> list[dict[str, Any]]:
    """Return the parts that are ours, also where they are some of several connectors."""
    if not isinstance(found, Mapping):
        raise _error(found, "not a mapping")
    _check_keys(found)
    extra = {} if found.get(_EXTRA) is None else found[_EXTRA]
    if not isinstance(extra, Mapping):
        raise ConfigError(_EXTRA, extra, "not a mapping", "Give keys and values.")
    inner = extra.get(_INNER)
    if found.get("kv_connector") == "MultiConnector" and isinstance(inner, list):
        some = [each for each in inner if isinstance(each, Mapping)]
        mine = [each for each in some if each.get("kv_connector") == CONNECTOR]
        if mine:
            # The engine asks the outer one what becomes of a load that fails.
            policy = found.get(_POLICY, "fail")
            outer = {} if policy == "recompute" else {_POLICY: policy}
            return [each for own in mine for each in _ours({**own, **outer})]
    if found.get("kv_connector", CONNECTOR) != CONNECTOR:
        raise _error(found.get("kv_connector"), "it names another connector")
    return [{**found, _EXTRA: dict(extra)}]


def _check_keys(found: Mapping[str, object]) -> None:
    for key, value in found.items():
        if key in _KNOWN:
            continue
        close = difflib.get_close_matches(str(key), _KNOWN, n=1)
        remedy = f"Did you mean {close[0]}?" if close else f"Known: {[*_KNOWN]}."
        if key in attrs.fields_dict(UCMConfig):
            remedy = f"It is a setting of ours: give it within {_EXTRA}."
        problem = f"unknown key of {_NAMES[0]}"
        raise ConfigError(str(key), value, problem, remedy)


def _error(value: object, problem: str) -> ConfigError:
    remedy = f'Give a mapping with "kv_connector": "{CONNECTOR}".'
    return ConfigError(_NAMES[0], value, problem, remedy)
