"""Bench of the feed-forward activation against torch's two kernels."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.mlp import swiglu


def _peer(torch, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return lambda: torch.nn.functional.silu(gate) * up


@swiglu.bench_cases
def cases():
    return [
        BenchCase(
            f"{m.name} M{t} F{m.ffn}",
            (Operand("bf16", (t, 2 * m.ffn)),),
            bytes=3 * 2 * t * m.ffn,
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("ffn")
        for t in BATCH_ROWS
    ]
