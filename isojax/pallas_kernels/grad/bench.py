"""Bench of gradient accumulation against torch's chain of sums."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.grad import accumulate


def _peer(torch, *parts):
    return lambda: sum(parts[1:], parts[0])


@accumulate.bench_cases
def cases():
    size = {"bf16": 2, "f32": 4}
    return [
        BenchCase(
            f"{n} x {dtype} {t}x{d}",
            (Operand(dtype, (t, d)),) * n,
            bytes=(n + 1) * t * d * size[dtype],
            peer=_peer,
            part=f"{n} x {dtype}, D {d}",
            at={"M": t},
        )
        for n, dtype, t, d in ((2, "bf16", 16384, 4096), (3, "bf16", 16384, 4096), (2, "f32", 4096, 4096))
    ]
