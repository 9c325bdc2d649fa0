# SPDX-License-Identifier: Apache-2.0
"""
What the NPU driver says to torch_npu, compared with torch_npu's own sources.

No machine of ours can run torch_npu. What its wheels offer is written down in
``tests/golden/torch_npu_api.json``; the driver is read as a syntax tree.
"""

import ast
import inspect
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.devices.fake_torch_npu import VERSION, FakeNpu
from tests.golden.make_torch_npu_api import NATIVE, make_api, parse_signature
from ucm.devices import npu

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "torch_npu_api.json"
API: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
VERSIONS = API["torch_npu.__version__"][NATIVE].split()
DRIVER = Path(npu.__file__).read_text(encoding="utf-8")

ROOTS = {
    "torch_npu": "torch_npu",
    "_import_torch_npu(index)": "torch_npu",
    "event": "torch_npu.npu.Event",
    "stream": "torch_npu.npu.Stream",
}
"""What the driver's variables are; attributes of ``self`` follow from assignments."""
RETURNS = {"torch_npu.npu.npurt": "torch_npu._C._npurt"}
"""What functions return of which something is used."""
OF_TORCH = {
    "torch_npu.npu.Event.event_id": torch.Event.event_id,
    "torch_npu.npu.Event.device.index": torch.device.index,
    "torch_npu.npu.Event.device.type": torch.device.type,
    "torch_npu.npu.Stream.stream_id": torch.Stream.stream_id,
}
"""What is torch's own: of the base of events, and of what they say."""
CANNOT_PIN = {"2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0"}
"""Versions without what ``pin`` and ``unpin`` need; patch releases brought it."""
FOR_PINNING = {
    "torch_npu._C._npurt",
    "torch_npu.npu.npurt",
    "torch_npu._C._npurt.npuHostRegister",
    "torch_npu._C._npurt.npuHostUnregister",
}


def api_of(version: str) -> dict[str, str]:
    """Return name to signature of one version."""
    return {
        name: signature
        for name, kinds in API.items()
        for signature, versions in kinds.items()
        if version in versions.split()
    }


