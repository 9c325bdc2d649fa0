# SPDX-License-Identifier: Apache-2.0
"""The engine's own settings, as far as they decide what becomes of blocks."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import attrs

from ucm.configuration.engine import CONNECTOR
from ucm.doctor.findings import Finding, fine, note, refused, warning, wrong
from ucm.errors import ConfigError
from ucm.integration.vllm.modes import ROLES
from ucm.integration.vllm.preflight import FIXED_HASHES_SINCE, SUPPORTED, check_hashes

__all__ = [
    "EngineFacts",
    "check_connector",
    "check_engine",
    "check_policy",
    "check_role",
]

_POLICY = "kv_load_failure_policy"
_POLICIES = ["recompute", "fail"]
_ROLE = "kv_role"
_NAME, _MODULE = "kv_connector", "kv_connector_module_path"


@attrs.frozen(kw_only=True)
class EngineFacts:
    """
    What the engine is started with.

    Args:
        transfer: Its ``kv-transfer-config``; None if nobody gave it.
        version: Of vLLM; empty if it is not installed.
        hash_algorithm: Its ``prefix_caching_hash_algo``.
        hash_seed: ``PYTHONHASHSEED``, empty when unset.
        writes_back: A consumer is to save what it decodes.
        hit_ratio: Share of hits that are made up; None: none.
    """

    transfer: Mapping[str, object] | None = None
    version: str = ""
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    writes_back: bool = False
    hit_ratio: float | None = None


def check_engine(facts: EngineFacts) -> Iterator[Finding]:
    """Say what the engine would make of it."""
    yield from _check_transfer(facts.transfer)
    if facts.hit_ratio is not None:
        yield wrong(
            "engine",
            f"hit_ratio is {facts.hit_ratio:g}: hits are made up, nothing is saved or loaded, and the "
            "output is garbage",
            "Leave it out to serve: it is for sizing only.",
        )
    if facts.transfer is not None:
        try:
            check_connector(facts.transfer)
            check_role(facts.transfer)
        except ConfigError as exc:
            yield refused("engine", exc)
        else:
            role = str(facts.transfer.get(_ROLE, "kv_both"))
            yield from _tell_role(role, writes_back=facts.writes_back)
    release = _release(facts.version)
    yield _check_version(facts.version, release)
    try:
        check_hashes(
            facts.hash_algorithm,
            facts.hash_seed,
            are_fixed=release is None or release >= FIXED_HASHES_SINCE,
        )
    except ConfigError as exc:
        yield refused("hashes", exc)
    else:
        yield fine("hashes", f"{facts.hash_algorithm} is the same in every process")


def _check_transfer(transfer: Mapping[str, object] | None) -> Iterator[Finding]:
    if transfer is None:
        yield note(
            "engine",
            "nobody said how the engine is started, so its settings were not looked at",
            "Name --file or --kv-transfer-config.",
        )
        return
    policy = transfer.get(_POLICY, "fail")
    if policy != "recompute":
        given = (
            f"is {policy!r}" if _POLICY in transfer else "is left out, that is 'fail'"
        )
        yield wrong(
            "engine",
            f"{_POLICY} {given}: a load that fails ends its request with an error",
            f'Set "{_POLICY}": "recompute" in kv-transfer-config.',
        )
    else:
        yield fine("engine", f"{_POLICY} is recompute")


def check_policy(transfer: Mapping[str, object]) -> None:
    """
    Refuse a policy for loads that fail which an engine does not know.

    Raises:
        ConfigError: Names those that there are.
    """
    policy = transfer.get(_POLICY, _POLICIES[0])
    if policy not in _POLICIES:
        remedy = f"Use one of {_POLICIES}."
        raise ConfigError(_POLICY, policy, "unknown value", remedy)


def check_connector(transfer: Mapping[str, object]) -> None:
    """
    Refuse what has an engine serve without ucm, or not start since it does not find it.

    Raises:
        ConfigError: No connector is named, or a module that is not there.
    """
    remedy = f'Set "{_NAME}": "{CONNECTOR}".'
    if _NAME not in transfer:
        raise ConfigError(_NAME, None, "missing: the engine serves without ucm", remedy)
    module = transfer.get(_MODULE)
    if module is not None and not _is_there(str(module)):
        remedy = "Leave it out, or use ucm.integration.vllm.ucm_connector."
        raise ConfigError(_MODULE, module, "there is no such module here", remedy)


def _is_there(module: str) -> bool:
    """Return whether a module can be found; of a package of others only that is looked for."""
    package = module.partition(".")[0]
    try:
        return find_spec(module if package == "ucm" else package) is not None
    except (ImportError, ValueError):
        return False


def check_role(transfer: Mapping[str, object]) -> None:
    """
    Refuse a role that an engine does not know, or none beside a connector.

    Raises:
        ConfigError: Names those that there are.
    """
    is_needed = _NAME in transfer
    role = transfer.get(_ROLE, None if is_needed else "kv_both")
    if role not in [*ROLES]:
        problem = "unknown value" if _ROLE in transfer else "missing"
        raise ConfigError(_ROLE, role, problem, f"Use one of {[*ROLES]}.")


def _tell_role(role: str, *, writes_back: bool) -> Iterator[Finding]:
    if role != "kv_both":
        kind = _WRITING_BACK if writes_back and role == _CONSUMER else role
        yield warning(
            "engine",
            f"kv_role is {role!r}: this engine {_HALVES[kind]}",
            "Use kv_both, unless another engine does the other half.",
        )
    if writes_back and role != _CONSUMER:
        yield note(
            "engine",
            f"consumer_saves_decoded says nothing here: kv_role is {role!r}",
            f"Leave it out, or use {_CONSUMER}.",
        )


_CONSUMER, _WRITING_BACK = "kv_consumer", "kv_consumer that writes back"
_HALVES = {
    "kv_producer": "saves and never loads",
    _CONSUMER: "loads, never saves",
    _WRITING_BACK: "loads, and saves what it decodes, but no prompts",
}


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _check_version(version: str, release: tuple[int, int] | None) -> Finding:
    first, last = SUPPORTED
    known = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    if release is None:
        return note("engine", "vLLM is not installed here, or tells no release")
    if release < first:
        return wrong(
            "engine", f"vLLM {version} is too old", f"Install vLLM {known} or newer."
        )
    if release > last:
        return warning(
            "engine",
            f"ucm was tried with vLLM {known}, not with {version}",
            "Look at the log of its start: it says what of the engine differs.",
        )
    return fine("engine", f"vLLM {version} is one that ucm was tried with")
