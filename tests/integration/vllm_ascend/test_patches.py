# SPDX-License-Identifier: Apache-2.0
"""What ucm puts into vllm-ascend, in a package that has a real release's signatures."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import vllm
import vllm.forward_context
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.golden.make_vllm_ascend_api import make_api
from tests.integration.vllm_ascend.fake_package import GDN, write_package
from tests.integration.vllm_ascend.wrappers import API, PRESENT
from ucm.config import UCMConfig
from ucm.errors import ConfigError, LayoutError
from ucm.integration.vllm import ucm_connector
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.integration.vllm_ascend import patches
from ucm.integration.vllm_ascend.patches import PATCHES, applied, apply, revert

LAYER = "model.layers.0.linear_attn"
ARGUMENTS = ("mixed_qkv", "b", "a", "core_attn_out")
SUPPORTED = [
    version for version in API if "notify_kv_cache_written" in str(API[version])
]


@attrs.define
class Engine:
    """What happens in one forward pass, in order; and what the hooks look at."""

    happened: list[tuple[object, ...]] = attrs.Factory(list)
    metadata: object = None

    def wait_for_layer_load(self, name):
        """Note it."""
        self.happened.append(("load", name))

    def save_kv_layer(self, name, states, metadata):
        """Note it."""
        self.happened.append(("save", name, *states))

    def on_kv_cache_written(self, name=""):
        """Note it."""
        self.happened.append(("written", name))


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Install a release's package, and vLLM's layer beside it; undo all afterwards."""
    write_package(tmp_path, PRESENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    made = Engine()

    class QwenGatedDeltaNetAttention:
        prefix = LAYER
        kv_cache = ("convolution", "recurrent")

        def _forward_core(self, mixed_qkv: str, b: str, a: str, core_attn_out: str):
            made.happened.append(("core", mixed_qkv, b, a, core_attn_out))
            return "result"

    module = ModuleType(GDN)
    module.QwenGatedDeltaNetAttention = QwenGatedDeltaNetAttention
    monkeypatch.setitem(sys.modules, GDN, module)
    monkeypatch.setattr(
        vllm.forward_context,
        "_forward_context",
        SimpleNamespace(attn_metadata=None),
    )
    connectors().append(made)
    yield made
    assert not any(outcome.reason for outcome in revert())
    for name in set(sys.modules) - before:
        if name.startswith("vllm_ascend"):
            del sys.modules[name]


def connectors():
    """Return the list of connectors that the package's hooks call."""
    return importlib.import_module("vllm_ascend.attention.utils").connectors


def layer():
    """Return a new linear-attention layer."""
    return sys.modules[GDN].QwenGatedDeltaNetAttention()


def computes(metadata) -> None:
    """Begin a forward pass."""
    vllm.forward_context.get_forward_context().attn_metadata = metadata


class TestGatedDeltaNet:
    @pytest.mark.parametrize("metadata", [{LAYER: "m"}, [{"other": 1}, {LAYER: "m"}]])
    def test_core_runs_between_load_and_save(self, engine, metadata):
        """S4-25: the layer's load is waited for before its core and its states are
        saved after it, by position or by name, also in micro-batches."""
        with applied() as outcomes:
            computes(metadata)
            assert [""] * len(PATCHES) == [outcome.reason for outcome in outcomes]
            assert "result" == layer()._forward_core(*ARGUMENTS)
            named = dict(zip(ARGUMENTS, ARGUMENTS, strict=True))
            assert "result" == layer()._forward_core(**named)
        once = [
            ("load", LAYER),
            ("core", *ARGUMENTS),
            ("save", LAYER, "convolution", "recurrent"),
        ]
        assert once * 2 == engine.happened

    @pytest.mark.parametrize("metadata", [None, {}, {"other": "m"}, {LAYER: None}, []])
    def test_layer_without_metadata_is_left_alone(self, engine, metadata):
        """S4-26: where this layer computes nothing, nothing is loaded or saved."""
        with applied():
            computes(metadata)
            assert "result" == layer()._forward_core(*ARGUMENTS)
        assert [("core", *ARGUMENTS)] == engine.happened

    @pytest.mark.parametrize(
        ("states", "message"),
        [
            (None, r"kv_cache\[0\] \(its convolution state\): kv_cache is missing"),
            ((), r"kv_cache\[0\] \(its convolution state\): kv_cache is too short"),
            (("c",), r"kv_cache\[1\] \(its recurrent state\): kv_cache is too short"),
        ],
    )
    def test_missing_state_is_named(self, engine, states, message):
        """S4-27: a missing or short ``kv_cache`` is an error with layer and index."""
        made = layer()
        made.kv_cache = states
        computes({LAYER: "m"})
        with applied(), pytest.raises(LayoutError, match=rf"{LAYER}.*{message}"):
            made._forward_core(*ARGUMENTS)
        assert [] == engine.happened

    def test_versions_are_looked_at_only_when_it_is_applied(self, engine, monkeypatch):
        """S4-28: the release counts when the patch is applied and never in a forward
        pass; 0.18, which kept states by virtual engine, is refused."""
        with monkeypatch.context() as patched:
            patched.setattr(vllm, "__version__", "0.18.0")
            with pytest.raises(ConfigError, match=r"0\.18\.0"):
                apply()
        with applied():
            monkeypatch.setattr(vllm, "__version__", "0.18.0")
            computes({LAYER: "m"})  # the context has no virtual_engine
            layer()._forward_core(*ARGUMENTS)
        assert ("save", LAYER, "convolution", "recurrent") == engine.happened[-1]

    def test_nothing_is_imported_in_the_forward_pass(self):
        """S4-29: no function that runs in a forward pass has an import statement."""
        for function in (patches._with_transfers, patches._states):
            assert "import" not in inspect.getsource(function)


class TestWritten:
    def test_written_hook_reaches_the_connector(self, engine):
        """S0-16, S0-17: what an attention back end says, with a layer's name or with
        none, comes through the wrapper only once the patch is in place."""
        path = API[PRESENT]["wrapper"].removesuffix(".py").replace("/", ".")
        wrapper = importlib.import_module(path).UCMConnectorV1(engine)
        connectors()[:] = [wrapper]
        notify = sys.modules["vllm_ascend.attention.utils"].notify_kv_cache_written
        notify("before")
        with applied():
            notify("layer")
            notify()
        notify("after")
        assert [("written", "layer"), ("written", "")] == engine.happened

    def test_real_back_ends_say_it_with_a_name_or_with_none(self):
        """S0-17: the standard back end of each release gives no name; others do."""
        for version in SUPPORTED:
            written = API[version]["written"]
            assert ["notify_kv_cache_written()"] == written["attention_v1.py"]
            assert any("layer_name" in str(calls) for calls in written.values())


class TestApplying:
    def test_apply_and_revert_leave_nothing(self, engine):
        """Applied twice is applied once; reverted, every class is as it was."""
        owner = sys.modules[GDN].QwenGatedDeltaNetAttention
        before = dict(vars(owner))
        assert apply() == apply()
        assert before != dict(vars(owner))
        assert ["written", "gdn"] == [outcome.name for outcome in revert()]
        assert before == dict(vars(owner))
        assert [] == revert()

    def test_method_of_others_is_not_reverted(self, engine):
        """A method that somebody else replaced after us stays, and we say so."""
        owner = sys.modules[GDN].QwenGatedDeltaNetAttention
        apply()
        ours, theirs = owner._forward_core, lambda self: None
        owner._forward_core = theirs
        (outcome,) = [one for one in revert() if one.name == "gdn"]
        assert "_forward_core was replaced" in outcome.reason
        assert theirs is owner._forward_core
        owner._forward_core = ours

    def test_other_signature_is_refused_and_the_rest_holds(self, engine):
        """S4-30: a method that takes other arguments is left as it is, with both
        signatures in the reason; the model runs, and the other patch holds."""
        owner = sys.modules[GDN].QwenGatedDeltaNetAttention
        owner._forward_core = other = lambda self, mixed_qkv, state: "other"
        with applied() as (gdn, written):
            assert "expected (self, mixed_qkv, b, a, core_attn_out)" in gdn.reason
            assert "found (self, mixed_qkv, state)" in gdn.reason
            assert "" == written.reason
            computes({LAYER: "m"})
            assert "other" == layer()._forward_core(1, 2)
        assert other is owner._forward_core
        assert [] == engine.happened

    def test_other_hook_of_vllm_ascend_is_refused(self, engine, monkeypatch):
        """S4-30: a function that we would call with wrong arguments is found first."""
        utils = sys.modules["vllm_ascend.attention.utils"]
        name = "wait_for_kv_layer_from_connector"
        monkeypatch.setattr(utils, name, lambda layer_name, index: None)
        with applied() as (gdn, _):
            assert f"{name}: expected (layer_name)" in gdn.reason
            assert "found (layer_name, index)" in gdn.reason

    def test_class_that_is_gone_is_refused(self, engine):
        """S4-30: a class that a release renamed is no crash."""
        del sys.modules[GDN].QwenGatedDeltaNetAttention
        with applied() as (gdn, _):
            assert gdn.reason.endswith("QwenGatedDeltaNetAttention does not exist")

    def test_hook_that_exists_is_not_overwritten(self, engine):
        """A wrapper that already passes the hook on keeps its own."""
        path = API[PRESENT]["wrapper"].removesuffix(".py").replace("/", ".")
        wrapper = importlib.import_module(path).UCMConnectorV1
        wrapper.on_kv_cache_written = theirs = lambda self, layer_name: None
        with applied() as (_, written):
            assert "expected None, found (self, layer_name)" in written.reason
            assert theirs is wrapper.on_kv_cache_written

    def test_missing_module_is_named_and_nothing_is_changed(self, engine, monkeypatch):
        """S4-29: a module that cannot be imported stops ``apply`` with its name."""
        name = "vllm_ascend.attention.utils"
        monkeypatch.setitem(sys.modules, name, None)
        owner = sys.modules[GDN].QwenGatedDeltaNetAttention
        before = dict(vars(owner))
        with pytest.raises(ConfigError, match=f"module {name} cannot be imported"):
            apply()
        assert before == dict(vars(owner))


@pytest.mark.parametrize("version", SUPPORTED)
def test_patches_expect_what_releases_have(version):
    """Names and signatures are those of each release's own sources."""
    said = API[version]
    gdn, written = PATCHES
    assert said["core"][gdn.owner.replace(":", ".")].startswith("vllm_ascend.ops.gdn")
    assert gdn.takes == said["core"]["takes"].replace("(", "(self, ")
    utils = {
        at.partition(":")[2]: takes
        for at, takes in gdn.uses.items()
        if at.startswith("vllm_ascend")
    }
    assert utils.items() <= said["hooks"].items()
    module = written.owner.partition(":")[0].replace(".", "/")
    assert said["wrapper"] in (f"{module}.py", f"{module}/connector.py")
    assert written.method not in said["methods"]


def test_vllm_itself_has_what_is_patched():
    """The installed vLLM has the method that vllm-ascend replaces, as we expect it."""
    module = importlib.util.find_spec(GDN)
    assert module is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    assert "class QwenGatedDeltaNetAttention(" in source
    assert "def _forward_core(\n" in source


def test_importing_patches_nothing(engine):
    """S3-11: a fresh import of the module neither imports more of vllm-ascend nor
    changes a class."""
    owner = sys.modules[GDN].QwenGatedDeltaNetAttention
    before = dict(vars(owner)), set(sys.modules)
    spec = importlib.util.spec_from_file_location("patches_again", patches.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert before == (dict(vars(owner)), set(sys.modules))


def test_api_is_read_from_sources(tmp_path):
    """Wrapper, hooks, callers and the replaced core are all found."""
    files = {
        "_version.py": "__version__ = version = '1.2'",
        "distributed/kv_transfer/kv_pool/ucm_connector.py": "class UCMConnectorV1:\n"
        "  def __init__(self, config, role):\n"
        "    ImplCls = UCMConnector\n"
        "    self._ucm_engine = ImplCls(config, role)\n"
        "  def save(self, name):\n"
        "    return self._ucm_engine.save(name)",
        "attention/utils.py": "def notify_kv_cache_written(layer_name=''): ...\n"
        "def other(): ...",
        "attention/back_end.py": "notify_kv_cache_written(name)",
        "patch/worker/patch_model.py": "from vllm.layer import Layer as Base\n"
        "from vllm_ascend.ops.gdn import Ours\n"
        "TARGET = Base\nTARGET._forward_core = Ours._forward_core",
        "ops/gdn.py": "class Ours:\n  def _forward_core(self, a, b=1): ...",
    }
    for name, text in files.items():
        path = tmp_path / "vllm_ascend" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert (
        "1.2",
        {
            "wrapper": "vllm_ascend/distributed/kv_transfer/kv_pool/ucm_connector.py",
            "methods": {
                "__init__": {
                    "takes": "(config, role)",
                    "calls": ["ImplCls(config, role)"],
                },
                "save": {"takes": "(name)", "calls": ["self._ucm_engine.save(name)"]},
            },
            "hooks": {"notify_kv_cache_written": "(layer_name='')"},
            "written": {"back_end.py": ["notify_kv_cache_written(name)"]},
            "core": {
                "vllm.layer.Layer": "vllm_ascend.ops.gdn.Ours",
                "takes": "(a, b=1)",
            },
        },
    ) == make_api(tmp_path)


class TestSetting:
    def build(self, monkeypatch, **settings):
        """Build a worker's connector of an engine with these settings of ours."""
        monkeypatch.setattr(ucm_connector, "WorkerHalf", lambda *_: None)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0),
            device_config=SimpleNamespace(device_type="npu"),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
        )
        setup = SimpleNamespace(
            config=UCMConfig.from_mapping(settings),
            mode=SimpleNamespace(is_mock=False),
        )
        monkeypatch.setattr(UCMConnector, "_make_setup", lambda *_: setup)
        UCMConnector(config, KVConnectorRole.WORKER, object())

    def test_nothing_is_patched_unless_asked_for(self, engine, monkeypatch):
        """S3-11: the connector of a worker changes nothing by default."""
        before = dict(vars(sys.modules[GDN].QwenGatedDeltaNetAttention))
        self.build(monkeypatch)
        assert before == dict(vars(sys.modules[GDN].QwenGatedDeltaNetAttention))

    def test_setting_applies_the_patches(self, engine, monkeypatch):
        """S4-25: with ``patch_vllm_ascend`` the worker's connector puts them in."""
        self.build(monkeypatch, patch_vllm_ascend=True)
        computes({LAYER: "m"})
        layer()._forward_core(*ARGUMENTS)
        assert ("load", LAYER) == engine.happened[0]

    def test_refused_patch_is_a_warning(self, engine, monkeypatch):
        """S4-30: a patch that does not fit is told with the reason, and the worker
        starts."""
        told = []
        monkeypatch.setattr(
            ucm_connector.logger, "warning", lambda *said: told.append(said)
        )
        owner = sys.modules[GDN].QwenGatedDeltaNetAttention
        owner._forward_core = lambda self, other: None
        self.build(monkeypatch, patch_vllm_ascend=True)
        ((_, name, reason),) = told
        assert "gdn" == name
        assert "found (self, other)" in reason
