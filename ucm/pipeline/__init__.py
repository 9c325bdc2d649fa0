# SPDX-License-Identifier: Apache-2.0
"""Staged pipelines that save and load spans of blocks."""
