# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: files, the environment, the engine, and a peer's keys."""
