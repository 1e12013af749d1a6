"""Bench of the residual sum against torch's."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.residual import add


def _peer(torch, x, delta):
    return lambda: x + delta


@add.bench_cases
def cases():
    return [
        BenchCase(
            f"{m.name} M{t} D{m.hidden}",
            (Operand("bf16", (t, m.hidden)),) * 2,
            bytes=3 * 2 * t * m.hidden,
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden")
        for t in BATCH_ROWS
    ]
