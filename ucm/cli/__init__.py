# SPDX-License-Identifier: Apache-2.0
"""
The command ``ucm``: what an operator asks, answered in a terminal or as JSON.

``main`` is the entry point; each subcommand is a module of its own, imported when it is
run, and stands on the same public parts that a program would use.
"""
