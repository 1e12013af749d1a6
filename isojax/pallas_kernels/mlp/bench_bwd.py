"""Bench of the activation's gradient against torch's autograd."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.mlp import swiglu_bwd


def _peer(torch, gate_up, ct):
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    out = torch.nn.functional.silu(gate) * up
    return lambda: torch.autograd.grad(out, leaf, ct, retain_graph=True)


@swiglu_bwd.bench_cases
def cases():
    return [
        BenchCase(
            f"{m.name} M{t} F{m.ffn}",
            (Operand("bf16", (t, 2 * m.ffn)), Operand("bf16", (t, m.ffn))),
            bytes=5 * 2 * t * m.ffn,
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("ffn")
        for t in BATCH_ROWS
        if t >= 1024
    ]
