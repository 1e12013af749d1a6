"""Gates of attn.prep's gradients: rows with their positions, and the sums over tokens."""

from __future__ import annotations

import numpy as np

from isojax.gates.case import Case, ill_conditioned
from isojax.gates.gradients import of_rows, of_weights
from isojax.pallas_kernels.attn import prep_bwd
from isojax.pallas_kernels.attn.gate_prep import FAMILIES, Family


def exact(qkv, bias, q_norm, k_norm, rope, positions, dq, dkv, *, kv_heads, head_dim, eps, zero_centered):
    f64, rows = np.float64, len(qkv)
    x = (qkv.astype(f64) + (0.0 if bias is None else bias.astype(f64))).reshape(rows, kv_heads, -1, head_dim)
    dq = dq.astype(f64).reshape(rows, kv_heads, -1, head_dim)
    dk, dv = np.split(dkv.astype(f64)[:, :, None], 2, -1)
    cos, sin = np.split(rope.astype(f64)[positions][:, None, None], 2, -1)

    def turned(d):
        a, b = np.split(d, 2, -1)
        return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)

    def back(d, x, norm):
        """Through the rotation and the norm of the heads x: their gradient, and the weight's."""
        d = turned(d)
        if norm is None:
            return d, None
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        hat, cg = x * r, d * (norm.astype(f64) + (1.0 if zero_centered else 0.0))
        return r * (cg - hat * (cg * hat).mean(-1, keepdims=True)), (d * hat).sum((0, 1, 2))

    (q, q_weight), (k, k_weight) = back(dq, x[:, :, :-2], q_norm), back(dk, x[:, :, -2:-1], k_norm)
    dx = np.concatenate([q, k, dv], 2).reshape(rows, -1)
    found = (None if bias is None else dx.sum(0), q_weight, k_weight)
    return dx, *[g for g in found if g is not None]


@prep_bwd.gate_cases
def cases(rng, rows):
    def case(f: Family) -> Case:
        args, statics = f.operands(rng, rows)
        dq = ill_conditioned(rng, rows, f.heads, f.head_dim)
        dkv = ill_conditioned(rng, rows, f.kv_heads, 2 * f.head_dim)
        return Case(f.name, (*args, dq, dkv), statics, None, exact)

    llama, qwen3, whole = map(case, FAMILIES)
    weights = [of_weights(prep_bwd, c, ["dq", "dkv"]) for c in (qwen3, whole)]
    return [*[of_rows(prep_bwd, c) for c in (llama, qwen3, whole)], *weights]
