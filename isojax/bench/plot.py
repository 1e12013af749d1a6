"""A section as a picture: value over size, a line per model and part, bars as dashes. Plain SVG, nothing to load."""

from __future__ import annotations

import math
from html import escape

from isojax.bench.sections import Section, state

COLORS = ("#1f6feb", "#c0392b", "#1a7f4b", "#8e44ad", "#d68910", "#16808a", "#7f8c8d", "#c2185b", "#5d4037", "#283593")
DASHES = ("", "6 3", "2 3")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 620, 280, 44, 26, 34
PLOT = 380  # px; the legend is to the right
HIGHEST = 2.0  # values above lie on the upper edge; their tooltips have the figure
OVER = 10  # px that a bar's dashes reach past its sizes, so that a bar of one size is seen


def short(n: int) -> str:
    """1024 -> 1k."""
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def svg(section: Section) -> str:
    """One <svg> element with its own style; points carry a tooltip."""
    values = [v for line in section.lines.values() for r in line.values() if (v := section.value(r)) is not None]
    top = min(HIGHEST, max([1.1, *values]))
    base = min([0.75, *(math.floor(4 * v) / 4 for v in values)])
    low, high = math.log2(section.sizes[0]), math.log2(section.sizes[-1])
    x = lambda n: LEFT + PLOT * ((math.log2(n) - low) / (high - low) if high > low else 0.5)
    y = lambda v: TOP + (HEIGHT - TOP - BOTTOM) * (top - min(max(v, base), top)) / (top - base)
    parts = [f'<text x="{LEFT}" y="14" class="t">{escape(section.title)}: {_unit(section)}</text>']
    for v in (0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, HIGHEST):
        if base <= v <= top:
            above = "&#8805; " if v == HIGHEST < max(values) else ""  # points on this line may lie higher
            parts.append(f'<path d="M{LEFT} {y(v):.1f}h{PLOT}" stroke="#{"888" if v == 1 else "ddd"}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{above}{v:g}</text>')
    for n in section.sizes:
        parts.append(f'<text x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(n)}</text>')
    for b in section.bars:
        start, stop = b.where.get(section.axis, (section.sizes[0], None))
        a, z = max(start, section.sizes[0]), min(stop or section.sizes[-1], section.sizes[-1])
        from_to = f"M{x(a) - OVER:.1f} {y(b.mean):.1f}H{x(z) + OVER:.1f}"
        line = f'<path d="{from_to}" stroke="#000" stroke-dasharray="8 4"/>'
        parts.append(f"<g><title>{escape(b.title)}: mean {b.mean:g}, each {b.each:g}</title>{line}</g>")
    for i, (name, line) in enumerate(section.lines.items()):
        style = f'stroke="{COLORS[i % len(COLORS)]}" stroke-dasharray="{DASHES[i // len(COLORS) % len(DASHES)]}"'
        known = [(n, v, r) for n in section.sizes if (r := line.get(n)) and (v := section.value(r)) is not None]
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v, _ in known)
        parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.5" {style}/>')
        for n, v, r in known:
            color = COLORS[i % len(COLORS)]
            fill = f'fill="{"#fff" if state(r) == "missed" else color}" stroke="{color}"'  # hollow: below its bar
            tip = f"{name}, {section.axis} {n}: {v:.2f} ({r.us:.1f} us)"
            parts.append(f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="3" {fill}><title>{escape(tip)}</title></circle>')
        at = TOP + 4 + 13 * i
        parts.append(f'<path d="M{LEFT + PLOT + 14} {at}h18" stroke-width="2" {style}/>')
        parts.append(f'<text x="{LEFT + PLOT + 36}" y="{at + 4}">{escape(name)}</text>')
    height = max(HEIGHT, TOP + 13 * len(section.lines) + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img" style="background:#fff"><style>text{font:11px system-ui,sans-serif;fill:#333}.t{font-weight:600}'
        f"</style>{''.join(parts)}</svg>"
    )


def _unit(section: Section) -> str:
    return section.measure if section.kind == "ratio" else "part of copy bandwidth"
