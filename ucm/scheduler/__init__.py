# SPDX-License-Identifier: Apache-2.0
"""The scheduler's decisions: pure state machines, facts in, orders out."""
