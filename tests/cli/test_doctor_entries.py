# SPDX-License-Identifier: Apache-2.0
"""``ucm doctor``: several entries of ours inside of one connector of the engine's."""

import json

from tests.cli.call import call
from tests.cli.test_doctor import engine
from ucm.configuration.sources import ENGINE


def test_second_entry_of_ours_is_looked_at_as_well(tmp_path):
    """X-09: whatever was wrong with the other store was called well."""
    second = engine("/dev/shm/ucm-doctor", capacity="900TiB", kv_role="kv_consumer")
    inner = [engine(tmp_path / "slab"), second]
    outer = json.loads(engine(tmp_path))
    outer["kv_connector"] = "MultiConnector"
    outer[ENGINE] = {"connectors": [*map(json.loads, inner)]}
    given = "--no-trial", "--kv-transfer-config", json.dumps(outer)
    told = call("doctor", "--json", *given)
    assert 1 == told.code
    texts = [each["text"] for each in told.json()["findings"]]
    for what in ("are left of /dev/shm", "kv_role is 'kv_consumer'", "is recompute"):
        assert 1 == sum(what in each for each in texts)
