"""Hopper kernel of attn.prep: a block takes some tiles of tokens and shares their rope rows among its heads."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn import prep_heads_sm90 as walk
from isojax.pallas_kernels.attn.prep_heads_sm90 import TOKENS, Block, f32

FEW = 512  # tokens up to which a block has one head of one tile, so that there are many


def prep_supports(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    params = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    walk.check("attn.prep", qkv, params, rope, head_dim, TOKENS)


def block(tokens: int, heads: int) -> Block:
    """A block's share; it changes speed, never bits."""
    if tokens <= FEW:
        return Block(1, 1, 1)
    return Block(2 - tokens // TOKENS % 2, heads, 2 - heads % 2)


def prep(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered, b: Block | None = None):
    tokens = qkv.shape[0]
    h = walk.heads_of(qkv, kv_heads, head_dim)
    b = b or block(tokens, h.count)
    present = [p for p in (bias, q_norm, k_norm) if p is not None]

    def attn_prep(qkv, *refs):
        params, (rope, positions, q, kv, angles, arrived) = refs[: len(present)], refs[len(present) :]
        it = iter(params)
        bias, q_norm, k_norm = (next(it) if p is not None else None for p in arguments)
        first = lax.axis_index("tile") * b.tokens
        walk.fetch_angles(rope, positions, angles, arrived, b, first)

        def head(i, n, g, j):
            rows = [pl.ds(first + i * TOKENS, TOKENS) for i in range(b.tiles)]
            loaded = [h.load(qkv.at[r], n * h.dim) for r in rows]  # all in flight together
            pl.when(i == 0)(lambda: plgpu.barrier_wait(arrived))

            def finish(norm, out, start, rotate=True):
                add = None if bias is None else h.vector(bias, n * h.dim)
                gamma = None if norm is None else h.gamma(norm, zero_centered)
                for i, (at, tile) in enumerate(zip(rows, loaded, strict=True)):
                    x = [v.astype(f32) for v in tile]
                    if add is not None:
                        x = [v + d for v, d in zip(x, add, strict=True)]
                    if gamma is not None:
                        rstd = h.rstd(x, eps)
                        x = [v * rstd * w for v, w in zip(x, gamma, strict=True)]
                    if rotate:
                        cos, sin = h.load(angles.at[pl.ds(i * TOKENS, TOKENS)])
                        x = [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]
                    h.store(out(at), start, x)

            pl.when(j < h.group)(lambda: finish(q_norm, lambda at: q.at[at, g * h.group + j], 0))
            pl.when(j == h.group)(lambda: finish(k_norm, lambda at: kv.at[at, g], 0))
            pl.when(j > h.group)(lambda: finish(None, lambda at: kv.at[at, g], h.dim, rotate=False))

        walk.each_head(b, h, head)

    arguments = (bias, q_norm, k_norm)
    dtype = qkv.dtype
    out = (
        jax.ShapeDtypeStruct((tokens, h.kv_heads * h.group, h.dim), dtype),
        jax.ShapeDtypeStruct((tokens, h.kv_heads, 2 * h.dim), dtype),
    )
    return walk.launch(attn_prep, out, b, h, tokens)(qkv, *present, rope, positions)
