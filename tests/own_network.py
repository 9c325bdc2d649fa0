# SPDX-License-Identifier: Apache-2.0
"""
Run a module in a network that has just been made, once its loopback is up.

    unshare -rn python -m tests.own_network MODULE [ARGUMENT ...]
"""

import fcntl
import os
import socket
import struct
import sys

_SET_FLAGS = 0x8914  # SIOCSIFFLAGS, see netdevice(7)
_UP = 1

if __name__ == "__main__":
    with socket.socket() as asked:
        fcntl.ioctl(asked, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
