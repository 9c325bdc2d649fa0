# SPDX-License-Identifier: Apache-2.0
"""
Our step messages in the envelopes that vLLM passes around.

vLLM pickles its own envelopes between its own processes; ours hold nothing but encoded
bytes, which are decoded by version and never unpickled.
"""

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucm.errors import MessageError
from ucm.scheduler.messages import StepPlan, decode_plan

__all__ = ["PlanEnvelope", "RankHandshake", "ReportEnvelope", "plan_in"]


@attrs.frozen
class PlanEnvelope(KVConnectorMetadata):
    """A step plan on its way to the workers."""

    payload: bytes


@attrs.frozen
class ReportEnvelope(KVConnectorWorkerMetadata):
    """Step reports of one or more ranks on their way to the scheduler."""

    payloads: tuple[bytes, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportEnvelope":
        """Put another rank's reports behind ours."""
        if not isinstance(other, ReportEnvelope):
            raise MessageError(
                f"reports of {type(other).__name__} cannot join {type(self).__name__}"
            )
        return ReportEnvelope(self.payloads + other.payloads)


@attrs.frozen
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank has registered, for the scheduler to compare with its own."""

    keyspace_digest: bytes


def plan_in(metadata: object) -> StepPlan:
    """
    Return the plan in an envelope.

    Raises:
        MessageError: Another connector's metadata, or another version's plan; names
            both types.
    """
    if not isinstance(metadata, PlanEnvelope):
        raise MessageError(
            f"expected {PlanEnvelope.__name__}, got {type(metadata).__name__}: this "
            "metadata was built by another connector"
        )
    return decode_plan(metadata.payload)
