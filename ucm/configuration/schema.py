# SPDX-License-Identifier: Apache-2.0
"""The settings as a JSON schema, made of the same declarations that read them."""

import enum
import types
import typing
from typing import Any

import attrs

from ucm.config import UCMConfig
from ucm.settings import MOST, read_ratio, read_share, read_size

__all__ = ["schema"]

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTt]([Ii]?[Bb])|[Bb])?\s*$"


def schema() -> dict[str, object]:
    """Return the schema of what ``UCMConfig.from_mapping`` takes, and of a file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of ucm",
        **_section(UCMConfig),
    }


def _section(section: type) -> dict[str, object]:
    hints = typing.get_type_hints(section)
    fields = attrs.fields(typing.cast(Any, section))
    properties = {field.name: _setting(field, hints[field.name]) for field in fields}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting(field: Any, hint: Any) -> dict[str, object]:  # noqa: ANN401 - attrs and typing have no types for these
    if attrs.has(hint):
        return _section(hint)
    told = {"description": field.metadata["help"], **_shape(field.metadata, hint)}
    if field.default is not None and not isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]  # it is a class
        told["default"] = _plain(field.default)
    return told


def _plain(default: object) -> object:
    if isinstance(default, enum.Enum):
        return default.value
    return list(default) if isinstance(default, tuple) else default


def _shape(
    metadata: types.MappingProxyType[Any, Any],
    hint: Any,  # noqa: ANN401 - typing has no type for it
) -> dict[str, object]:
    """Return what values a setting takes."""
    if metadata["shape"] is not None:
        return dict(metadata["shape"])
    least = {} if metadata["least"] is None else {"minimum": metadata["least"]}
    read = metadata["read"]
    if read is read_size:
        number = {"type": "integer", **least}
        return {"anyOf": [number, {"type": "string", "pattern": _SIZE}]}
    if read is read_share:
        return dict(_SHARE)
    if read is read_ratio:
        return {"anyOf": [_SHARE, {"type": "null"}]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [word.value for word in hint]}
    most = {"exclusiveMaximum": MOST} if hint is float and least else {}
    if metadata["most"] is not None:
        most = {"maximum": metadata["most"]}
    return {"type": _TYPES[hint], **least, **most}
