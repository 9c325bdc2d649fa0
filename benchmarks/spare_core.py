# SPDX-License-Identifier: Apache-2.0
"""
The real engine full of decoding requests, whose forward pass leaves a core free.

The cases of ``benchmarks.decode``, and how they are measured, with one thread for the
forward pass on a machine of two cores. There it computes on both, so that whatever our
threads compute is taken from it, as is all else that wants a core. An accelerator's host
has cores to spare: what is left here is what a connector costs an engine there.
Run ``python -m benchmarks.spare_core``.
"""

import functools

import attrs

from benchmarks.decode import ALL, measure
from benchmarks.harness import main

CASES = {
    case.name: functools.partial(measure, attrs.evolve(case, threads=1, is_whole=False))
    for case in ALL
}


if __name__ == "__main__":
    main("spare_core", CASES)
