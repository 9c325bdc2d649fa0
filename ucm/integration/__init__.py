# SPDX-License-Identifier: Apache-2.0
"""Doors: each imports its engine, and nothing imports a door."""
