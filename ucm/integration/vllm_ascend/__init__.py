# SPDX-License-Identifier: Apache-2.0
"""What vllm-ascend leaves out for a connector, put in on request; see ``patches``."""
