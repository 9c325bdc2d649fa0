# SPDX-License-Identifier: Apache-2.0
"""Names of stores and devices lead to classes, or to a remedy."""

import sys
from importlib import metadata
from types import ModuleType

import pytest

from ucm import registry
from ucm.devices.cpu import CPUDevice
from ucm.errors import ConfigError
from ucm.registry import load_class
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore

GROUP = "ucm.stores"


@pytest.fixture
def registered(monkeypatch):
    """Return a function that lets entry points of a group be just those given."""

    def register(**values):
        points = metadata.EntryPoints(
            metadata.EntryPoint(name, value, GROUP) for name, value in values.items()
        )
        monkeypatch.setattr(
            registry, "entry_points", lambda *, group: points.select(group=group)
        )

    return register


class TestLoadClass:
    @pytest.mark.parametrize("name", ["memory", "null", "slab"])
    def test_shipped_store_is_found_by_name(self, name):
        """Each store of this package is registered and is a store."""
        assert issubclass(load_class(GROUP, name, "store.type"), Store)

    def test_shipped_device_is_found_by_name(self):
        """The group decides: devices are not found among stores."""
        assert CPUDevice is load_class("ucm.devices", "cpu", "device")

    def test_unknown_name_lists_the_known_ones(self, registered):
        """A name that nobody registered is refused with all names that are."""
        registered(zeta="a:B", alpha="a:B")
        with pytest.raises(ConfigError) as caught:
            load_class(GROUP, "slabb", "store.type")
        assert ("store.type", "slabb") == (caught.value.key, caught.value.value)
        assert "Registered: ['alpha', 'zeta']." == caught.value.remedy

    def test_only_the_name_asked_for_is_imported(self, registered):
        """A registered class of missing packages harms nobody who does not ask."""
        registered(
            broken="no_such_package:Store", memory="ucm.stores.memory:MemoryStore"
        )
        assert MemoryStore is load_class(GROUP, "memory", "store.type")

    @pytest.mark.parametrize(
        ("value", "remedy"),
        [
            ("no_such_package:Store", "Install what no_such_package:Store needs"),
            ("ucm.no_such:Store", ": pip install '.[mooncake]'."),
        ],
    )
    def test_missing_package_is_named_with_what_to_install(
        self, registered, value, remedy
    ):
        """A registered name whose packages are missing says what to install: an extra of
        ours where the name is ours."""
        registered(mooncake=value)
        with pytest.raises(ConfigError) as caught:
            load_class(GROUP, "mooncake", "store.type")
        assert remedy in caught.value.remedy
        assert isinstance(caught.value.__cause__, ImportError)

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("class Renamed: ...", AttributeError),
            ("class Store(", SyntaxError),
            ("raise RuntimeError('no licence')", RuntimeError),
        ],
    )
    def test_whatever_a_plug_in_raises_is_a_wrong_setting(
        self, registered, monkeypatch, tmp_path, text, error
    ):
        """As of another release, whose class has another name: an agent started again and again
        over it, and a doctor ended."""
        (tmp_path / f"ucm_odd_{error.__name__}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        registered(odd=f"ucm_odd_{error.__name__}:Store")
        with pytest.raises(ConfigError, match=error.__name__) as caught:
            load_class(GROUP, "odd", "store.type")
        assert isinstance(caught.value.__cause__, error)

    def test_name_that_several_registered_is_nobodys(self, monkeypatch):
        """A plug-in that took a name of ours was opened in its place, or was not, by where it lay."""
        values = ["other:Store", "ucm.stores.memory:MemoryStore"]
        for named in (values, values[::-1], values[1:] * 2):
            points = metadata.EntryPoints(
                metadata.EntryPoint("memory", value, GROUP) for value in named
            )
            monkeypatch.setattr(
                registry,
                "entry_points",
                lambda points=points, **of: points.select(**of),
            )
            if len(set(named)) == 1:  # one that is seen twice
                assert MemoryStore is load_class(GROUP, "memory", "store.type")
                continue
            with pytest.raises(ConfigError, match="more than once") as caught:
                load_class(GROUP, "memory", "store.type")
            assert str(values) in caught.value.problem

    def test_what_is_no_class_is_refused(self, registered, monkeypatch):
        """An entry point that leads to something else is refused."""
        module = ModuleType("ucm_odd_store")
        module.factory = lambda: None
        monkeypatch.setitem(sys.modules, "ucm_odd_store", module)
        registered(odd="ucm_odd_store:factory")
        with pytest.raises(ConfigError, match="is not a class"):
            load_class(GROUP, "odd", "store.type")
