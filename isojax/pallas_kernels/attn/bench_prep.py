"""Bench of attn.prep against eager torch on the same packed rows."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, MODELS
from isojax.pallas_kernels.attn import prep

POSITIONS = 40960


def _peer_for(kv_heads: int, head_dim: int):
    def peer(torch, qkv, bias, q_norm, k_norm, rope, positions):
        norm = torch.nn.functional.rms_norm
        rows = positions.long()

        def rotated(x, cos, sin):
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        def run():
            x = qkv if bias is None else qkv + bias
            x = x.view(len(x), kv_heads, -1, head_dim)
            q, k, v = x[:, :, :-2], x[:, :, -2:-1], x[:, :, -1]
            if q_norm is not None:
                q, k = norm(q, (head_dim,), q_norm, 1e-6), norm(k, (head_dim,), k_norm, 1e-6)
            cos, sin = rope[rows].to(x.dtype)[:, None, None].chunk(2, -1)
            return rotated(q, cos, sin).flatten(1, 2), torch.cat([rotated(k, cos, sin)[:, :, 0], v], -1)

        return run

    return peer


@prep.bench_cases
def cases():
    out = []
    for name, t, d, heads, kv_heads, bias, norm in (
        (m.name, t, m.head_dim, m.heads, m.kv_heads, m.qkv_bias, m.qk_norm) for m in MODELS for t in BATCH_ROWS
    ):
        width = (heads + 2 * kv_heads) * d
        operands = (
            Operand("bf16", (t, width)),
            Operand("bf16", (width,)) if bias else None,
            Operand("bf16", (d,)) if norm else None,
            Operand("bf16", (d,)) if norm else None,
            Operand("f32", (POSITIONS, d)),
            Operand("i32", (t,), high=POSITIONS),
        )
        out.append(
            BenchCase(
                f"{name} M{t}",
                operands,
                bytes=2 * 2 * t * width + 4 * t * d + 4 * t,
                statics={"kv_heads": kv_heads, "head_dim": d, "eps": 1e-6},
                peer=_peer_for(kv_heads, d),
                model=name,
                at={"M": t},
            )
        )
    return out
