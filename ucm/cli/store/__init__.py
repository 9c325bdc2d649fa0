# SPDX-License-Identifier: Apache-2.0
"""``ucm store``: see ``group``."""
