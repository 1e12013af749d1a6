"""The bars that kernels have to reach, as data, and their judgement.

A bar asks two things of the cases that it covers: a geometric mean, and a smallest value that none may miss. The value
is the peer's time over ours (`ratio`), or the part of the copy bandwidth that is reached (`bandwidth`). A bar with one
figure asks it of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from isojax.bench.result import Report, Row

Range = tuple[int, int | None]  # from, to; both included, None is open


@dataclass(frozen=True)
class Bar:
    """where: keys of a case's `at` and the range in which the bar holds; a case without the key is not covered.

    memory: largest part of the peer's peak memory that ours may take, None where any will do.
    peer: the only peer that counts, '' for any: a stand-in gives a case no value.
    """

    title: str
    regions: tuple[str, ...]
    kind: Literal["ratio", "bandwidth"]
    mean: float
    each: float
    where: Mapping[str, Range] = field(default_factory=dict)
    memory: float | None = None
    peer: str = ""

    def covers(self, row: Row) -> bool:
        return row.region in self.regions and all(
            key in row.at and low <= row.at[key] and (high is None or row.at[key] <= high)
            for key, (low, high) in self.where.items()
        )

    def value(self, row: Row) -> float | None:
        return getattr(row, self.kind) if self.peer in ("", row.against) else None

    def met(self, row: Row) -> bool:
        """Whether one case reaches the least that the bar asks of each."""
        value = self.value(row)
        return value is not None and value >= self.each and self.frugal(row)

    def frugal(self, row: Row) -> bool:
        if self.memory is None:
            return True
        return row.memory is not None and row.peer_memory is not None and row.memory <= self.memory * row.peer_memory


def bar(title: str, regions: Sequence[str], kind: Literal["ratio", "bandwidth"], least: float, **kw) -> Bar:
    """A bar with one figure, for the mean and for each."""
    return Bar(title, tuple(regions), kind, least, least, **kw)


FLASH = "FlashAttention 3"
MANY, FEW = {"M": (1024, None)}, {"M": (1, 256)}
BATCH = {"M": (8192, None)}  # rows that keep a memory-bound kernel busy
MIXED = {"M": (1025, 2048)}
BARS = (
    # of our own, and first: a case answers to the first bar that covers it
    Bar("linears, rows of a mixed step", ("linear.column", "linear.row"), "ratio", 0.95, 0.85, MIXED),
    Bar("linear.column, M >= 1024", ("linear.column",), "ratio", 1.0, 0.93, MANY),
    bar("linear.row, M >= 1024", ["linear.row"], "ratio", 0.93, where=MANY),
    Bar("linear.column, M <= 256", ("linear.column",), "ratio", 0.95, 0.85, FEW),
    Bar("linear.row, M <= 256", ("linear.row",), "ratio", 0.95, 0.85, FEW),
    bar("attention, causal, forward", ["attn.core"], "ratio", 0.90, where={"length": (1024, 32768)}, peer=FLASH),
    bar("attention, causal, backward", ["attn.core_bwd"], "ratio", 0.85, where={"length": (1024, 32768)}),
    bar("attention, paged decode", ["attn.core"], "ratio", 0.90, where={"sequences": (1, 256)}, peer=FLASH),
    bar("norms", ["norms.rms", "norms.add_rms"], "bandwidth", 0.85, where=BATCH),
    bar("rope (attn.prep)", ["attn.prep"], "bandwidth", 0.85, where=BATCH),
    bar("swiglu", ["mlp.swiglu"], "bandwidth", 0.85, where=BATCH),
    bar("logprob of rows", ["head.logprob_rows"], "bandwidth", 0.85, where={"M": (64, None)}),
    bar("head.logprob, 8k x vocabulary", ["head.logprob"], "ratio", 1.0, where=BATCH, memory=0.05),
    bar("backward GEMMs", ["linear.dgrad", "linear.wgrad"], "ratio", 0.97, where=MANY),
    bar(
        "norms, rope, swiglu, embedding: backward",
        ["norms.rms_bwd", "norms.add_rms_bwd", "attn.prep_bwd", "mlp.swiglu_bwd", "embed.lookup_bwd"],
        "bandwidth",
        0.85,
        where=BATCH,
    ),
)


@dataclass(frozen=True)
class Verdict:
    """A bar over the cases that were measured. missing: covered cases without a value. short: cases below `each`."""

    bar: Bar
    cases: int
    mean: float | None
    worst: Row | None
    short: int
    missing: int

    @property
    def met(self) -> bool | None:
        """None where the run had no case of the bar."""
        if not self.cases:
            return None
        return not self.short and not self.missing and self.mean is not None and self.mean >= self.bar.mean


def covering(row: Row) -> Bar | None:
    """The bar that a case answers to, or None: it is shown, and not judged."""
    return next((b for b in BARS if b.covers(row)), None)


def judge(rows: Iterable[Row]) -> list[Verdict]:
    """Every bar's verdict over `rows`, in the order of BARS."""
    rows = list(rows)
    return [_judge(b, [r for r in rows if covering(r) is b]) for b in BARS]


def unmet(report: Report) -> str:
    """Why a run does not show that the bars are met, or '': a run that judged little must not pass for a good one."""
    if not report.finished:
        return f"the run ended after {len(report.rows)} cases; run it again to its end"
    verdicts = [v for v in judge(report.rows) if v.met is not None]
    if not verdicts:
        return "no case that ran answers to a bar; run others, or leave --strict out"
    return ", ".join(f"missed: {v.bar.title}" for v in verdicts if not v.met)


def _judge(b: Bar, rows: list[Row]) -> Verdict:
    valued = [(v, r) for r in rows if (v := b.value(r)) is not None]
    mean = math.exp(sum(math.log(v) for v, _ in valued) / len(valued)) if valued else None
    worst = min(valued, key=lambda p: p[0])[1] if valued else None
    short = sum(not b.met(r) for _, r in valued)
    return Verdict(b, len(rows), mean, worst, short, len(rows) - len(valued))
