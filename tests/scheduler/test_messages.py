# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers tell each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.blocks import Owner
from ucm.errors import MessageError
from ucm.reasons import Reason
from ucm.scheduler.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGE_VERSION,
    Deferral,
    Failure,
    SpanOrder,
    StepPlan,
    StepReport,
    TransferKind,
    decode_plan,
    decode_report,
    encode,
)

IDS = st.integers(0, 2**40)
ORDERS = st.integers(1, 5).flatmap(
    lambda count: st.builds(
        SpanOrder,
        transfer_id=IDS,
        kind=st.sampled_from(TransferKind),
        owners=st.builds(
            Owner,
            request_id=st.text(max_size=9),
            generation=IDS,
            num_blocks=st.just(count),
            used_ns=st.integers(-(2**62), 2**62),
            tenant=st.integers(0, 2**32 - 1),
        ).map(lambda owner: (owner,)),
        group_id=st.integers(0, 99),
        block_ids=st.tuples(*[IDS] * count),
        hashes=st.binary(min_size=8 * count, max_size=8 * count),
    )
)
TUPLES_OF_IDS = st.lists(IDS, max_size=4).map(tuple)
PLANS = st.builds(
    StepPlan,
    step=IDS,
    loads=st.lists(ORDERS, max_size=3).map(tuple),
    unfinished=st.text(max_size=9),
    saves=st.lists(ORDERS, max_size=3).map(tuple),
    fences=TUPLES_OF_IDS,
    overwritten=TUPLES_OF_IDS,
    lost=st.dictionaries(IDS, TUPLES_OF_IDS, max_size=3),
    deferred=st.lists(
        st.builds(Deferral, request_id=st.text(max_size=9), generation=IDS), max_size=3
    ).map(tuple),
)
REPORTS = st.builds(
    StepReport,
    rank=st.integers(0, 99),
    released=TUPLES_OF_IDS,
    quarantined=TUPLES_OF_IDS,
    settled_saves=TUPLES_OF_IDS,
    unstored_saves=TUPLES_OF_IDS,
    new_blocks=st.dictionaries(IDS, st.integers(1, 99), max_size=3),
    why_unstored=st.dictionaries(IDS, st.sampled_from(Reason), max_size=3),
    loads_done=TUPLES_OF_IDS,
    failures=st.lists(
        st.builds(
            Failure,
            transfer_id=IDS,
            request_id=st.text(max_size=9),
            generation=IDS,
            group_id=st.integers(0, 99),
            bad_hash=st.binary(max_size=64),
            reason=st.sampled_from(Reason),
        ),
        max_size=3,
    ).map(tuple),
    healthy=st.booleans(),
)


def _order(block_ids: tuple[int, ...], hashes: bytes) -> SpanOrder:
    return SpanOrder(
        transfer_id=7,
        kind=TransferKind.SAVE,
        owners=(Owner("r", generation=1, num_blocks=len(block_ids)),),
        group_id=0,
        block_ids=block_ids,
        hashes=hashes,
    )


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(plan=PLANS)
def test_plan_after_round_trip_is_equal(plan: StepPlan) -> None:
    """H-12: A plan that is written and read again equals itself."""
    assert plan == decode_plan(encode(plan))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(report=REPORTS)
def test_report_after_round_trip_is_equal(report: StepReport) -> None:
    """H-12: A report that is written and read again equals itself."""
    assert report == decode_report(encode(report))


def test_message_of_other_version_is_refused() -> None:
    """H-12: A message of another release is refused and the error names both."""
    other = bytes([MESSAGE_VERSION + 1]) + encode(StepPlan(step=1))[1:]
    with pytest.raises(MessageError, match="message version 08 is not 7"):
        decode_plan(other)
    with pytest.raises(MessageError, match="message version none is not 7"):
        decode_report(b"")


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xc1", b"\x81\xa4step\xa1x", b"\x82\xa4step\x01\xaaunfinished\xa1\xff"],
)
def test_damaged_message_is_refused(damage: bytes) -> None:
    """H-12: Bytes that are no message behind the version raise a typed error."""
    with pytest.raises(MessageError, match="damaged message"):
        decode_plan(bytes([MESSAGE_VERSION]) + damage)


def test_message_over_the_bound_is_neither_written_nor_read() -> None:
    """H-12: The size of a message is bounded on both ends."""
    count = MAX_MESSAGE_BYTES // 64
    order = _order(tuple(range(count)), bytes(64 * count))
    with pytest.raises(MessageError, match=f"are more than {MAX_MESSAGE_BYTES}"):
        encode(StepPlan(step=1, saves=(order,)))
    with pytest.raises(MessageError, match=f"are more than {MAX_MESSAGE_BYTES}"):
        decode_report(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(("block_ids", "hashes"), [((), b""), ((1, 2), bytes(17))])
def test_order_whose_hashes_do_not_fit_is_refused(
    block_ids: tuple[int, ...], hashes: bytes
) -> None:
    """An order needs at least one block and hashes of one length for all."""
    with pytest.raises(MessageError, match="transfer 7"):
        _order(block_ids, hashes)


def test_order_splits_its_hashes_in_the_order_of_its_blocks() -> None:
    """The hashes of an order come back one per block."""
    assert [b"a" * 8, b"b" * 8] == _order((5, 6), b"a" * 8 + b"b" * 8).split_hashes()


def test_plan_is_empty_only_without_any_order() -> None:
    """A plan with orders of any one kind is not empty."""
    order = _order((1,), bytes(8))
    assert StepPlan(step=3).is_empty
    for orders in (
        StepPlan(step=3, loads=(order,)),
        StepPlan(step=3, saves=(order,)),
        StepPlan(step=3, fences=(1,)),
        StepPlan(step=3, overwritten=(1,)),
        StepPlan(step=3, deferred=(Deferral(request_id="r", generation=1),)),
    ):
        assert not orders.is_empty
