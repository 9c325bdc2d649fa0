# SPDX-License-Identifier: Apache-2.0
"""A load that publishes before it scatters is no chain."""

from ucm.pipeline.load import Fetch, Publish
from ucm.pipeline.save import EventWait
from ucm.pipeline.stage import Chain
from ucm.stores.abc import Store


def load(store: Store) -> None:
    """Publish too early."""
    Chain.start(EventWait()).then(Fetch(store)).then(Publish())  # error: arg-type
