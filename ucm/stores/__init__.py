# SPDX-License-Identifier: Apache-2.0
"""Stores: where blocks are kept."""
