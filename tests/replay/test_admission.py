# SPDX-License-Identifier: Apache-2.0
"""The model behind what is said of admission."""

from benchmarks.admission import Tiered
from ucm.replay.traces import Request


def asked(model: Tiered, *prompts: tuple[int, ...]) -> list[int]:
    """Ask for prompts in turn; return how many blocks of each are found."""
    return [
        model.ask(Request((number + 1) * 10**9, len(blocks) * 8, blocks))
        for number, blocks in enumerate(prompts)
    ]


class TestTiered:
    def test_tier_has_what_the_slab_has_lost(self) -> None:
        """R-56: with everything spilled the second use hits, with what came again the third,
        which is written once."""
        prompts = ((1, 2), (3, 4), (1, 2), (5, 6), (1, 2))
        for way, found, written in (
            ("all", [0, 0, 2, 0, 2], 6),
            ("again", [0, 0, 0, 0, 2], 2),
        ):
            model = Tiered(2, 100, 8, way)
            assert (found, written) == (asked(model, *prompts), model.num_written)

    def test_short_prompt_is_found_and_not_stored(self) -> None:
        """R-56: where nothing of a prompt below 24 tokens is stored, it finds what longer ones
        have stored, and leaves nothing itself."""
        model = Tiered(100, 100, 8, "all", 24)
        prompts = ((1, 2), (1, 2, 3), (1, 2), (1, 4), (1, 4))
        assert ([0, 0, 2, 1, 1], 3) == (asked(model, *prompts), model.num_written)
