# SPDX-License-Identifier: Apache-2.0
"""Which releases of the engine are taken, and how one that nobody tried is tried."""

import attrs
import pytest
import structlog
import vllm

from tests.integration.vllm.engine_api import VERSIONS, api_of
from tests.integration.vllm.kit import engine_config, plain_cache
from ucm.errors import ConfigError
from ucm.integration.vllm import compat, release
from ucm.integration.vllm.compat import SUPPORTED, as_text
from ucm.integration.vllm.release import check_version
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.trial import Offer
from ucm.tracing import ENGINE_UNTRIED

NEWEST = api_of(VERSIONS[-1])


@pytest.fixture
def running(monkeypatch):
    """Return a function that makes another release the installed one."""
    return lambda version: monkeypatch.setattr(vllm, "__version__", version)


@pytest.fixture
def events():
    """Capture what is logged, and leave structlog as a host that never set it up."""
    with structlog.testing.capture_logs() as captured:
        yield captured
    structlog.reset_defaults()


def offer(drop=(), abstract=(), **changed):
    """Return what the newest release offers, with differences."""
    names = {name: texts for name, texts in NEWEST.items() if name not in drop}
    return Offer(names | changed, abstract)


class TestKnown:
    @pytest.mark.parametrize("version", [*VERSIONS, "0.29.4", "0.32.1.dev3+cpu"])
    def test_known_release_is_taken(self, running, version):
        """Any build of a minor release whose hooks were tested is taken unseen."""
        running(version)
        assert "" == check_version(lambda: pytest.fail("is not compared"))

    def test_release_33_is_known(self):
        """What users install today is in the range."""
        assert ((0, 23), (0, 33)) == SUPPORTED

    @pytest.mark.parametrize("version", ["0.22.9", "dev", ""])
    def test_older_release_is_refused_with_those_known(self, running, version):
        """An engine from before the known ones is refused at start-up, by name."""
        running(version)
        with pytest.raises(ConfigError) as caught:
            check_version(lambda: pytest.fail("is not compared"))
        assert ("vllm", version) == (caught.value.key, caught.value.value)
        first, last = map(as_text, SUPPORTED)
        assert f"Install vLLM {first} to {last}" in caught.value.remedy


class TestUntried:
    @pytest.mark.parametrize("version", ["0.99.0", "1.0.0", "0.99.0.dev3+gabc"])
    def test_release_without_a_difference_is_taken_with_a_warning(
        self, running, version
    ):
        """A release that nobody tried starts if it has all that is needed."""
        running(version)
        said = check_version(offer)
        assert f"not with {version}" in said
        assert "hooks and" in said

    def test_new_hook_is_named_and_taken(self, running):
        """A hook that we do not know is left to the base, and named."""
        running("0.99.0")
        name = "KVConnectorBase_V1.on_moon"
        assert f"{name} is new" in check_version(lambda: offer(**{name: {"()"}}))

    def test_difference_is_refused_by_name_and_remedy(self, running):
        """Each thing that differs is named, and what to install instead."""
        running("0.99.0")
        gone = ["SchedulerOutput.preempted_req_ids", "KVConnectorBase_V1.wait_for_save"]
        with pytest.raises(ConfigError) as caught:
            check_version(lambda: offer(drop=gone))
        assert all(f"{name} is gone" in str(caught.value) for name in gone)
        assert "Install vLLM" in caught.value.remedy

    def test_sources_that_cannot_be_read_are_refused(
        self, running, monkeypatch, tmp_path
    ):
        """An engine of which nothing can be known is not tried."""
        running("0.99.0")
        release.running.cache_clear()
        monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
        with pytest.raises(ConfigError, match="cannot be compared: FileNotFound"):
            check_version()

    @pytest.mark.slow
    def test_the_running_engine_is_read(self):
        """What is compared is what is installed, hooks without a body included."""
        release.running.cache_clear()
        found = release.running()
        assert {"start_load_kv", "wait_for_save"} <= set(found.abstract)
        assert found.names == api_of(vllm.__version__.partition("+")[0])

    def test_the_scheduler_warns_of_it_once(
        self, running, monkeypatch, tmp_path, events
    ):
        """The warning is an event of the scheduler's log, and of no worker's."""
        running("0.99.0")
        monkeypatch.setattr(release, "running", offer)
        (tmp_path / "config.json").write_text("{}")
        config = engine_config(str(tmp_path), weights_revision="1")
        setup = Setup.of(config, plain_cache())
        setup.open_log("worker-0")
        assert [] == events
        setup.open_log("scheduler")
        assert [(ENGINE_UNTRIED, "warning")] == [
            (event["event"], event["log_level"]) for event in events
        ]
        assert "0.99.0" in events[0]["reason"]

    def test_known_release_warns_of_nothing(self, tmp_path):
        """The installed release is one of those known."""
        (tmp_path / "config.json").write_text("{}")
        config = engine_config(str(tmp_path), weights_revision="1")
        setup = Setup.of(config, plain_cache())
        assert "" == setup.untried
        assert "odd" == attrs.evolve(setup, untried="odd").untried


def test_features_of_an_untried_release_are_the_newest_ones(running):
    """What a newer release is spoken to with is the language of the newest known."""
    running("0.99.0")
    assert all(compat.has(name) for name in compat.FEATURES)
