# SPDX-License-Identifier: Apache-2.0
"""How the engine comes to know the connector by its name alone."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.e2e.engine import ROOT
from ucm.integration.vllm.plugin import NAME, register
from ucm.integration.vllm.ucm_connector import UCMConnector

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
ASCEND = ("vllm_ascend.distributed.ucm_connector", "UCMConnectorV1")
"""What vllm-ascend's own plugin registers."""


@pytest.fixture
def registry(monkeypatch):
    """Return the engine's table of connectors, as it is before plugins run."""
    known = dict(KVConnectorFactory._registry)
    known.pop(NAME, None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)
    return known


@pytest.fixture
def ascend(tmp_path, monkeypatch):
    """Install a vllm-ascend that must not be imported yet."""
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('too early')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


class TestRegister:
    def test_name_alone_leads_to_the_connector(self, registry):
        """The engine finds our class without a module path, when it wants it."""
        register()
        assert UCMConnector is KVConnectorFactory.get_connector_class_by_name(NAME)

    def test_running_twice_changes_nothing(self, registry):
        """A process may load plugins more than once."""
        register()
        first = registry[NAME]
        register()
        assert first is registry[NAME]

    def test_name_that_is_taken_stays(self, registry):
        """Whoever registered the name before us keeps it."""
        KVConnectorFactory.register_connector(NAME, *ASCEND)
        theirs = registry[NAME]
        register()
        assert theirs is registry[NAME]

    @pytest.mark.usefixtures("ascend")
    @pytest.mark.parametrize("ours_first", [True, False])
    def test_name_is_left_to_an_installed_vllm_ascend(self, registry, ours_first):
        """Its plugin raises into the engine if it finds the name taken; so both
        orders end with its wrapper, and its package is not imported for that."""
        if ours_first:
            register()
        KVConnectorFactory.register_connector(NAME, *ASCEND)
        theirs = registry[NAME]
        register()
        assert theirs is registry[NAME]
        assert "vllm_ascend" not in sys.modules

    def test_module_without_a_spec_counts_as_installed(self, registry, monkeypatch):
        """A package that is being put together is there."""
        monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
        register()
        assert NAME not in registry

    def test_engine_without_a_factory_is_not_disturbed(
        self, registry, monkeypatch, caplog
    ):
        """What goes wrong here is said, and does not end the engine."""
        monkeypatch.setitem(sys.modules, FACTORY, None)
        with caplog.at_level("WARNING", logger="vllm.ucm"):
            register()
        assert NAME not in registry
        assert "UCMConnector is not known by its name alone" in caplog.text


class TestEntryPoint:
    def test_group_of_the_engine_names_the_function(self):
        """What is installed with the package is this function."""
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        group = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
        assert ["ucm"] == list(group)
        point = EntryPoint("ucm", group["ucm"], "vllm.general_plugins")
        assert register is point.load()

    @pytest.mark.slow
    def test_import_is_cheap(self):
        """Engines that use another connector import no torch, engine or door for it."""
        code = (
            "import sys, ucm.integration.vllm.plugin; "
            "print(sorted({'torch', 'vllm', 'structlog', 'anyio', 'numpy'}"
            " & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
            cwd=ROOT,
        )
        assert "[]" == done.stdout.strip()
