"""Bench of attn.prep's gradients against torch's autograd through the eager forward."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.attn import bench_prep, prep_bwd


def _peer_for(case: BenchCase):
    def peer(torch, qkv, bias, q_norm, k_norm, rope, positions, dq, dkv):
        leaves = [None if x is None else x.clone().requires_grad_() for x in (qkv, bias, q_norm, k_norm)]
        assert case.peer is not None
        outs = case.peer(torch, *leaves, rope, positions)()
        wanted = [x for x in leaves if x is not None]
        return lambda: torch.autograd.grad(outs, wanted, (dq, dkv), retain_graph=True)

    return peer


@prep_bwd.bench_cases
def cases():
    out = []
    for c in bench_prep.cases():
        (t, width), d = c.operands[0].shape, c.statics["head_dim"]
        if t < 1024:
            continue
        kv_heads, norm = c.statics["kv_heads"], c.operands[2] is not None
        heads = width // d - 2 * kv_heads
        read = 2 + norm  # qkv only where something is normalised
        out.append(
            BenchCase(
                c.name,
                (*c.operands, Operand("bf16", (t, heads, d)), Operand("bf16", (t, kv_heads, 2 * d))),
                bytes=read * 2 * t * width + 4 * t * d + 4 * t,
                statics={**c.statics, "zero_centered": False},
                peer=_peer_for(c),
                model=c.model,
                at=c.at,
            )
        )
    return out
