# SPDX-License-Identifier: Apache-2.0
"""The simulated connector while weights are loaded, caches reset, engines asleep."""

import pytest

from tests.simulation.connector_world import ConnectorWorld
from ucm.integration.vllm.doubts import OwnCache
from ucm.scheduler.weights import Weights
from ucm.testing.host import HostAssertionError

ACTS = 80


def run_until_found_out() -> None:
    """Run as many seeds as may be needed."""
    for seed in range(500, 540):
        ConnectorWorld(seed, ACTS, renews=0.08).run()


@pytest.mark.slow
class TestWeightsWorld:
    @pytest.mark.parametrize("seed", [700, 701, 703, 704])
    def test_no_block_of_former_weights_is_ever_served(self, seed: int) -> None:
        """R-07, R-08, R-10: whatever is loaded, reset and put to sleep, seen or not, on
        any interleaving every block holds what the present weights say."""
        world = ConnectorWorld(seed, ACTS, renews=0.08)
        world.run()
        assert world.seen["loaded_weights"] > 0

    @pytest.mark.parametrize("blind", ["to resets", "to digests"])
    def test_world_shows_what_goes_wrong(
        self, blind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-07: a connector that sees no reset, or takes any digest for the same, is
        found out by wrong content."""
        if blind == "to resets":
            monkeypatch.setattr(OwnCache, "was_emptied", lambda _: False)
            monkeypatch.setattr("ucm.integration.vllm.weights._WRITERS", ())
        else:
            monkeypatch.setattr(Weights, "_named", lambda _: "")
        with pytest.raises(HostAssertionError, match="CONTENT"):
            run_until_found_out()
