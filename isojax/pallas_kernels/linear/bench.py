"""Bench of the linear regions against torch.mm (cuBLAS). Ours computes whole blocks of 64 rows, the peer the true M."""

from __future__ import annotations

import functools

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import MIXED_ROWS, MODELS, ROWS, padded
from isojax.pallas_kernels.linear import column, row
from isojax.schedule import LEAVES


def _peer(rows, torch, x, weight):
    x = x[:rows]
    return lambda: torch.mm(x, weight.t())


def _case(m, part, n, k, t, **statics):
    return BenchCase(
        f"{m.name} {part} M{t} N{n} K{k}",
        (Operand("bf16", (padded(t), k)), Operand("bf16", (n, k), scale=k**-0.5)),
        bytes=2 * (t * k + n * k + t * n),
        flops=2 * t * n * k,
        statics=statics,
        peer=functools.partial(_peer, t),
        against="torch.mm",
        model=m.name,
        part=part,
        at={"M": t},
    )


@column.bench_cases
def column_cases():
    return [_case(m, *linear, t) for m in MODELS for linear in m.column for t in (*ROWS, *MIXED_ROWS)]


@row.bench_cases
def row_cases():
    """A rank of a tensor-parallel model owns its share of the leaves."""
    rows = (*ROWS, *MIXED_ROWS)
    return [_case(m, *linear, t, leaves=LEAVES // m.ranks) for m in MODELS for linear in m.row for t in rows]
