# SPDX-License-Identifier: Apache-2.0
"""Shipped test kit: contract suites and fakes for authors of stores, devices and doors."""
