# SPDX-License-Identifier: Apache-2.0
"""Small edits of ucm, each of which a named test must notice."""
