# SPDX-License-Identifier: Apache-2.0
"""The real engine against the grammar of the fake host."""

from pathlib import Path

from tests.e2e.hook_trace import record


class TestTrace:
    def test_real_run_passes_the_rules_of_the_fake_host(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """H-01, H-02: whatever order the engine of today calls the hooks in, the fake
        host knows it; every load and every delayed free is told once."""
        calls = record(llama, tmp_path / "slab").calls
        assert {"preempted", "external", "received", "sent"} <= {
            field for call in calls for field, value in call.told.items() if value
        }
