# SPDX-License-Identifier: Apache-2.0
"""A host whose system has no room or thread for what a cache can do without."""

import asyncio
import json
from pathlib import Path

import ucm
from tests.cache.kit import (
    KEYSPACE,
    LAYOUT,
    Host,
    keys_of,
    leaving_nothing,
    our_threads,
)
from tests.cache.test_opening import pool_of, settings
from tests.clocks import no_threads
from ucm.cache.aio import Opening
from ucm.cache.host_loop import Lanes
from ucm.tracing import STORE_DESCRIBE_FAILED


def test_text_that_nobody_can_keep_stops_no_host(tmp_path: Path) -> None:
    """R-24: where the slab's mount takes no small file more, blocks are saved and loaded all the
    same, and the log says what is missing."""
    config = settings(tmp_path / "slab") | {"log": {"directory": str(tmp_path / "log")}}
    given = {"layout": LAYOUT, "device": pool_of(), "keyspace": KEYSPACE}
    with ucm.blocking.open(config, **given):
        pass
    folder = tmp_path / "slab" / "keyspaces"
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    folder.write_bytes(b"")  # as good as no room
    with no_threads("ucm-status"), ucm.blocking.open(config, **given) as cache:
        assert cache.save(keys_of(2), range(2)).wait_committed().is_whole
        assert cache.load(keys_of(2), range(4, 6)).is_whole
    assert set() == our_threads()
    told = [
        json.loads(line)["event"]
        for file in (tmp_path / "log").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert 1 == told.count(STORE_DESCRIBE_FAILED)


def test_cache_is_closed_where_there_is_no_thread_to_close_it() -> None:
    """As behind the end of the main thread, where asyncio lends none: it stayed open."""
    host = Host()

    async def use() -> None:
        opening = Opening(host.open_core)
        cache = await opening.__aenter__()
        cache.save(keys_of(2), range(2))
        with no_threads("ucm-aside_0"):
            await opening.__aexit__(None, None, None)

    with leaving_nothing(host):
        asyncio.run(use())


def test_call_that_gets_no_thread_is_made_once() -> None:
    """It stands in the line of the threads already: the next one that started made it again."""
    made: list[str] = []

    async def use() -> None:
        lanes = Lanes(1)
        with no_threads("ucm-lanes_0"):
            await lanes.call(lambda: made.append("save"))
        await lanes.call(lambda: made.append("restore"))
        lanes.close()

    asyncio.run(use())
    assert ["save", "restore"] == made
