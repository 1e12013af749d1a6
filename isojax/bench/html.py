"""A report as one self-contained HTML page: bars, plots, tables."""

from __future__ import annotations

from html import escape
from pathlib import Path

from contract import files
from isojax.bench import markdown
from isojax.bench.bars import judge
from isojax.bench.plot import short, svg
from isojax.bench.result import Report, Row
from isojax.bench.sections import Section, sections, state

STYLE = (
    "body{font:14px system-ui;margin:2rem}td,th{padding:.2rem .6rem;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}.met{background:#e8f6ec}.missed,.failed{background:#fbeaea}"
    "table{border-collapse:collapse;margin:.5rem 0 2rem}"
)


def write(report: Report, path: Path) -> None:
    """Write the page."""
    found, loose = sections(report.rows)
    body = [
        "<!doctype html><meta charset=utf-8><title>IsoJAX kernels</title>",
        f"<style>{STYLE}</style><h1>Kernels</h1><p>{escape(markdown.provenance(report))}</p>",
        _bars(report),
        f"<p>{escape(markdown.CELLS)} A hollow point and a red cell miss what is asked of each case; dashes are the "
        "mean that is asked. Hover for all figures.</p>",
        *(f"<h2>{escape(s.title)}</h2>{svg(s)}{_table(s)}" for s in found),
        _list("Others", [r for r in loose if not r.error]),
        _list("Failed", [r for r in report.rows if r.error]),
    ]
    files.write(path, "".join(body))


def _bars(report: Report) -> str:
    rows = []
    for v in judge(report.rows):
        mark = {None: "", True: "met", False: "missed"}[v.met]
        worst = "" if v.worst is None else f"{v.bar.value(v.worst):.2f} ({markdown.named(v)})"
        cells = (
            v.bar.title, markdown.asks(v), v.cases, "" if v.mean is None else f"{v.mean:.3f}", worst,
            f"{v.short} + {v.missing}", {None: "not measured", True: "yes", False: "no"}[v.met],
        )  # fmt: skip
        rows.append(f"<tr class='{mark}'>{_cells(cells)}</tr>")
    head = ("bar", "asks", "cases", "geometric mean", "worst", "below + without figure", "met")
    return f"<table><tr>{_cells(head, 'th')}</tr>{''.join(rows)}</table>"


def _cells(values: tuple[object, ...], tag: str = "td") -> str:
    return "".join(f"<{tag}>{escape(str(v))}</{tag}>" for v in values)


def _table(section: Section) -> str:
    head = _cells((section.measure, *map(short, section.sizes)), "th")
    lines = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(section, line.get(n)) for n in section.sizes)}</tr>"
        for name, line in section.lines.items()
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


def _cell(section: Section, row: Row | None) -> str:
    if row is None:
        return "<td></td>"
    known = {
        "ours": row.us, "peer": row.peer_us, "floor": row.floor_us, "spread": row.spread, "memory": row.memory,
        "peer's memory": row.peer_memory, "copy": row.copy_us, "distance from the peer": row.distance,
    }  # fmt: skip
    tip = row.error or ", ".join(f"{k} {v:.4g}" for k, v in known.items() if v is not None)
    text = markdown.cell(section, row).replace("**", "")
    return f"<td class='{state(row)}' title='{escape(tip)}'>{escape(text)}</td>"


def _list(title: str, rows: list[Row]) -> str:
    if not rows:
        return ""
    number = lambda v: "" if v is None else f"{v:.1f}"
    body = "".join(
        f"<tr>{_cells((r.name, number(r.us), number(r.peer_us), number(r.floor_us), r.error))}</tr>" for r in rows
    )
    return f"<h2>{title}</h2><table><tr>{_cells(('case', 'us', 'peer us', 'floor us', ''), 'th')}</tr>{body}</table>"
