# SPDX-License-Identifier: Apache-2.0
"""A save chain that leaves out ``Gather`` is no chain."""

from ucm.pipeline.save import EventWait, Transfer
from ucm.pipeline.stage import Chain

Chain.start(EventWait()).then(Transfer())  # error: arg-type
