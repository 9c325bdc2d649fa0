# SPDX-License-Identifier: Apache-2.0
"""
Where blocks go below the slab: disks, shared mounts, and engines that span machines.

``abc`` says what a backend promises. Only the node's agent talks to one: no engine process
ever loads a backend's code.
"""
