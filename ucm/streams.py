# SPDX-License-Identifier: Apache-2.0
"""The standard streams of a process of our own, which may be started without them."""

import os
import sys

__all__ = ["open_streams"]


def open_streams() -> None:
    """
    Have what a process was started without, such as by ``>&-``: what is told goes nowhere.

    Else the next file that is opened stands in its place, and native code writes to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - to its end
