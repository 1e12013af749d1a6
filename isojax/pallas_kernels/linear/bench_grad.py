"""Bench of the linear gradients against torch.mm (cuBLAS) with the same output dtype: fp32 for a weight's gradient."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import MODELS, ROWS
from isojax.pallas_kernels.linear import dgrad, wgrad

TRAINER_ROWS = [t for t in ROWS if t >= 1024]


def _dgrad_peer(torch, ct, weight):
    return lambda: torch.mm(ct, weight)


def _wgrad_peer(torch, ct, x):
    return lambda: torch.mm(ct.t(), x, out_dtype=torch.float32)


def _case(m, part, n, k, t, other, out_bytes, peer):
    return BenchCase(
        f"{m.name} {part} M{t} N{n} K{k}",
        (Operand("bf16", (t, n)), other),
        bytes=2 * t * n + other.nbytes + out_bytes,
        flops=2 * t * n * k,
        peer=peer,
        model=m.name,
        part=part,
        at={"M": t},
    )


def _linears():
    return [(m, *linear, t) for m in MODELS for linear in (*m.column, *m.row) for t in TRAINER_ROWS]


@dgrad.bench_cases
def dgrad_cases():
    return [
        _case(m, part, n, k, t, Operand("bf16", (n, k), scale=k**-0.5), 2 * t * k, _dgrad_peer)
        for m, part, n, k, t in _linears()
    ]


@wgrad.bench_cases
def wgrad_cases():
    return [_case(m, part, n, k, t, Operand("bf16", (t, k)), 4 * n * k, _wgrad_peer) for m, part, n, k, t in _linears()]
