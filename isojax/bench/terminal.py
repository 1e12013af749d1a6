"""A report in the terminal: every case, then the bars."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isojax.bench import markdown
from isojax.bench.bars import covering, judge
from isojax.bench.result import Report, Row
from isojax.bench.sections import state

STYLES = {"met": "green", "missed": "red", "failed": "bold red", "shown": ""}


def show(report: Report, console: Console, brief: bool = False) -> None:
    """brief: the bars only, and what failed."""
    rows = [r for r in report.rows if r.error] if brief else report.rows
    if rows:
        console.print(_cases(report, rows))
    console.print(_bars(report))
    console.print(markdown.provenance(report), style="dim", markup=False)


def _cases(report: Report, rows: list[Row] | tuple[Row, ...]) -> Table:
    table = Table(title=report.machine.gpu)
    table.add_column("case", overflow="fold")
    for name in ("us", "peer us", "floor us", "ratio", "bandwidth", "of a copy", "bar"):
        table.add_column(name, justify="right")
    table.add_column("")
    number = lambda v, digits: "-" if v is None else f"{v:.{digits}f}"
    for r in rows:
        bar = covering(r)
        asked = "" if bar is None else f"{bar.each:.2f}" + (" bw" if bar.kind == "bandwidth" else "")
        cells = (number(r.us, 1), number(r.peer_us, 1), number(r.floor_us, 1), number(r.ratio, 2))
        verdict = "" if state(r) == "shown" else escape(r.error) or state(r)
        verdict += f" ({r.against})" if bar is not None and bar.peer not in ("", r.against) else ""
        cells += number(r.bandwidth, 2), number(r.of_copy, 2), asked, verdict
        table.add_row(escape(r.name), *cells, style=STYLES[state(r)])
    return table


def _bars(report: Report) -> Table:
    table = Table(title="bars")
    for name in ("bar", "asks", "cases", "mean", "worst", "below", ""):
        table.add_column(name, overflow="fold")
    for v in judge(report.rows):
        if v.met is None:
            continue
        worst = "-" if v.worst is None else f"{v.bar.value(v.worst):.2f} {markdown.named(v)}"
        below = str(v.short) + (f" + {v.missing} without a figure" if v.missing else "")
        table.add_row(
            v.bar.title, markdown.asks(v), str(v.cases), "-" if v.mean is None else f"{v.mean:.3f}", escape(worst),
            below, "met" if v.met else "missed", style=STYLES["met" if v.met else "missed"],
        )  # fmt: skip
    return table
