# SPDX-License-Identifier: Apache-2.0
"""What compares blocks of a random engine sees what is wrong, and a seed says all of a run."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

import tests.engine_imports  # noqa: F401 - its import is what counts
from benchmarks.oracle_seen import Oracle
from benchmarks.oracle_settings import RECIPES, choose

KEY = (0, b"hash")
BLOCK = np.linspace(-1.0, 1.0, 64, dtype=np.float32)


def raw(block: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return a block as a store has it."""
    return block.view(np.uint8)


def changed(at: int, value: float) -> npt.NDArray[np.uint8]:
    """Return the block with one element that is something else."""
    other = BLOCK.copy()
    other[at] = value
    return raw(other)


class TestOracle:
    @pytest.mark.parametrize("value", [0.5, np.nan, np.inf])
    def test_one_wrong_element_is_seen_in_later_sights_and_against_truth(
        self, value: float
    ) -> None:
        """A block that is another, or no number, is a problem wherever it comes from."""
        oracle = Oracle()
        oracle.see("commit", KEY, raw(BLOCK))
        assert [] == oracle.problems
        oracle.see("publish", KEY, changed(0, value))
        assert 1 == len(oracle.problems)
        oracle.learn(KEY, changed(3, value))
        oracle.hold("slab", KEY, raw(BLOCK))
        assert 2 == len(oracle.problems)
        oracle.judge()
        assert 3 == len(oracle.problems)

    def test_first_sight_that_is_no_number_is_seen_at_once(self) -> None:
        """Nothing equals it, so it does not even equal itself."""
        oracle = Oracle()
        oracle.see("commit", KEY, changed(5, np.nan))
        assert 1 == len(oracle.problems)

    def test_run_that_compares_nothing_is_no_good_one(self) -> None:
        """Else hooks that see nothing any more would say that all is well."""
        oracle = Oracle()
        oracle.judge()
        assert ["no block was compared with the truth"] == oracle.problems

    def test_block_of_tokens_that_nobody_asked_is_a_problem(self) -> None:
        """It is foreign, or the truth was not learned."""
        oracle = Oracle()
        oracle.learn(KEY, raw(BLOCK))
        oracle.see("commit", KEY, raw(BLOCK))
        oracle.see("commit", (0, b"other"), raw(BLOCK))
        oracle.judge()
        assert ["1 blocks are of no tokens that were asked"] == oracle.problems

    def test_rounding_passes_and_is_told(self) -> None:
        """Another batch adds up in another order."""
        oracle = Oracle()
        oracle.learn(KEY, raw(BLOCK))
        oracle.see("running", KEY, raw(BLOCK + np.float32(5e-5)))
        oracle.judge()
        assert [] == oracle.problems
        assert 1 == oracle.counts["verified"]
        assert 1e-5 < oracle.worst < 1e-4

    def test_same_hash_in_two_groups_is_two_blocks(self) -> None:
        """Each group of layers has bytes of its own for the same tokens."""
        oracle = Oracle()
        oracle.see("commit", KEY, raw(BLOCK))
        oracle.see("commit", (1, KEY[1]), raw(-BLOCK))
        assert [] == oracle.problems

    def test_layers_of_a_draft_model_are_left_out(self) -> None:
        """They lie behind the model's, and the engine fills them when it likes."""
        oracle = Oracle(share=0.5)
        oracle.see("commit", KEY, raw(BLOCK))
        oracle.see("publish", KEY, changed(-1, 9.0))
        assert [] == oracle.problems
        oracle.see("publish", KEY, changed(0, 9.0))
        assert 1 == len(oracle.problems)

    def test_blocks_of_who_was_killed_may_be_of_unknown_tokens(self) -> None:
        """Nobody says what it was asked last; what is known is compared all the same."""
        oracle = Oracle()
        oracle.learn(KEY, raw(BLOCK))
        oracle.see("commit", KEY, raw(BLOCK))
        oracle.see("publish", (0, b"other"), raw(BLOCK))
        oracle.judge(may_be_unknown=True)
        assert [] == oracle.problems

    def test_coarse_numbers_are_read_as_they_are_and_may_be_rounded(self) -> None:
        """A state of two bytes each: neither its rounding nor what lies behind it in its page
        counts, another state does."""
        state = torch.from_numpy(BLOCK).bfloat16()
        other = (torch.from_numpy(BLOCK) * 1.01).bfloat16()
        oracle = Oracle(is_coarse=True)
        oracle.parts[0] = [(0, state.nbytes, torch.bfloat16)]
        for each, behind in ((state, b"12"), (other, b"34")):
            page = each.view(torch.uint8).numpy().tobytes() + behind
            oracle.see("commit", KEY, np.frombuffer(page, np.uint8))
        assert [] == oracle.problems
        assert 0.0 < oracle.worst < 0.02
        turned = state.flip(0).view(torch.uint8).numpy()
        oracle.see("publish", KEY, np.append(turned, np.uint8([1, 2])))
        assert 1 == len(oracle.problems)


def test_setting_is_that_of_its_seed() -> None:
    """What a seed has found is found again; other seeds are otherwise."""
    assert [choose(seed) for seed in range(20)] == [choose(seed) for seed in range(20)]
    assert 20 == len({str(choose(seed)) for seed in range(20)})


def test_second_engine_takes_the_slab_of_the_first() -> None:
    """Blocks of the first are hits for it only if model and sizes are the same."""
    for seed in range(20):
        first, second = choose(seed), choose(seed, 1)
        assert first != second
        for name in ("model", "block_tokens", "capacity", "draft", "has_tier"):
            assert getattr(first, name) == getattr(second, name)


def test_all_that_an_engine_may_have_is_drawn() -> None:
    """Each model, and each of what only some engines have, alone and with others."""
    drawn = [choose(seed) for seed in range(400)]
    assert {*RECIPES} == {each.model for each in drawn}
    assert {"", "stays", "dies"} == {each.neighbour for each in drawn}
    for name in (
        "adapters",
        "draft",
        "has_tier",
        "flips",
        "sleeps",
        "stopped",
        "logprobs",
    ):
        assert {False, True} == {bool(getattr(each, name)) for each in drawn}
    assert {1, 2} == {each.ranks for each in drawn}
    assert {"auto", "fp8"} == {each.cache_dtype for each in drawn}
    assert all(each.caches for each in drawn if each.has_states)
