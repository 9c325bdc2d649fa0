# SPDX-License-Identifier: Apache-2.0
"""
What capacity and policy would give: traces of requests replayed against models of a cache.

``ucm replay`` and ``benchmarks.replay`` stand on this; ``docs/replay.md`` says what came out.
"""
