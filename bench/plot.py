"""Draws what a collection costs by the number of clients, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 64, 56, 48, 24


@dataclass(frozen=True)
class Line:
    """A named row of points."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Fit a straight line; gives its slope, where it starts, and R squared."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    start = mean_y - slope * mean_x
    rest = sum((y - start - slope * x) ** 2 for x, y in points)
    total = sum((y - mean_y) ** 2 for _, y in points)
    return slope, start, 1 - rest / total if total else 1.0


def svg(title: str, lines: Sequence[Line], bar: float) -> str:
    """Draw them, with a bar that they should stay below."""
    right = max(x for line in lines for x, _ in line.points)
    top = 1.1 * max(bar, *(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + x / right * wide, HEIGHT - BOTTOM - y / top * high

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" fill="#222">{title}</text>',
    ]
    for step in range(6):
        x, y = right * step / 5, top * step / 5
        across, up = place(x, 0)[0], place(0, y)[1]
        parts += [
            f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end" fill="#555">{y:.0f}</text>',
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" '
            f'fill="#555">{x:.0f}</text>',
        ]
    limit = place(0, bar)[1]
    parts += [
        f'<path d="M{LEFT} {limit:.1f}H{WIDTH - RIGHT}" stroke="#c33" stroke-dasharray="6 4"/>',
        f'<text x="{WIDTH - RIGHT}" y="{limit - 6:.1f}" text-anchor="end" fill="#c33">bar: '
        f"{bar:.0f} ms</text>",
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle" '
        'fill="#555">clients</text>',
    ]
    for number, line in enumerate(lines):
        points = [place(x, y) for x, y in line.points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{line.colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in points
        ]
        parts.append(
            f'<text x="{LEFT + 14}" y="{TOP + 18 + 18 * number}" fill="{line.colour}">'
            f"{line.name}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
