# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of an engine's settings."""

import pytest

from ucm.doctor.engine import EngineFacts, check_engine
from ucm.doctor.findings import Severity

MODULE = "kv_connector_module_path"
ROLE = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
GOOD_POLICY = {"kv_load_failure_policy": "recompute"}
GOOD = {**ROLE, **GOOD_POLICY}


def found(severity=Severity.WRONG, **facts):
    """Return what is found of this severity, one text with the remedy each."""
    given = {"transfer": GOOD, "version": "0.32.0", **facts}
    return [
        f"{each.text} {each.remedy}"
        for each in check_engine(EngineFacts(**given))
        if each.severity is severity
    ]


def test_engine_as_it_should_be_is_well():
    """Nothing is found where there is nothing."""
    assert [] == found()
    assert [] == found(Severity.WARNING)
    assert [] == found(Severity.NOTE)


@pytest.mark.parametrize(
    "transfer",
    [
        {**GOOD, "kv_load_failure_policy": "fail"},
        ROLE,
        {**GOOD, "kv_load_failure_policy": None},
    ],
)
def test_policy_that_ends_requests_is_found_also_as_the_default(transfer):
    """H-13: vLLM's default fails a request whose load fails; the remedy is a line."""
    (text,) = found(transfer=transfer)
    assert '"kv_load_failure_policy": "recompute"' in text


@pytest.mark.parametrize(
    ("transfer", "key"),
    [
        ({"kv_role": "kv_both", **GOOD_POLICY}, "kv_connector="),
        ({**GOOD, MODULE: "ucm.integration.vllm.uc_connector"}, f"{MODULE}="),
        ({**GOOD, MODULE: "ucm.of.others"}, f"{MODULE}="),
        ({**GOOD, MODULE: "no_such_package.connector"}, f"{MODULE}="),
        ({**GOOD, MODULE: ""}, f"{MODULE}="),
        ({**GOOD, MODULE: "ucm.integration.vllm.ucm_connector"}, ""),
        ({**GOOD, MODULE: None}, ""),
    ],
)
def test_connector_that_an_engine_does_not_find_is_found(transfer, key):
    """C.5: an engine to which none is named serves without ucm and without a word, and one
    whose connector's module is not there does not start."""
    texts = found(transfer=transfer)
    assert [key] * bool(key) == [key for text in texts if text.startswith(key)]


@pytest.mark.parametrize(
    ("algorithm", "seed", "version", "key"),
    [
        ("xxhash", "", "0.32.0", "prefix_caching_hash_algo"),
        ("xxhash_cbor", "", "", "prefix_caching_hash_algo"),
        ("sha256", "", "0.28.1", "PYTHONHASHSEED"),
        ("xxhash", "0", "0.32.0", ""),
        ("sha256", "7", "0.28.1", ""),
        ("sha256_cbor", "", "0.29", ""),
    ],
)
def test_hash_seed_that_is_unstable_is_found(algorithm, seed, version, key):
    """C.5: zero hits over restarts, because each process begins its hashes at random,
    is found before the first request."""
    texts = found(hash_algorithm=algorithm, hash_seed=seed, version=version)
    assert bool(key) == bool(texts)
    assert all(key in text for text in texts)


@pytest.mark.parametrize(
    ("version", "severity", "told"),
    [
        ("0.22.1", Severity.WRONG, "too old"),
        ("0.23.0", Severity.FINE, "was tried with"),
        ("0.34.0rc1", Severity.WARNING, "not with 0.34.0rc1"),
        ("", Severity.NOTE, "not installed"),
        ("dev", Severity.NOTE, "no release"),
    ],
)
def test_release_of_the_engine_is_told(version, severity, told):
    """Too old is refused by the door; newer is tried, and says so."""
    texts = found(severity, version=version, hash_seed="1")
    assert any(told in text for text in texts)


def test_engine_that_nobody_named_is_said_to_be_unseen():
    """No finding is not the same as nothing wrong."""
    assert any("--kv-transfer-config" in t for t in found(Severity.NOTE, transfer=None))


@pytest.mark.parametrize(
    ("role", "writes_back", "told"),
    [
        ("kv_producer", False, "never loads"),
        ("kv_consumer", False, "never saves"),
        ("kv_consumer", True, "saves what it decodes"),
    ],
)
def test_half_an_engine_is_warned_of(role, writes_back, told):
    """Who forgets the role wonders why nothing is found."""
    transfer = {**GOOD, "kv_role": role}
    (text,) = found(Severity.WARNING, transfer=transfer, writes_back=writes_back)
    assert told in text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"kv_role": "kv_bth"}, "kv_role='kv_bth': unknown value"),
        ({"kv_role": None}, "kv_role=None: unknown value"),
        ({"kv_role": ["kv_both"]}, "unknown value"),
        ({}, "kv_role=None: missing"),
    ],
)
def test_role_that_an_engine_refuses_is_wrong(said, told):
    """One of three is needed beside a connector."""
    (text,) = found(transfer={"kv_connector": "UCMConnector", **GOOD_POLICY, **said})
    assert told in text
    assert "kv_consumer" in text


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_write_back_is_noted_where_it_says_nothing(role):
    """An engine that saves whatever it computes needs no leave to save a part of it."""
    texts = found(Severity.NOTE, transfer={**GOOD, "kv_role": role}, writes_back=True)
    told = any("consumer_saves_decoded" in text for text in texts)
    assert (role != "kv_consumer") is told
