# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the simulation, what misbehaves in it, and the log's automaton."""
