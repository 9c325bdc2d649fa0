# SPDX-License-Identifier: Apache-2.0
"""Values are not changed after they were made."""

from ucm.config import StoreConfig
from ucm.pipeline.tickets import Outcome, OutcomeKind

Outcome(OutcomeKind.SKIPPED).error = "none"  # error: misc
StoreConfig().capacity = 1  # error: misc
Outcome("skipped")  # error: arg-type
