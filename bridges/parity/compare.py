"""How far two records differ: bits first, then the figures that an RL run feels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bridges.parity.record import Record, Sequence, check_pair

CLIP = 0.2


@dataclass(frozen=True)
class Row:
    """One line of the report. Differences are trainer minus engine, in nats; percentiles of their absolute value.

    kl: mean of r - 1 - log r with r the importance ratio (Schulman's k3 estimator), in nats a token.
    clipped: fraction of tokens with |r - 1| > 0.2. rows_*: full-vocabulary rows compared by digest.
    """

    pair: str
    mode: str
    phase: str
    tokens: int
    differing: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    kl: float
    clipped: float
    rows: int
    rows_differing: int

    @property
    def equal(self) -> bool:
        return self.differing == 0 and self.rows_differing == 0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


PHASES = {"engine_prefill": slice(0, 1), "engine_decode": slice(1, None)}


def compare(a: Record, b: Record) -> list[Row]:
    """One row per sampling mode and engine phase. Raises InputError where the pair proves nothing."""
    check_pair(a, b)
    name = f"{a.runtime} {a.flavour} | {b.runtime} {b.flavour}"
    return [
        _row(name, mode, phase, cut, a.sequences[mode], b.sequences[mode])
        for mode in a.sequences
        for phase, cut in PHASES.items()
    ]


def _row(name: str, mode: str, phase: str, cut: slice, xs: list[Sequence], ys: list[Sequence]) -> Row:
    one = np.concatenate([x.logprobs[cut] for x in xs])
    two = np.concatenate([y.logprobs[cut] for y in ys])
    differing = int(np.count_nonzero(one.view(np.int32) != two.view(np.int32)))
    pairs = [
        (p, q)
        for x, y in zip(xs, ys, strict=True)
        for p, q in zip(x.row_digests[cut], y.row_digests[cut], strict=False)
    ]
    if len(one) == 0:
        return Row(
            name, mode, phase, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, len(pairs), sum(p != q for p, q in pairs)
        )
    delta = two.astype(np.float64) - one.astype(np.float64)
    size = np.abs(delta)
    ratio = np.exp(delta)
    p50, p95, p99 = np.percentile(size, (50, 95, 99))
    return Row(
        name,
        mode,
        phase,
        len(one),
        differing,
        float(size.mean()),
        float(p50),
        float(p95),
        float(p99),
        float(size.max()),
        float(np.mean(ratio - 1 - delta)),
        float(np.mean(np.abs(ratio - 1) > CLIP)),
        len(pairs),
        sum(p != q for p, q in pairs),
    )
