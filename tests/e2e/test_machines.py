# SPDX-License-Identifier: Apache-2.0
"""One engine whose ranks are on two machines, each with a slab and an agent of its own."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.connector import LOADED, prompt, ucm_config
from tests.e2e.server import Server, follow, serve
from tests.ports import free_ports
from ucm.agent.protocol import SOCKET_NAME
from ucm.cli.main import main

PROMPT = prompt(900, 300)
"""Two whole blocks of 128 tokens, each in two parts."""
PROVEN = "vllm:ucm_weights_proven"
LIMIT_S = 300.0


def until(server: Server, is_so: Callable[[], bool]) -> None:
    """Let the engine run small steps until something is so."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        server.complete([3, 4, 5], 1)


def forget_all(slab: Path) -> None:
    """Have a slab forget its blocks, as an operator does."""
    assert 0 == main(["store", "rm", str(slab), "--all", "--yes"])


@pytest.mark.usefixtures("killed")  # vLLM leaves the second machine's ranks as they are
class TestMachines:
    def test_block_is_found_where_each_machine_has_its_part(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Each rank's part comes from its own machine's slab or by way of the shared tier;
        what one machine cannot have, or only damaged, is computed, and the tokens are right.
        R-63: the agents outlive the engine."""
        share = tmp_path / "share"
        tiers = [{"type": "files", "path": str(share)}]
        slabs = [tmp_path / f"slab{at}" for at in range(2)]
        configs = [ucm_config(slab, tiers=tiers) for slab in slabs]
        shape = ["--tensor-parallel-size", "2", "--nnodes", "2"]
        shape += ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]

        def parts() -> list[Path]:
            return [each for each in share.glob("blocks/*/*/*") if each.is_file()]

        def ask() -> tuple[str, int]:
            before = server.counter(LOADED)
            answer = server.complete(PROMPT, 8)["choices"][0]["text"]
            server.post("/reset_prefix_cache")
            server.complete([3, 4, 5], 1)  # with it the weights come into doubt
            until(server, lambda: server.samples(PROVEN) == [1.0])
            return answer, server.counter(LOADED) - before

        with (
            follow(
                *(llama, *shape, "--node-rank", "1"),
                log=tmp_path / "second.log",
                kv_transfer_config=configs[1],
            ),
            serve(
                *(llama, *shape, "--node-rank", "0"),
                log=tmp_path / "first.log",
                kv_transfer_config=configs[0],
                is_forked=True,
            ) as server,
        ):
            cold, _ = ask()
            until(server, lambda: len(parts()) == 4)
            told = {"from both slabs": ask()}
            forget_all(slabs[1])
            told["one part by way of the tier"] = ask()
            forget_all(slabs[1])
            for part in parts():
                part.write_bytes(part.read_bytes()[:-1] + b"?")
            told["one part damaged"] = ask()
        for slab in slabs:  # not killed with the engine: others may share it
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(slab / SOCKET_NAME))
        assert {
            "from both slabs": (cold, 2),
            "one part by way of the tier": (cold, 2),
            "one part damaged": (cold, 0),
        } == told
