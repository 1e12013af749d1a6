"""Bench of the linear regions against torch.mm (cuBLAS), at Qwen3-1.7B's shapes."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.linear import column, row

ROWS = (64, 128, 256, 1024, 4096, 16384)
COLUMN = (("qkv", 4096, 2048), ("gate_up", 12288, 2048))
ROW = (("o", 2048, 2048), ("down", 2048, 6144))


def _peer(torch, x, weight):
    return lambda: torch.mm(x, weight.t())


def _cases(shapes):
    return [
        BenchCase(
            f"{name} T{t} N{n} K{k}",
            (Operand("bf16", (t, k)), Operand("bf16", (n, k))),
            bytes=2 * (t * k + n * k + t * n),
            flops=2 * t * n * k,
            peer=_peer,
        )
        for name, n, k in shapes
        for t in ROWS
    ]


@column.bench_cases
def column_cases():
    return _cases(COLUMN)


@row.bench_cases
def row_cases():
    return _cases(ROW)
