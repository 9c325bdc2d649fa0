# SPDX-License-Identifier: Apache-2.0
"""What a read of damaged bytes raises; apart, because a key needs no msgspec."""

from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises of damaged bytes: what is no UTF-8, or is nested too deep, has errors of Python's."""
