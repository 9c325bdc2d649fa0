# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a machine, a store or an engine, and what to do about it."""