class Uses:
    """Every name of torch_npu in a source, and every call of one."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._roots = dict(ROOTS)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and (name := self.resolve(node.value)):
                self._roots[ast.unparse(node.targets[0])] = name

    def resolve(self, node: ast.expr) -> str | None:
        """Return what an expression is, as torch_npu names it."""
        if known := self._roots.get(ast.unparse(node)):
            return known
        if isinstance(node, ast.Attribute) and (owner := self.resolve(node.value)):
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "getattr":
                owner, name = self.resolve(node.args[0]), ast.literal_eval(node.args[1])
                return owner and f"{owner}.{name}"
            return RETURNS.get(self.resolve(node.func) or "")
        return None

    def names(self) -> set[str]:
        """Return all names."""
        nodes = ast.walk(self._tree)
        found = (self.resolve(node) for node in nodes if isinstance(node, ast.expr))
        return {name for name in found if name is not None}

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Yield what is called, and how."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and (name := self.resolve(node.func)):
                yield name, node


def unknown_names(uses: Uses, api: dict[str, str]) -> set[str]:
    """Return what a version does not have; packages are there if something in them is."""
    return {
        name
        for name in uses.names()
        if name not in OF_TORCH
        and name not in api
        and not any(known.startswith(f"{name}.") for known in api)
    }


def wrong_calls(uses: Uses, api: dict[str, str]) -> list[str]:
    """Return calls that a function would refuse."""
    found = []
    for name, call in uses.calls():
        if api.get(name, NATIVE) == NATIVE:
            continue
        keywords = {word.arg or "**": word.value for word in call.keywords}
        try:
            parse_signature(api[name]).bind(*call.args, **keywords)
        except TypeError as exc:
            found.append(f"{ast.unparse(call)}: {exc}")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_driver_uses_only_what_torch_npu_offers(version: str) -> None:
    """Every name exists and every call binds; only pinning may be missing."""
    uses, api = Uses(DRIVER), api_of(version)
    missing = FOR_PINNING if version in CANNOT_PIN else set()
    assert missing == unknown_names(uses, api)
    assert [] == wrong_calls(uses, api)


def test_everything_that_the_driver_uses_is_seen() -> None:
    """The names found in the driver are these and no fewer."""
    assert {
        "torch_npu",
        "torch_npu.__version__",
        "torch_npu._C._npurt",
        "torch_npu._C._npurt.npuHostRegister",
        "torch_npu._C._npurt.npuHostUnregister",
        "torch_npu.get_npu_format",
        "torch_npu.npu",
        "torch_npu.npu.Event",
        "torch_npu.npu.Event.device",
        "torch_npu.npu.Event.device.index",
        "torch_npu.npu.Event.device.type",
        "torch_npu.npu.Event.event_id",
        "torch_npu.npu.Event.npu_event",
        "torch_npu.npu.Event.query",
        "torch_npu.npu.Event.record",
        "torch_npu.npu.Stream",
        "torch_npu.npu.Stream.stream_id",
        "torch_npu.npu.Stream.wait_event",
        "torch_npu.npu.current_stream",
        "torch_npu.npu.device",
        "torch_npu.npu.device_count",
        "torch_npu.npu.get_device_name",
        "torch_npu.npu.is_available",
        "torch_npu.npu.is_current_stream_capturing",
        "torch_npu.npu.npurt",
        "torch_npu.npu.set_device",
        "torch_npu.npu.stream",
        "torch_npu.npu.synchronize",
        "torch_npu.npu.utils",
        "torch_npu.npu.utils.get_cann_version",
    } == Uses(DRIVER).names()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self._npu.synchronize(self.index)", "self._npu.synchronise(self.index)"),
        ("self._npu.synchronize(self.index)", "self._npu.synchronize(self.index, 1)"),
        ("self._npu.Event()", "self._npu.Event(spin=False)"),
        ("self._npu.Stream(self.index)", "self._npu.Stream(self.index, 0, 0)"),
        ("event.record(stream)", "event.record(stream, 0)"),
        ("stream.wait_event(event)", "stream.wait_event()"),
        ("event.npu_event", "event.cuda_event"),
        ('(event, "device", None)', '(event, "place", None)'),
        (".npuHostRegister(", ".npuHostRegistration("),
        ("self._npu.utils.get_cann_version()", "self._npu.get_cann_version()"),
        ("self._npu = self._torch_npu.npu", "self._npu = self._torch_npu.cuda"),
    ],
)
def test_spoilt_driver_is_rejected(right: str, wrong: str) -> None:
    """A wrong name or argument anywhere in the driver is found without hardware."""
    spoilt = DRIVER.replace(right, wrong)
    uses, api = Uses(spoilt), api_of("2.13.0")
    assert DRIVER != spoilt
    assert unknown_names(uses, api) or wrong_calls(uses, api)


def test_fake_has_the_signatures_of_the_real_ones() -> None:
    """The tests' own torch_npu has all that the driver calls, with the same arguments."""
    used = Uses(DRIVER).names() | {"torch_npu.npu.Event.wait"}
    api = api_of(VERSION)
    real = {
        name: shape(parse_signature(api[name]))
        for name in used
        if api.get(name, NATIVE) != NATIVE
    }
    runtime = FakeNpu()
    owners = {
        "torch_npu.npu": runtime,
        "torch_npu.npu.Event": runtime.Event(),
        "torch_npu.npu.Stream": runtime.Stream(),
        "torch_npu.npu.utils": runtime.utils,
    }
    fake = {
        f"{owner}.{name}": shape(inspect.signature(member))
        for owner, thing in owners.items()
        for name, member in inspect.getmembers(thing, callable)
        if not name.startswith("_")
    }
    assert real == fake


def shape(signature: inspect.Signature) -> list[tuple[str, object, bool]]:
    """Return names, kinds and whether there is a default."""
    return [
        (item.name, item.kind, item.default is inspect.Parameter.empty)
        for item in signature.parameters.values()
    ]


def test_api_is_read_from_a_wheel(tmp_path: Path) -> None:
    """Functions, star imports, constructors, methods and words in C are all found."""
    wheel = tmp_path / "torch_npu.whl"
    files = {
        "version.py": "__version__ = '1.2'",
        "npu/__init__.py": "__all__ = ['far', 'near', 'Event', 'gone']\n"
        "from .utils import *\nfrom .streams import Event\n"
        "def near(a: int, /, b=1, *rest, c, d=2, **more) -> int: ...",
        "npu/utils.py": "__all__ = ['far']\ndef far(x=None): ...\ndef other(): ...",
        "npu/streams.py": "class Event(Base):\n"
        "  def __new__(cls, enable_timing=False): ...\n"
        "  def record(self, stream): ...\n"
        "  def _hidden(self): ...",
        "lib/libtorch_npu.so": "\0aclrt_npu_event\0npuHostRegistered\0",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"torch_npu/{name}", text)
    assert (
        "1.2",
        {
            "torch_npu.__version__": NATIVE,
            "torch_npu.npu.Event": "enable_timing=False",
            "torch_npu.npu.Event.npu_event": NATIVE,
            "torch_npu.npu.Event.record": "stream",
            "torch_npu.npu.far": "x=None",
            "torch_npu.npu.near": "a, /, b=1, *rest, c, d=2, **more",
            "torch_npu.npu.utils.far": "x=None",
        },
    ) == make_api(wheel)
    signature = parse_signature("a, /, b=1, *rest, c, d=2, **more")
    assert "(a, /, b='1', *rest, c, d='2', **more)" == str(signature)
