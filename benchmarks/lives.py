# SPDX-License-Identifier: Apache-2.0
"""
What a request's life costs: both halves of the connector, hook by hook, in CPU time.

As in ``benchmarks.decode`` 256 requests decode, blocks of 32 tokens become whole, and in
each step three requests begin and three end, of which one in six goes on with a
conversation of before. An engine is only played, so that nothing but ours is counted.
*Calls* are calls of Python functions, about the same in each run. Run
``python -m benchmarks.lives``; it starts no engine.
"""

from benchmarks.harness import Scale, Told, main

__all__ = ["CASES", "measure"]


def measure(scale: Scale) -> Told:
    """Measure what a step costs, and a life, part by part."""
    from benchmarks import lives_side

    return lives_side.measure(scale)


CASES = {"256 decoding, three begin and end in each step": measure}


if __name__ == "__main__":
    main("lives", CASES)
