# SPDX-License-Identifier: Apache-2.0
"""A connector of somebody else, which tells its scheduler things that we do not know."""

from collections.abc import Mapping

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)

__all__ = ["ForeignConnector", "Greeting"]


@attrs.frozen
class Greeting(KVConnectorHandshakeMetadata):
    """Where a rank could be reached."""

    address: str


class ForeignConnector(ExampleConnector):
    """The engine's example, with a handshake of its own."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Return what only this class understands."""
        return Greeting("nowhere:1")

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take no other handshake, as the engine's NixlConnector does not."""
        if not all(isinstance(one, Greeting) for one in metadata.values()):
            raise ValueError("expected greetings")
