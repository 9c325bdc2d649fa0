# SPDX-License-Identifier: Apache-2.0
"""A block is no group, and a hash is no packed key."""

from ucm.blocks import BlockHash, BlockId, BlockSpan, GroupId

BlockSpan(
    BlockId(0),  # error: arg-type
    (BlockId(1),),
    (BlockHash(b"12345678"),),  # error: arg-type
)
BlockSpan(GroupId(0), (GroupId(1),), ())  # error: arg-type
