"""Hopper kernel of attn.prep's gradients, on the walk of the forward: a warpgroup takes 64 tokens, head after head.

Gradients of parameters are added up in registers over a head's four tiles of 16 tokens, so that element [r, c] of a
tile holds the tokens r, 16 + r, ..; then the 16 rows are added over the warpgroup. Each head's sum leaves as one fp32
partial row; isojax.pallas_kernels.columns adds those. Where nothing is normalised, qkv is not read.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.attn import prep_heads_sm90 as walk
from isojax.pallas_kernels.attn.prep_heads_sm90 import TOKENS, Block, Heads, f32
from isojax.pallas_kernels.columns import add_chunks, partials

TILES = 4  # 16-token tiles whose gradients are added before they leave the chip: part of the order, not tunable
NORMED, PLAIN = 4, 24  # heads of a block, at most, with norms and without: it changes speed, never bits
MOST_TOKENS = 1 << 17  # add_chunks's sums have to fit in the shared memory of one block


def prep_bwd_supports(qkv, bias, q_norm, k_norm, rope, positions, dq, dkv, *, kv_heads, head_dim, eps, zero_centered):
    params = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "dq": dq, "dkv": dkv}
    walk.check("attn.prep_bwd", qkv, params, rope, head_dim, TILES * TOKENS)
    if qkv.shape[0] > MOST_TOKENS:
        raise Unsupported("attn.prep_bwd", f"{qkv.shape[0]} rows", f"at most {MOST_TOKENS}", "split the batch")


def _turned(d, cos, sin):
    """The rotation's transpose."""
    return [d[0] * cos + d[1] * sin, d[1] * cos - d[0] * sin]


def prep_bwd(
    qkv,
    bias,
    q_norm,
    k_norm,
    rope,
    positions,
    dq,
    dkv,
    *,
    kv_heads,
    head_dim,
    eps,
    zero_centered,
    heads: int | None = None,
):
    tokens = qkv.shape[0]
    h = walk.heads_of(qkv, kv_heads, head_dim)
    b = Block(TILES, heads or math.gcd(h.count, NORMED if q_norm is not None else PLAIN), 1)
    arguments = (bias, q_norm, k_norm)
    present = [p for p in arguments if p is not None]

    def attn_prep_bwd(*refs):
        it = iter(refs)
        qkv = next(it)
        bias, q_norm, k_norm = (next(it) if p is not None else None for p in arguments)
        rope, positions, dq, dkv, dqkv = (next(it) for _ in range(5))
        dbias, dq_norm, dk_norm = (next(it) if p is not None else None for p in arguments)
        angles, arrived, *rest = it
        buffer = rest[0] if rest else None
        tile = lax.axis_index("tile")
        first = tile * b.tokens
        walk.fetch_angles(rope, positions, angles, arrived, b, first)

        def head(i, n, g, j):
            column = n * h.dim

            def backward(norm, dnorm, index, ct, start, rotate=True):
                gamma = [] if norm is None else h.gamma(norm, zero_centered)
                add = None if bias is None or norm is None else h.vector(bias, column)
                pl.when(i == 0)(lambda: plgpu.barrier_wait(arrived))

                def one(t, carry):
                    at = pl.ds(first + t * TOKENS, TOKENS)
                    d = [v.astype(f32) for v in h.load(ct(at), start)]
                    sums = []
                    if norm is not None:
                        x = [v.astype(f32) for v in h.load(qkv.at[at], column)]
                        if add is not None:
                            x = [v + a for v, a in zip(x, add, strict=True)]
                    if rotate:
                        d = _turned(d, *h.load(angles.at[pl.ds(t * TOKENS, TOKENS)]))
                    if norm is not None:
                        r = h.rstd(x, eps)
                        hat = [v * r for v in x]
                        sums += [v * w for v, w in zip(d, hat, strict=True)]
                        d = [v * w for v, w in zip(d, gamma, strict=True)]
                        mean = h.mean([v * w for v, w in zip(d, hat, strict=True)])
                        d = [r * (v - w * mean) for v, w in zip(d, hat, strict=True)]
                    h.store(dqkv.at[at], column, d)
                    if bias is not None:
                        sums += d
                    return tuple(v + w for v, w in zip(carry, sums, strict=True))

                zero = plgpu.layout_cast(jnp.zeros(h.shape, f32), h.layout)
                count = 2 * (norm is not None) + 2 * (bias is not None)
                totals = lax.fori_loop(0, b.tiles, one, (zero,) * count)
                if dnorm is not None:
                    _sum(h, totals[:2], buffer, dnorm.at[index])
                if dbias is not None:
                    _sum(h, totals[-2:], buffer, dbias.at[tile, pl.ds(column, h.dim)])

            q, k = g * h.group + j, tile * h.kv_heads + g
            of_q = lambda: backward(q_norm, dq_norm, tile * h.kv_heads * h.group + q, lambda at: dq.at[at, q], 0)
            pl.when(j < h.group)(of_q)
            pl.when(j == h.group)(lambda: backward(k_norm, dk_norm, k, lambda at: dkv.at[at, g], 0))
            pl.when(j > h.group)(lambda: backward(None, None, 0, lambda at: dkv.at[at, g], h.dim, rotate=False))

        walk.each_head(b, h, head)

    tiles = tokens // b.tokens
    q_rows, k_rows = tiles * h.kv_heads * h.group, tiles * h.kv_heads
    shapes = [
        (n, d)
        for n, d, p in zip((tiles, q_rows, k_rows), (qkv.shape[1], h.dim, h.dim), arguments, strict=True)
        if p is not None
    ]
    out = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), *[partials(*s) for s in shapes]
    scratch = (plgpu.SMEM((TOKENS, h.dim), f32),) if present else ()
    run = walk.launch(attn_prep_bwd, out, b, h, tokens, scratch)
    dqkv, *sums = run(qkv, *present, rope, positions, dq, dkv)
    return dqkv, *[add_chunks(s, n) for s, (n, _) in zip(sums, shapes, strict=True)]


def _sum(h: Heads, tile: list[jax.Array], buffer, out) -> None:
    """Add the 16 rows of two [16, D/2] halves and write [D] fp32.

    By way of shared memory, into a layout in which a warp holds whole rows: Mosaic's sum over warps takes no more than
    four neighbouring columns of a lane.
    """
    vec = h.half // 32
    tiling = plgpu.Tiling(((4, h.half), (vec,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    h.store(buffer, 0, tile)
    plgpu.commit_smem()
    for o in (0, h.half):
        rows = plgpu.load(buffer.at[:, pl.ds(o, h.half)], layout=layout, optimized=False)
        out[pl.ds(o, h.half)] = jnp.sum(rows, axis=0)
    plgpu.commit_smem()
