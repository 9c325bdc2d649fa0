# SPDX-License-Identifier: Apache-2.0
"""The library for hosts of their own: one core, an awaitable face and a blocking one."""
