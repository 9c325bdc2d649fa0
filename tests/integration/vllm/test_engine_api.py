# SPDX-License-Identifier: Apache-2.0
"""
The door, compared with every release of vLLM that it claims to fit.

One release is installed here. What all others offer and call is written down in
``tests/golden/vllm_api.json``, made from their wheels.
"""

import ast
import inspect
import json
from pathlib import Path

import pytest
import vllm

from tests.golden.make_vllm_api import ranges, unfold
from tests.integration.vllm.engine_api import (
    VERSIONS,
    api_of,
    calls_of,
    missing,
    reads_of,
)
from ucm.integration.vllm import compat
from ucm.integration.vllm.sources import read_api
from ucm.integration.vllm.ucm_connector import INHERITED_ON_PURPOSE, UCMConnector

DOOR = Path(compat.__file__).parent
MODULES = sorted(path for path in DOOR.glob("*.py") if path.name != "compat.py")
READS = {
    read: place
    for path in MODULES
    for read, place in reads_of(path, path.read_text(encoding="utf-8")).items()
}
LEFT_TO_OLDER_BASES = {
    "prefer_cross_layer_blocks": "False: every layer is registered by itself",
    "register_cross_layers_kv_cache": "called only where the former is True",
}
"""Hooks that vLLM has dropped."""

NOT_REACHED = {
    ("SlidingWindowSpec", "extra_retained_tokens"),
    ("KVCacheSpec", "state_content_size_bytes"),
}
"""Read of groups that ``compat.check_groups`` refuses on releases without it."""


def minor(version: str) -> tuple[int, int]:
    """Return the two numbers that ``SUPPORTED`` speaks of."""
    first, second, *_ = version.split(".")
    return int(first), int(second)


def test_every_release_of_the_range_is_written_down() -> None:
    """S3-01: the range has no release between its ends that was not looked at."""
    (major, first), (_, last) = compat.SUPPORTED
    assert [(major, at) for at in range(first, last + 1)] == sorted(
        {minor(version) for version in VERSIONS}
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_of_the_engine_binds(version: str) -> None:
    """Whatever a release calls, with the arguments it gives, our method accepts."""
    refused = []
    for name, call in calls_of(version):
        hook = getattr(UCMConnector, name, None)
        if hook is None or isinstance(hook, property):
            continue
        words = {word.arg: word for word in call.keywords if word.arg is not None}
        bound = [] if inspect.ismethod(hook) or name == "aggregate" else ["self"]
        try:
            inspect.signature(hook).bind(*bound, *call.args, **words)
        except TypeError as exc:
            refused.append(f"{name}{ast.unparse(call)[1:]}: {exc}")
    assert [] == refused


@pytest.mark.parametrize("version", VERSIONS)
def test_every_hook_of_a_release_is_ours_or_left_on_purpose(version: str) -> None:
    """S3-03: no hook of any release falls silently to a base that does nothing."""
    named = UCMConnector.__dict__.keys() | INHERITED_ON_PURPOSE.keys()
    hooks = {
        member
        for owner in ("KVConnectorBase_V1", "SupportsHMA")
        for name in api_of(version)
        if name.startswith(f"{owner}.")
        and not (member := name.partition(".")[2]).startswith("_")
    }
    assert set() == hooks - named - LEFT_TO_OLDER_BASES.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_whatever_the_door_reads_is_there(version: str) -> None:
    """Outside of ``compat`` only what every supported release offers is read."""
    has_groups = minor(version) >= compat.FEATURES["failed_requests"].since
    assert set() == missing(READS, version) - (set() if has_groups else NOT_REACHED)


def test_reads_are_seen() -> None:
    """Arguments, loops, tuples and values of values are all followed."""
    assert {
        ("KVCacheConfig", "kv_cache_groups"),
        ("KVConnectorOutput", "finished_recving"),
        ("SchedulerOutput", "preempted_req_ids"),
        ("NewRequestData", "num_computed_tokens"),
        ("CachedRequestData", "resumed_req_ids"),
        ("VllmConfig", "kv_transfer_config"),
        ("KVTransferConfig", "kv_load_failure_policy"),
        ("CacheConfig", "prefix_caching_hash_algo"),
        ("Request", "block_hashes"),
    } <= READS.keys()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("running.py", "output.preempted_req_ids", "output.preempted_ids"),
        ("scheduler.py", "output.finished_sending", "output.finished_saving"),
        ("running.py", "new.num_computed_tokens", "new.computed_tokens"),
        ("running.py", "cached.resumed_req_ids", "cached.resumed"),
        ("layout.py", "config.kv_cache_groups", "config.groups"),
        ("keyspace.py", "model.quantization", "model.quantisation"),
    ],
)
def test_spoilt_door_is_found(name: str, right: str, wrong: str) -> None:
    """A wrong attribute of the engine's is found for a release nobody has installed."""
    source = (DOOR / name).read_text(encoding="utf-8")
    spoilt = source.replace(right, wrong)
    assert source != spoilt
    assert missing(reads_of(DOOR / name, spoilt), VERSIONS[0])


def test_the_installed_release_is_told_truly() -> None:
    """What is written down of the installed release is what it has."""
    version, found = read_api(Path(vllm.__file__).parents[1])
    if version not in VERSIONS:
        pytest.skip(f"vLLM {version} is not written down")
    assert found == {name: set(texts) for name, texts in api_of(version).items()}


def test_ranges_of_versions_are_read_back() -> None:
    """A version that lacks a name in the middle of the range is not lost."""
    known = ["1.0", "1.1", "1.2", "1.3"]
    assert "1.0-1.1 1.3" == ranges(["1.0", "1.1", "1.3"], known)
    assert ["1.0", "1.1", "1.3"] == unfold("1.0-1.1 1.3", known)


def test_api_is_read_from_sources(tmp_path: Path) -> None:
    """Fields, properties, constructors and the engine's calls are all found."""
    base = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
    files = {
        "vllm/_version.py": "__version__ = version = '1.2.0'",
        base: "class KVConnectorBase_V1(ABC):\n"
        "  kind: int = 1\n"
        "  @property\n"
        "  def role(self) -> int: ...\n"
        "  def __init__(self, config, *, more=None):\n"
        "    self.config = config\n"
        "  def save(self, name: str, **kwargs): ...",
        "vllm/v1/core/sched/scheduler.py": "self.connector.save(1, *rest, name=2)\n"
        "self.ec_connector.save()\nother.save(3)",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert (
        "1.2.0",
        {
            "KVConnectorBase_V1": {"ABC"},
            "KVConnectorBase_V1.kind": {"int"},
            "KVConnectorBase_V1.role": {"-> int"},
            "KVConnectorBase_V1.config": {"attribute"},
            "KVConnectorBase_V1.__init__": {"(config, *, more=None)"},
            "KVConnectorBase_V1.save": {"(name, **kwargs)"},
            "call save": {"(_, *_, name=_)"},
        },
    ) == read_api(tmp_path)
    assert json.dumps(VERSIONS)
