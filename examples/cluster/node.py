# SPDX-License-Identifier: Apache-2.0
"""
A node of a Mooncake Store: lends memory until it is told to end.

Run as ``python -m examples.cluster.node --master HOST:PORT --host THIS --bytes N``.
"""

import argparse
import signal
import sys

from mooncake.store import MooncakeDistributedStore

_BUFFER = 16 << 20


def main() -> int:
    """Join, say so, and wait for SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m examples.cluster.node")
    parser.add_argument("--master", default="127.0.0.1:50051")
    parser.add_argument("--host", default="127.0.0.1", help="as others reach it")
    parser.add_argument("--bytes", type=int, default=1 << 28, help="to lend")
    asked = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    node = MooncakeDistributedStore()
    code = node.setup(
        *(asked.host, "P2PHANDSHAKE", asked.bytes, _BUFFER, "tcp", "", asked.master)
    )
    if code:
        print(f"cannot join the master at {asked.master}: code {code}")
        return 1
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
