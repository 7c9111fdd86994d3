"""Plots accuracy over rollouts as an SVG file, without a plotting library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import cycle
from pathlib import Path

__all__ = ["plot"]

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 560, 320, 48, 16, 260
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#57606a", "#0a8a8a")
DASHES = ("", "6 3", "2 3")


def plot(path: Path, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Write the curves to ``path``; each maps a number of rollouts to an accuracy between 0 and 1."""
    longest = max((step for points in curves.values() for step in points), default=1)
    parts = [*_axes(longest), *_lines(curves, longest)]
    size = f'width="{LEFT + WIDTH + LEGEND}" height="{TOP + HEIGHT + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]))


def _axes(longest: int) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
    for quarter in range(5):
        x = LEFT + WIDTH * quarter / 4
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{longest * quarter // 4}</text>'
    yield f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">rollouts trained</text>'


def _lines(curves: Mapping[str, Mapping[int, float]], longest: int) -> Iterator[str]:
    styles = cycle((colour, dash) for dash in DASHES for colour in COLOURS)
    for number, ((label, points), (colour, dash)) in enumerate(zip(curves.items(), styles, strict=False)):
        style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
        places = " ".join(f"{LEFT + WIDTH * step / longest:.1f},{_y(points[step]):.1f}" for step in sorted(points))
        yield f'<polyline points="{places}" {style}/>'
        x, y = LEFT + WIDTH + 16, TOP + 10 + 18 * number
        yield f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" {style}/>'
        yield f'<text x="{x + 32}" y="{y + 4}">{escape(label)}</text>'


def _y(accuracy: float) -> float:
    return TOP + HEIGHT * (1 - accuracy)
