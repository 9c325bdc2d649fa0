# SPDX-License-Identifier: Apache-2.0
"""A store, a backend and a device that are not part of ucm."""
