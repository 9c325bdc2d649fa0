# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the connector: answers over HTTP, numbers on ``/metrics``."""

import time
from pathlib import Path

from tests.e2e.connector import LOADED, SAVED, prompt, ucm_config
from tests.e2e.engine import EXTERNAL_HITS
from tests.e2e.forked import live_members
from tests.e2e.server import Server, serve
from tests.e2e.test_multi import around

PROMPT = prompt(800, 400)


def await_saved(server: Server, at_least: int) -> int:
    """Ask for the counter until it is there; saves end behind their request."""
    deadline = time.monotonic() + 300.0
    while (saved := server.counter(SAVED)) < at_least:
        assert time.monotonic() < deadline, f"only {saved} blocks saved"
        server.complete([3, 4, 5], 1)
    return saved


def await_gauge(server: Server, name: str, value: float) -> None:
    """Ask, and nothing else, until a gauge of the only engine has a value."""
    deadline = time.monotonic() + 120.0
    while server.samples(f"vllm:{name}") != [value]:
        assert time.monotonic() < deadline, server.samples(f"vllm:{name}")
        time.sleep(0.5)


class TestServe:
    def test_prefix_is_reused_over_http_and_over_a_restart(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """A server answers the same with a loaded prefix, reports it in usage and on
        /metrics, and so does its successor over the same slab, which has the connector
        inside of MultiConnector."""
        config = ucm_config(tmp_path / "slab")
        configs = {"first": config, "second": around(config)}
        options = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
        options += ("--enable-prompt-tokens-details", "--kv-cache-memory-bytes")
        options += (str(64 << 20), "--shutdown-timeout", "60")
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        texts, cached = [], []
        for life, config in configs.items():
            with serve(
                llama,
                *options,
                log=tmp_path / f"{life}.log",
                kv_transfer_config=config,
                env=environment,
                is_forked=life == "second",  # the first is the command itself
            ) as server:
                for _ in range(2):
                    answer = server.complete(PROMPT, 8)
                    texts.append(answer["choices"][0]["text"])
                    details = answer["usage"]["prompt_tokens_details"] or {}
                    cached.append(details.get("cached_tokens") or 0)
                    if life == "first":
                        assert 3 == await_saved(server, 3)
                    server.post("/reset_prefix_cache")
                loaded = server.counter(LOADED)
            assert {"first": 3, "second": 6}[life] == loaded
            assert [] == live_members(server.pid)
        assert 1 == len(set(texts))
        assert [0, 384, 384, 384] == cached

    def test_data_parallel_engines_find_what_each_other_saved(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Two engines behind one address share keys and slab: the second finds in it the
        prefix that the first computed, and answers the same."""
        with serve(
            llama,
            *("--data-parallel-size", "2", "--api-server-count", "1"),
            *("--shutdown-timeout", "60"),
            log=tmp_path / "log",
            kv_transfer_config=ucm_config(tmp_path / "slab"),
            is_forked=True,
        ) as server:
            first = server.complete(PROMPT, 8, rank=0)
            assert 3 == await_saved(server, 3)
            second = server.complete(PROMPT, 8, rank=1)
            assert first["choices"][0]["text"] == second["choices"][0]["text"]
            assert 384 == second["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert 3 == server.counter(LOADED)
            assert [0, 384] == sorted(server.samples(EXTERNAL_HITS + "_total"))
        assert [] == live_members(server.pid)

    def test_health_and_usage_are_told_while_the_engine_idles(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """X-11: no request was ever sent, so no step told anything; how full the slab is
        can be read all the same, and that the engine is not served once it is gone."""
        slab = tmp_path / "slab"
        options = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
        options += ("--kv-cache-memory-bytes", str(64 << 20))
        options += ("--shutdown-timeout", "60")
        config = ucm_config(slab)
        with serve(
            llama,
            *options,
            log=tmp_path / "log",
            kv_transfer_config=config,
            is_forked=True,
        ) as server:
            await_gauge(server, "ucm_healthy", 1.0)
            (capacity,) = server.samples("vllm:ucm_store_capacity_bytes")
            assert 64 << 20 >= capacity > 0
            assert [0.0] == server.samples("vllm:ucm_store_committed_parts")
            assert [0.0] == server.samples("vllm:ucm_oldest_hold_seconds")
            (signed,) = server.samples("vllm:ucm_last_sign_timestamp_seconds")
            assert 60 > time.time() - signed
            for path in slab.iterdir():
                if path.is_file():
                    path.unlink()
            await_gauge(server, "ucm_healthy", 0.0)
