# SPDX-License-Identifier: Apache-2.0
"""A chat server over transformers with a store for its prompts."""
