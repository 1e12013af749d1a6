"""A report's rows as small tables, one for each region and axis: a line per model and part, a column per size.
Decode has a table per model and a line per number of sequences.

Terminal, Markdown, HTML and plots all show these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from isojax.bench.bars import BARS, Bar, covering
from isojax.bench.result import Row
from isojax.errors import InputError

AXES = ("M", "length", "context")  # the first that a case has is its axis


@dataclass(frozen=True)
class Section:
    """lines: label -> size -> row. model: '' where the labels name it.

    kind: what is judged or, where no bar holds, shown: ratio, or bandwidth.
    """

    region: str
    model: str
    axis: str
    kind: str
    bars: tuple[Bar, ...]
    sizes: tuple[int, ...]
    lines: dict[str, dict[int, Row]]

    @property
    def title(self) -> str:
        axis = {"M": "rows M", "length": "sequence length", "context": "context"}[self.axis]
        return ", ".join(p for p in (self.region, self.model, axis) if p)

    @property
    def slug(self) -> str:
        """For a file name."""
        return re.sub(r"[^\w.-]+", "-", "-".join(p for p in (self.region, self.model, self.axis) if p))

    @property
    def measure(self) -> str:
        """The kind, and for a ratio to what."""
        peers = {r.against for line in self.lines.values() for r in line.values() if r.against}
        return f"ratio to {' or '.join(sorted(peers))}" if self.kind == "ratio" and peers else self.kind

    def value(self, row: Row) -> float | None:
        return row.ratio if self.kind == "ratio" else row.bandwidth


def axis_of(row: Row) -> str:
    return next((a for a in AXES if a in row.at), "")


def label(row: Row) -> str:
    """What tells a row's line from others of its section."""
    if "sequences" in row.at:
        return " ".join(p for p in (row.part, f"{row.at['sequences']} seq") if p)
    return " ".join(p for p in (row.model, row.part) if p) or row.region


def sections(rows: Iterable[Row]) -> tuple[list[Section], list[Row]]:
    """(the sections, rows that stand on no axis). Raises InputError where two rows would be one point."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    loose = []
    for row in rows:
        if axis := axis_of(row):
            groups.setdefault((row.region, axis, row.model if "sequences" in row.at else ""), []).append(row)
        else:
            loose.append(row)
    return [_section(*key, found) for key, found in groups.items()], loose


def _section(region: str, axis: str, model: str, rows: list[Row]) -> Section:
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        line = lines.setdefault(label(row), {})
        size = row.at[axis]
        if size in line:
            raise InputError(f"{line[size].name} and {row.name} are one place: tell them apart by model, part or at")
        line[size] = row
    held = [covering(r) for r in rows]
    bars = tuple(b for b in BARS if b in held)
    kind = bars[0].kind if bars else "ratio" if any(r.ratio is not None for r in rows) else "bandwidth"
    return Section(region, model, axis, kind, bars, tuple(sorted({r.at[axis] for r in rows})), lines)


def state(row: Row) -> str:
    """'failed', 'missed', 'met', or 'shown' where no bar holds."""
    if row.error:
        return "failed"
    held = covering(row)
    return "shown" if held is None else "met" if held.met(row) else "missed"
