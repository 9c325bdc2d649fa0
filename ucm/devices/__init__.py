# SPDX-License-Identifier: Apache-2.0
"""Devices: where the engine's blocks live."""
