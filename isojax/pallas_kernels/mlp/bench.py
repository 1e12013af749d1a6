"""Bench of the feed-forward activation against torch's two kernels."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.mlp import swiglu


def _peer(torch, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return lambda: torch.nn.functional.silu(gate) * up


@swiglu.bench_cases
def cases():
    return [
        BenchCase(f"T{t} F{f}", (Operand("bf16", (t, 2 * f)),), bytes=3 * 2 * t * f, peer=_peer)
        for t, f in ((64, 6144), (16384, 1536), (16384, 6144), (8192, 14336))
    ]
