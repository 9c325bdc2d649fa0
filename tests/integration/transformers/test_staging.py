# SPDX-License-Identifier: Apache-2.0
"""Memory between caches and blocks: who has it, and who never has it again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.e2e.models import LLAMA
from tests.integration.transformers.kit import config_of, generate, model_of, prompt
from ucm.cache.sync import Save
from ucm.errors import DeviceTimeoutError
from ucm.integration.transformers import BlockingPromptCache, dynamic
from ucm.integration.transformers.model import Shape
from ucm.integration.transformers.staging import Staging

SHAPE = Shape(
    layers=((2, 3, 5), (1, 4, 4)), dtype=torch.int32, device=torch.device("cpu")
)
IDS = prompt(1, 100)


def never(*_: object, **__: object) -> NoReturn:
    """Fail as a copy does that does not end."""
    raise DeviceTimeoutError("no end")


def states_of(batch: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return states of which no two elements are the same."""
    count, made = 0, []
    for heads, *dims in SHAPE.layers:
        pair = []
        for dim in dims:
            shape = (batch, heads, tokens, dim)
            size = batch * heads * tokens * dim
            numbers = torch.arange(count, count + size, dtype=torch.int32)
            pair.append(numbers.view(shape))
            count += size
        made.append((pair[0], pair[1]))
    return made


class TestCopies:
    def test_what_goes_in_comes_out(self) -> None:
        """Keys and values of other dims, from any token of any row, to any other."""
        staging = Staging(SHAPE, block_tokens=4, lanes=2, lane_blocks=3)
        given, taken = states_of(2, 20), staging.new_states(3, 20)
        staging.copy_in(given, 1, 5, range(3, 6))
        staging.copy_out(taken, 2, 7, range(4, 6))
        for pair, others in zip(given, taken, strict=True):
            for state, other in zip(pair, others, strict=True):
                assert torch.equal(state[1, :, 9:17], other[2, :, 7:15])
                other[2, :, 7:15] = 0
                assert not other.any()

    def test_block_is_its_layers_one_after_another(self) -> None:
        """What is stored is what the key space says: [heads, tokens, dim] each."""
        staging = Staging(SHAPE, block_tokens=4, lanes=1, lane_blocks=1)
        given = states_of(1, 4)
        staging.copy_in(given, 0, 0, range(1))
        flat = [each[0].flatten() for pair in given for each in pair]
        assert torch.equal(torch.cat(flat), staging.pool[0])

    def test_states_that_have_gradients_leave_none_behind(self) -> None:
        """A cache of a forward pass with gradients is copied as bytes."""
        shape = Shape(
            layers=((1, 2, 2),), dtype=torch.float32, device=torch.device("cpu")
        )
        staging = Staging(shape, block_tokens=4, lanes=1, lane_blocks=1)
        ones = torch.ones((1, 1, 4, 2), requires_grad=True)
        staging.copy_in([(ones, ones)], 0, 0, range(1))
        assert not staging.pool.requires_grad
        assert 16 == staging.pool.sum()


class TestLanes:
    def test_lanes_are_apart_and_come_back(self) -> None:
        """Two at a time have blocks of their own; a third has to wait."""
        staging = Staging(SHAPE, block_tokens=4, lanes=2, lane_blocks=3)
        with staging.lane(0) as one, staging.lane(0) as other:
            assert [range(3), range(3, 6)] == [one.blocks, other.blocks]
            with staging.lane(0) as none:
                assert none.is_lost
        with staging.lane(0) as lane:
            assert not lane.is_lost

    def test_lost_lane_is_never_handed_out_again(self) -> None:
        """A copy may write to it for ever."""
        staging = Staging(SHAPE, block_tokens=4, lanes=2, lane_blocks=3)
        with staging.lane(0) as lost:
            lost.is_lost = True
        with staging.lane(0) as lane, staging.lane(0) as none:
            assert lost.blocks != lane.blocks
            assert range(0) == none.blocks


@pytest.mark.slow
def test_lane_of_an_interrupted_save_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81: who has it next would have other bytes stored under that save's keys."""
    ends: list[Callable[[], None]] = []

    def interrupted(_: Save) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(dynamic, "_TURN_S", 0.01)
    model = model_of(LLAMA)
    done, other = generate(model, IDS), generate(model, IDS.flip(1))
    with BlockingPromptCache(config_of(tmp_path), model, lanes=1) as prompts:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Save, "wait_released", interrupted)
            meanwhile.setattr(Save, "when_over", lambda _, call: ends.append(call))
            with pytest.raises(KeyboardInterrupt):
                prompts.save(done.sequences, done.past_key_values)
        assert 0 == prompts.save(other.sequences, other.past_key_values)
        (end,) = ends
        end()
        assert 96 == prompts.save(other.sequences, other.past_key_values)


@pytest.mark.slow
class TestStuck:
    @pytest.mark.parametrize("verb", ["load", "save"])
    def test_copy_that_never_ends_loses_its_lane_and_raises_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        """Its blocks are nobody's any more; what needs one finds nothing."""
        monkeypatch.setattr(dynamic, "_TURN_S", 0.01)
        model = model_of(LLAMA)
        done = generate(model, IDS)
        said = (done.sequences, done.past_key_values)
        with BlockingPromptCache(config_of(tmp_path), model, lanes=1) as prompts:
            cache: Any = prompts.cache
            if verb == "load":
                assert 96 == prompts.save(*said)
                monkeypatch.setattr(cache, "load", never)
                assert (None, 0) == prompts.restore(IDS)
                monkeypatch.undo()
                monkeypatch.setattr(dynamic, "_TURN_S", 0.01)
                assert (None, 0) == prompts.restore(IDS)
            else:
                monkeypatch.setattr("ucm.cache.sync.Save.wait_released", never)
                monkeypatch.setattr("ucm.cache.sync.Save.wait_committed", never)
                assert 0 == prompts.save(*said)
                monkeypatch.undo()
                monkeypatch.setattr(dynamic, "_TURN_S", 0.01)
                cache.flush()
                saved = cache.statistics().saved_blocks
                other = generate(model, IDS.flip(1))
                assert 0 == prompts.save(other.sequences, other.past_key_values)
                assert saved == cache.statistics().saved_blocks
