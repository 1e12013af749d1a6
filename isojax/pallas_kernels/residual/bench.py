"""Bench of the residual sum against torch's."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.residual import add


def _peer(torch, x, delta):
    return lambda: x + delta


@add.bench_cases
def cases():
    return [
        BenchCase(f"T{t} D{d}", (Operand("bf16", (t, d)),) * 2, bytes=3 * 2 * t * d, peer=_peer)
        for t, d in ((64, 4096), (16384, 576), (16384, 2048), (16384, 4096))
    ]
