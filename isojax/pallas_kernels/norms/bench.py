"""Bench of the norms against torch's."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.norms import add_rms, rms

SHAPES = ((64, 4096), (16384, 576), (16384, 2048), (16384, 4096), (8192, 8192))
EPS = 1e-6


def _rms_peer(torch, x, weight):
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def _add_rms_peer(torch, x, delta, weight):
    def both():
        h = x + delta
        return h, torch.nn.functional.rms_norm(h, weight.shape, weight, EPS)

    return both


@rms.bench_cases
def rms_cases():
    return [
        BenchCase(
            f"T{t} D{d}",
            (Operand("bf16", (t, d)), Operand("bf16", (d,))),
            bytes=2 * 2 * t * d + 2 * d + 4 * t,
            statics={"eps": EPS},
            peer=_rms_peer,
        )
        for t, d in SHAPES
    ]


@add_rms.bench_cases
def add_rms_cases():
    return [
        BenchCase(
            f"T{t} D{d}",
            (Operand("bf16", (t, d)), Operand("bf16", (t, d)), Operand("bf16", (d,))),
            bytes=4 * 2 * t * d + 2 * d + 4 * t,
            statics={"eps": EPS},
            peer=_add_rms_peer,
        )
        for t, d in SHAPES
    ]
