# SPDX-License-Identifier: Apache-2.0
"""
The node's agent: one process that moves blocks between the slab and what lies below it.

It *spills* what is committed to its tiers and *fetches* from them what an engine wants, into
slots of the slab. No engine process loads a backend's code, and none waits for the agent:
without it, engines serve from the slab as before.
"""
