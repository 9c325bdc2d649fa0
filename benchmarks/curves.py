# SPDX-License-Identifier: Apache-2.0
"""Curves of hit ratio over capacity as an SVG; part of ``benchmarks.replay``."""

import html
import math
from collections.abc import Mapping, Sequence

__all__ = ["draw"]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 34, 46
_INK, _GRID = "#333333", "#dddddd"
_COLOURS = (
    *("#888888", "#2a7f62", "#c0392b", "#8e44ad", "#2c6fbb", "#d68910"),
    *("#16a085", "#7f8c8d", "#000000"),
)


def draw(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """
    Return an SVG of some curves.

    Args:
        title: Above them.
        curves: By name, points of share of capacity, drawn by its logarithm, and ratio.
    """
    points = [point for curve in curves.values() for point in curve]
    low = math.log10(min(x for x, _ in points))
    high = math.log10(max(x for x, _ in points))
    top = max(0.05, math.ceil(max(y for _, y in points) * 20) / 20)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
            f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="11">'
        ),
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 18, title, "start"),
    ]

    def x_of(share: float) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (math.log10(share) - low) / max(high - low, 1e-9)

    def y_of(ratio: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * ratio / top

    for step in range(6):
        y = y_of(top * step / 5)
        parts += [
            _line(_LEFT, y, _WIDTH - _RIGHT, y),
            _text(_LEFT - 6, y + 4, f"{top * step / 5:.0%}", "end"),
        ]
    for share in sorted({x for x, _ in points}):
        x = x_of(share)
        parts += [
            _line(x, _TOP, x, _HEIGHT - _BOTTOM),
            _text(x, _HEIGHT - _BOTTOM + 16, f"{share:.2g} %", "middle"),
        ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    what = "capacity, as a share of the distinct blocks"
    parts.append(_text(middle, _HEIGHT - 8, what, "middle"))
    for at, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)
        y = _TOP + 12 + at * 18
        x = _WIDTH - _RIGHT + 14
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<rect x="{x}" y="{y - 5}" width="18" height="3" fill="{colour}"/>',
            _text(x + 24, y, name, "start"),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{_INK}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
        f'stroke="{_GRID}"/>'
    )
