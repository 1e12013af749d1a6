"""The comparison for people: a table in the terminal, and one HTML page with a picture."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bridges.parity.compare import Row
from bridges.parity.run import Result

COLUMNS = ("tokens", "differing", "mean", "p50", "p95", "p99", "max", "kl", "clipped", "rows", "rows_differing")


def show(result: Result, console: Console) -> None:
    """Print the rows, then identities, memory and time of each job."""
    table = Table(title="log-probabilities: trainer minus engine, nats")
    for name in ("pair", "mode", "phase", *COLUMNS):
        table.add_column(name, justify="right" if name in COLUMNS else "left")
    for row in result.rows:
        style = None if "stock" in row.pair else ("green" if row.equal else "bold red")
        table.add_row(*[_cell(row, name) for name in ("pair", "mode", "phase", *COLUMNS)], style=style)
    console.print(table)
    jobs = Table(title="jobs")
    for name in ("job", "case", "seconds", "peak MiB", "numerical_policy"):
        jobs.add_column(name)
    for name, r in result.records.items():
        jobs.add_row(
            name, r.case, f"{r.seconds:.1f}", f"{r.peak_mib:.0f}", r.identities.get("numerical_policy", "-")[:16]
        )
    console.print(jobs)


def _cell(row: Row, name: str) -> str:
    value = getattr(row, name)
    return f"{value:.2e}" if isinstance(value, float) and value else str(value)


def plain(result: Result) -> dict[str, Any]:
    """As JSON."""
    jobs = {
        k: dict(case=r.case, seconds=r.seconds, peak_mib=r.peak_mib, identities=r.identities)
        for k, r in result.records.items()
    }
    return dict(zero=result.zero, rows=[r.plain() for r in result.rows], jobs=jobs)


def write_html(result: Result, path: Path) -> None:
    """One self-contained page: the table, and the differences of every token, stock against IsoJAX."""
    head = "".join(f"<th>{n}</th>" for n in ("pair", "mode", "phase", *COLUMNS))
    body = "".join(
        f"<tr class={'ok' if r.equal else 'no'}>"
        + "".join(f"<td>{html.escape(_cell(r, n))}</td>" for n in ("pair", "mode", "phase", *COLUMNS))
        + "</tr>"
        for r in result.rows
    )
    pictures = "".join(
        f"<figure>{_scatter(result, a, b)}<figcaption>{a} | {b}</figcaption></figure>"
        for a, b in (("vllm-stock", "megatron-stock"), ("vllm-isojax", "megatron-isojax"))
        if a in result.records and b in result.records
    )
    path.write_text(
        "<!doctype html><meta charset=utf-8><title>IsoJAX parity</title><style>body{font:14px system-ui;margin:2rem}"
        "td,th{padding:.2rem .6rem;text-align:right;font-variant-numeric:tabular-nums}.ok{background:#e8f6ec}"
        ".no{background:#fbeaea}figure{display:inline-block;margin:1rem}</style><h1>One policy, two runtimes</h1>"
        f"<p>IsoJAX differs in {sum(r.differing + r.rows_differing for r in result.rows if 'isojax' in r.pair)} places."
        " Each point is a token: the trainer's log-probability minus the engine's, against its position.</p>"
        f"{pictures}<table><tr>{head}</tr>{body}</table>"
    )


def _scatter(result: Result, a: str, b: str, width: int = 520, height: int = 260) -> str:
    """|difference| of every token on a log scale from 1e-8 to 10; exact zeros lie on the bottom line."""
    dots = []
    for mode in result.records[a].sequences:
        for x, y in zip(result.records[a].sequences[mode], result.records[b].sequences[mode], strict=True):
            gap = np.abs(y.logprobs.astype(np.float64) - x.logprobs.astype(np.float64))
            dots += [(i / max(len(gap) - 1, 1), float(g)) for i, g in enumerate(gap)]
    level = lambda g: 0.0 if g == 0 else min(1.0, max(0.04, (math.log10(g) + 8) / 9))
    points = "".join(
        f'<circle cx="{60 + u * (width - 80):.1f}" cy="{height - 30 - level(g) * (height - 50):.1f}" r="2"'
        f' fill="{"#1a7f4b" if g == 0 else "#c0392b"}" fill-opacity=".5"/>'
        for u, g in dots
    )
    ticks = "".join(
        f'<text x="4" y="{height - 26 - (k + 8) / 9 * (height - 50):.0f}" font-size="11">1e{k}</text>'
        for k in (-6, -4, -2, 0)
    )
    frame = f'<svg width="{width}" height="{height}" role="img">'
    return f'{frame}{ticks}<text x="4" y="{height - 26}" font-size="11">0</text>{points}</svg>'
