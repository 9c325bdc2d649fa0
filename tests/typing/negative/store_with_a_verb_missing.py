# SPDX-License-Identifier: Apache-2.0
"""A store that leaves out a verb cannot be made."""

from ucm.stores.abc import Store


class Forgetful(Store):
    """Implements nothing."""


Forgetful()  # error: abstract
