# SPDX-License-Identifier: Apache-2.0
"""A round trip through the library, in a place of its own."""

from ucm.cache.sync import Cache
from ucm.cache.transfers import Result
from ucm.doctor.findings import Severity
from ucm.doctor.trial import try_round_trip
from ucm.pipeline.outcomes import OutcomeKind
from ucm.reasons import Reason


def test_what_is_saved_is_loaded_and_nothing_stays(tmp_path):
    """The whole way works here, and the directory is as it was."""
    finding = try_round_trip(tmp_path)
    assert Severity.FINE is finding.severity
    assert "8 blocks" in finding.text
    assert [] == [*tmp_path.iterdir()]


def test_directory_in_which_nothing_can_be_made_is_found(tmp_path):
    """The error is the finding."""
    finding = try_round_trip(tmp_path / "missing")
    assert Severity.WRONG is finding.severity
    assert "missing" in finding.text


def test_bytes_that_come_back_otherwise_are_found(tmp_path, monkeypatch):
    """What was loaded is compared, and not only counted: here a load says that all
    went well, and has moved nothing."""

    def lying(_cache, keys, _blocks):
        kind, reason = OutcomeKind.COMMITTED, Reason.NONE
        number = len(keys)
        return Result(
            kind=kind,
            reason=reason,
            num_blocks=number,
            leading=number,
            committed=number,
        )

    monkeypatch.setattr(Cache, "load", lying)
    finding = try_round_trip(tmp_path)
    assert Severity.WRONG is finding.severity
    assert "not what was saved" in finding.text


def test_load_that_comes_short_is_found(tmp_path, monkeypatch):
    """A store that forgets at once is none."""
    load = Cache.load

    def short(cache, keys, blocks):
        cache.forget(keys[4:])
        return load(cache, keys, blocks)

    monkeypatch.setattr(Cache, "load", short)
    assert "of 8 blocks were loaded" in try_round_trip(tmp_path).text
