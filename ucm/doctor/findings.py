# SPDX-License-Identifier: Apache-2.0
"""What a check has found, and what to do about it."""

import enum

import attrs

from ucm.errors import ConfigError

__all__ = ["Finding", "Severity", "fine", "note", "refused", "warning", "wrong"]


class Severity(enum.StrEnum):
    """How bad it is."""

    FINE = "fine"
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """It works, and not as well as it could."""
    WRONG = "wrong"
    """An engine will not start, will find nothing, or will lose output."""


@attrs.frozen
class Finding:
    """
    One result of one check.

    Args:
        check: Which, in a word or two.
        severity: How bad it is.
        text: What was found.
        remedy: What to do about it; empty where there is nothing to do.
    """

    check: str
    severity: Severity
    text: str
    remedy: str = ""


def fine(check: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding(check, Severity.FINE, text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    """Return what is worth knowing."""
    return Finding(check, Severity.NOTE, text, remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return what could be better."""
    return Finding(check, Severity.WARNING, text, remedy)


def wrong(check: str, text: str, remedy: str) -> Finding:
    """Return what must be mended."""
    return Finding(check, Severity.WRONG, text, remedy)


def refused(check: str, error: ConfigError) -> Finding:
    """Return that an engine would not start for this error."""
    return wrong(check, f"{error.key}={error.shown}: {error.problem}", error.remedy)
