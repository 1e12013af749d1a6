"""A report as Markdown: the bars, then a table per section. Made for docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from contract import files
from isojax.bench.bars import Verdict, judge
from isojax.bench.plot import short, svg
from isojax.bench.result import Report, Row
from isojax.bench.sections import Section, sections, state
from isojax.errors import InputError

BEGIN, END = "<!-- isojax bench kernels: begin -->", "<!-- isojax bench kernels: end -->"
CELLS = (
    "A cell: value (our microseconds, floor over them). A ratio is the peer's time over ours; a bandwidth is the part "
    "of the measured copy bandwidth that is reached (beside it: the time of a copy of as many bytes, over ours); the "
    "floor is the larger of bytes over copy bandwidth and FLOPs over the torch.mm rate."
)


def render(report: Report, picture: Callable[[Section], str] | None = None) -> str:
    """The whole report. picture: gives the path of a section's plot, relative to the page."""
    found, loose = sections(report.rows)
    parts = [provenance(report), table_of_bars(report), f"{CELLS} **Bold** is below what is asked of each case."]
    for section in found:
        parts.append(f"### {section.title}")
        if picture is not None:
            parts.append(f"![{section.title}]({picture(section)})")
        parts.append(table(section))
    if loose:
        parts.append("### Others")
        parts.append(_rows(("case", "us", "peer us", "floor us", "ratio"), [_plain(r) for r in loose]))
    failed = [r for r in report.rows if r.error]
    if failed:
        parts.append("### Failed")
        parts += [f"- `{r.name}`: {r.error}" for r in failed]
    return "\n\n".join(parts) + "\n"


def provenance(report: Report) -> str:
    """One paragraph: when, where, with what."""
    m = report.machine
    versions = ", ".join(f"{k} {v}" for k, v in m.versions.items())
    clocks = ", ".join(f"{k} {v}" for k, v in m.clocks_before.items())
    return (
        f"{m.date}, {m.gpu} (driver {m.driver}, CUDA {m.cuda}; {clocks}). {versions}. Device copy "
        f"{m.copy_bytes_per_us / 1e6:.2f} TB/s, torch.mm at 8192^3 {m.matmul_flops_per_us / 1e6:.0f} TFLOP/s. Medians, "
        "L2 flushed before each call, ours and the peer's in turns."
        + ("" if report.finished else f" UNFINISHED: the run ended after {len(report.rows)} cases.")
    )


def table_of_bars(report: Report) -> str:
    return _rows(
        ("bar", "asks", "cases", "geometric mean", "worst", "below", "met"),
        [_verdict(v) for v in judge(report.rows)],
    )


def asks(v: Verdict) -> str:
    """What a bar asks, in words."""
    b, what = v.bar, {"ratio": "of the peer", "bandwidth": "of copy bandwidth"}[v.bar.kind]
    least = f">= {b.mean:.2f} {what}" + (f", none < {b.each:.2f}" if b.each != b.mean else "")
    return least if b.memory is None else f"{least}, memory <= {b.memory:.0%} of the peer's"


def named(v: Verdict) -> str:
    """The worst case of a bar, with its region where the bar is for several."""
    assert v.worst is not None
    return v.worst.name if len(v.bar.regions) > 1 else v.worst.case


def _verdict(v: Verdict) -> tuple[str, ...]:
    met = {None: "not measured", True: "yes", False: "**no**"}[v.met]
    worst = "-" if v.worst is None else f"{v.bar.value(v.worst):.2f} ({named(v)})"
    below = f"{v.short} of {v.cases}" + (f", {v.missing} without a figure" if v.missing else "")
    return v.bar.title, asks(v), str(v.cases), "-" if v.mean is None else f"{v.mean:.3f}", worst, below, met


def table(section: Section) -> str:
    """Sizes as columns."""
    head = (section.measure, *(short(n) for n in section.sizes))
    body = [(name, *(cell(section, line.get(n)) for n in section.sizes)) for name, line in section.lines.items()]
    return _rows(head, body)


def cell(section: Section, row: Row | None) -> str:
    """'0.98 (27.6, 78%)': the section's value, microseconds, floor over them."""
    if row is None:
        return ""
    if row.us is None:
        return "failed"
    value = section.value(row)
    shown = "-" if value is None else f"{value:.2f}"
    if state(row) == "missed":
        shown = f"**{shown}**"
    if section.kind == "bandwidth" and row.of_copy is not None:  # whose value is the floor over ours already
        return f"{shown} ({row.us:.1f}, {row.of_copy:.0%} of a copy)"
    return f"{shown} ({row.us:.1f}, {row.efficiency:.0%})"


def _plain(r: Row) -> tuple[str, ...]:
    number = lambda v, digits=1: "-" if v is None else f"{v:.{digits}f}"
    return r.name, number(r.us), number(r.peer_us), number(r.floor_us), number(r.ratio, 2)


def _rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    line = lambda cells: "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, body)])


def check_page(path: Path) -> None:
    """Raises InputError where the page exists without the markers: somebody wrote it."""
    if path.exists() and not re.search(f"{re.escape(BEGIN)}.*{re.escape(END)}", path.read_text(), re.DOTALL):
        raise InputError(f"{path} exists and lacks the lines {BEGIN} and {END}; add them where the tables belong")


def write(report: Report, path: Path, plots: Path | None = None) -> None:
    """Write a page, or renew the part between the markers BEGIN and END of one that exists. plots: folder for SVGs.

    Raises: InputError as check_page.
    """
    check_page(path)

    def drawn(section: Section) -> str:
        assert plots is not None
        plots.mkdir(parents=True, exist_ok=True)
        file = plots / f"{section.slug}.svg"
        files.write(file, svg(section) + "\n")
        return file.resolve().relative_to(path.resolve().parent, walk_up=True).as_posix()

    picture = None if plots is None else drawn
    made = f"{BEGIN}\n{render(report, picture)}{END}"
    if path.exists():
        old = path.read_text()
        before, after = old.split(BEGIN, 1)[0], old.split(END, 1)[1]
        files.write(path, before + made + after)
    else:
        files.write(path, f"# Kernels\n\n{made}\n")
