# SPDX-License-Identifier: Apache-2.0
"""
Our step messages in the envelopes that vLLM passes around.

vLLM pickles its own envelopes between its own processes; ours hold nothing but encoded
bytes, which are decoded by version and never unpickled.
"""

import attrs
import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucm.decoding import DECODE_ERRORS
from ucm.errors import KeyFormatError, MessageError
from ucm.ranks import RankFacts
from ucm.scheduler.messages import MESSAGE_VERSION, StepPlan, decode_plan

__all__ = ["PlanEnvelope", "RankHandshake", "ReportEnvelope", "may_greet", "plan_in"]

_VERSION_BYTE = bytes([MESSAGE_VERSION])
_FACTS_DECODER = msgspec.msgpack.Decoder(RankFacts)


@attrs.frozen
class PlanEnvelope(KVConnectorMetadata):
    """A step plan on its way to the workers."""

    payload: bytes


@attrs.frozen
class ReportEnvelope(KVConnectorWorkerMetadata):
    """
    Step reports of one or more ranks on their way to the scheduler.

    Args:
        payloads: The reports.
        handshakes: Of ranks that report for the first time. Handshakes have hooks of
            their own, but what else is plugged into the engine may use these up.
    """

    payloads: tuple[bytes, ...]
    handshakes: tuple["RankHandshake", ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportEnvelope":
        """Put another rank's reports behind ours."""
        if not isinstance(other, ReportEnvelope):
            raise MessageError(
                f"reports of {type(other).__name__} cannot join {type(self).__name__}"
            )
        return ReportEnvelope(
            self.payloads + other.payloads, self.handshakes + other.handshakes
        )


@attrs.frozen
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank stores, for the scheduler to decide the key space from."""

    payload: bytes

    @classmethod
    def of(cls, facts: RankFacts) -> "RankHandshake":
        """Put a rank's facts into the envelope."""
        return cls(_VERSION_BYTE + msgspec.msgpack.encode(facts))

    def facts(self) -> RankFacts:
        """
        Return the facts in the envelope.

        Raises:
            MessageError: Another version, or damaged.
        """
        if self.payload[:1] != _VERSION_BYTE:
            raise MessageError(
                f"handshake version {self.payload[:1].hex() or 'none'} is not "
                f"{MESSAGE_VERSION}: ranks run different releases of ucm"
            )
        try:
            return _FACTS_DECODER.decode(memoryview(self.payload)[1:])
        except (*DECODE_ERRORS, KeyFormatError) as exc:
            raise MessageError(f"damaged handshake: {exc}") from exc


def may_greet(own: KVConnectorBase_V1, config: VllmConfig) -> bool:
    """
    Return whether the engine may be given the handshake of a worker's connector.

    Of several children MultiConnector passes the first one's on, to all of them, and who has a
    handshake of its own, as NixlConnector, ends the start at another's; of several pipeline
    stages, so does who has none. Ours comes with the first report as well.
    """
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    usual = {type(own).get_handshake_metadata}
    if config.parallel_config.pipeline_parallel_size == 1:
        usual.add(KVConnectorBase_V1.get_handshake_metadata)
    others = (
        child
        for child in getattr(group, "_connectors", ())
        if getattr(child, "_ucm_engine", child) is not own  # as vllm-ascend wraps it
    )
    return all(type(each).get_handshake_metadata in usual for each in others)


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
