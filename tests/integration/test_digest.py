# SPDX-License-Identifier: Apache-2.0
"""One digest of a model's weights."""

import pytest
import torch

from tests.integration.vllm.weights_kit import PackedModel, TinyModel
from ucm.integration import digest as module
from ucm.integration.digest import Sums, read_weights


def digest_of(*models: torch.nn.Module) -> bytes:
    """Read all that there is."""
    reading = read_weights(models, lambda: False)
    assert reading is not None
    return reading.digest


class TestDigest:
    def test_equal_weights_have_equal_digests(self) -> None:
        """R-08: what a model computes, and buffers made of its settings, count for
        nothing; the same bytes in another model are the same."""
        one, other = TinyModel(), TinyModel()
        other.made = other.made.to(torch.float64)
        assert 16 == len(digest_of(one))
        assert digest_of(one) == digest_of(other)

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda m: m.layer.weight.data[3, 7].add_(1e-6), id="one-bit"),
            pytest.param(lambda m: m.scale.mul_(2), id="a-buffer"),
            pytest.param(lambda m: m.half(), id="another-type"),
            pytest.param(
                lambda m: setattr(
                    m.layer, "weight", torch.nn.Parameter(m.layer.weight.view(4, 8, 1))
                ),
                id="another-shape",
            ),
            pytest.param(lambda m: setattr(m, "more", m.layer), id="another-name"),
        ],
    )
    def test_any_change_shows(self, change) -> None:
        """R-07: one bit, a persistent buffer, a type, a shape or a name is enough."""
        model = TinyModel()
        before = digest_of(model)
        change(model)
        assert before != digest_of(model)

    def test_last_bytes_of_a_large_tensor_count(self, monkeypatch) -> None:
        """R-07: a tensor is read in chunks, and all of them are."""
        monkeypatch.setattr(module, "_CHUNK_BYTES", 48)
        for shape in ((4, 8), (8, 4)):
            model = TinyModel()
            weight = torch.arange(32.0).view(shape)
            weight = weight.t() if shape == (8, 4) else weight
            model.layer.weight = torch.nn.Parameter(weight)
            before = digest_of(model)
            for at in ((0, 0), (3, 7)):
                model.layer.weight.data[at] += 1
                assert before != digest_of(model)
                model.layer.weight.data[at] -= 1
            assert before == digest_of(model)

    def test_weights_with_gaps_are_read_without_them(self) -> None:
        """R-07: of a padded weight its own bytes count, and the padding does not."""
        model = TinyModel()
        whole = torch.zeros(4, 16)
        model.layer.weight = torch.nn.Parameter(whole[:, :8])
        before = digest_of(model)
        whole[0, 9] = 5
        assert before == digest_of(model)
        whole[3, 7] = 5
        assert before != digest_of(model)

    def test_reading_that_is_given_up_has_no_result(self) -> None:
        """A reading ends soon when nobody wants it any more."""
        assert read_weights([TinyModel()], lambda: True) is None

    @pytest.mark.parametrize("models", [(), (TinyModel().to("meta"),)])
    def test_what_cannot_be_read_has_no_digest(self, models) -> None:
        """R-07: without a model, or with weights that are not there, nothing can be
        proven."""
        assert b"" == digest_of(*models)

    def test_parts_of_a_parameter_are_its_bytes(self) -> None:
        """R-07: a parameter that keeps its bytes in other tensors is read in these."""
        model = TinyModel()
        inner = {0: torch.ones(3)}
        model.layer.weight.partitions = inner
        before = digest_of(model)
        inner[0][2] = 7
        assert before != digest_of(model)


class TestHidden:
    def test_packed_weights_are_equal_to_themselves_only(self) -> None:
        """R-07: weights that a kernel keeps out of reach are those that they were
        until it packs anew, whatever it packs."""
        model = PackedModel(1.0)
        first = read_weights([model], lambda: False)
        again = read_weights([model], lambda: False)
        model.fill(1.0)
        other = read_weights([model], lambda: False)
        assert first.digest == again.digest == other.digest != b""
        assert first.hides_as(again)
        assert not first.hides_as(other)
        assert not first.hides_as(read_weights([TinyModel()], lambda: False))

    def test_empty_integers_hide_nothing(self) -> None:
        """R-08: what a kernel for quantised weights wants empty is no weight."""
        model = TinyModel()
        empty = torch.empty(0, dtype=torch.int32)
        model.layer.order = torch.nn.Parameter(empty, requires_grad=False)
        reading = read_weights([model], lambda: False)
        assert (16, ()) == (len(reading.digest), reading.hidden)

    def test_weights_that_are_nowhere_cannot_be_read(self) -> None:
        """R-07: an empty parameter beside which nothing stands proves nothing."""
        model = PackedModel()
        del model.layer.packed
        assert b"" == digest_of(model)


def sums_of(*pieces: torch.Tensor) -> bytes:
    """Sum up as is done where the weights are on an accelerator."""
    sums = Sums(torch.device("cpu"))
    for piece in pieces:
        sums.add(piece)
    return sums.take()


class TestSums:
    @pytest.mark.parametrize("nbytes", [1, 4, 7, 4096, 4099])
    def test_any_bit_changes_both_sums(self, nbytes: int) -> None:
        """R-07: each bit of each byte counts, the last ones and the highest too."""
        piece = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        before = sums_of(piece)
        assert 16 == len(before)
        for at in {0, nbytes // 2, nbytes - 1}:
            for bit in range(8):
                changed = piece.clone()
                changed[at] ^= 1 << bit
                after = sums_of(changed)
                assert before[:8] != after[:8]
                assert before[8:] != after[8:]

    def test_order_counts_within_a_piece_and_among_pieces(self) -> None:
        """R-07: words that change places, and pieces that do, are another sum."""
        piece = torch.arange(64, dtype=torch.uint8)
        words = piece.view(16, 4).flip(0).reshape(-1)
        assert sums_of(piece) != sums_of(words)
        assert sums_of(piece, piece + 1) != sums_of(piece + 1, piece)

    def test_place_in_memory_does_not_count(self) -> None:
        """R-08: equal bytes are equal wherever they begin."""
        memory = torch.zeros(100, dtype=torch.uint8)
        memory[3:67] = torch.arange(64, dtype=torch.uint8)
        assert sums_of(torch.arange(64, dtype=torch.uint8)) == sums_of(memory[3:67])
