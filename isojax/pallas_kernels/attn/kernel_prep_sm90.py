"""Hopper kernel of attn.prep: a block takes some tiles of tokens; their rope rows stay in registers for all heads."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn import prep_heads_sm90 as walk
from isojax.pallas_kernels.attn.prep_heads_sm90 import TOKENS, Block, f32
from isojax.pallas_kernels.attn.reference import whole_heads
from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.fused import fma

FEW = 512  # tokens up to which a block has one head of one tile, so that there are many
AT_ONCE = 4 * SMS  # blocks of one warpgroup; measured
ALONE = 32  # heads of such a block at most, else two warpgroups share them


def prep_supports(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    whole_heads("attn.prep", qkv, kv_heads, head_dim)
    params = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    walk.check("attn.prep", qkv, params, rope, head_dim, TOKENS)


def block(tokens: int, heads: int) -> Block:
    """A block's share; it changes speed, never bits."""
    if tokens <= FEW:
        return Block(1, 1, 1)
    tiles = 2 - tokens // TOKENS % 2
    parts = AT_ONCE * tiles * TOKENS // tokens  # of the heads, so that all blocks run at once where they can
    alone = next((heads // p for p in range(parts, 0, -1) if heads % p == 0), heads)
    return Block(tiles, alone, 1) if alone <= ALONE else Block(tiles, heads, 2 - heads % 2)


def prep(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered, b: Block | None = None):
    tokens = qkv.shape[0]
    h = walk.heads_of(qkv, kv_heads, head_dim)
    b = b or block(tokens, h.count)
    arguments = (bias, q_norm, k_norm)
    present = [p for p in arguments if p is not None]

    def attn_prep(qkv, *refs):
        params, (rope, positions, q, kv) = refs[: len(present)], refs[len(present) :]
        it = iter(params)
        bias, q_norm, k_norm = (next(it) if p is not None else None for p in arguments)
        first = lax.axis_index("tile") * b.tokens
        start = lax.axis_index("head") * b.heads + lax.axis_index("wg")
        firsts = [first + i * TOKENS for i in range(b.tiles)]
        rows = [pl.ds(f, TOKENS) for f in firsts]
        turns = lambda: [walk.angles(h, rope, positions, f) for f in firsts]

        def head(i, angles):
            n = start + i * b.warpgroups
            g, j = walk.place(h, n)
            loaded = [h.load(qkv.at[r], n * h.dim) for r in rows]  # all in flight together
            angles = angles or turns()

            def finish(norm, out, column, rotate=True):
                add = None if bias is None else h.vector(bias, n * h.dim)
                gamma = None if norm is None else h.gamma(norm, zero_centered)
                for at, tile, (cos, sin) in zip(rows, loaded, angles, strict=True):
                    x = [v.astype(f32) for v in tile]
                    if add is not None:
                        x = [v + d for v, d in zip(x, add, strict=True)]
                    if gamma is not None:
                        rstd = h.rstd(x, eps)
                        x = [v * rstd * w for v, w in zip(x, gamma, strict=True)]
                    if rotate:
                        x = [fma(x[0], cos, -(x[1] * sin), h.layout), fma(x[1], cos, x[0] * sin, h.layout)]
                    h.store(out(at), column, x)

            pl.when(j < h.group)(lambda: finish(q_norm, lambda at: q.at[at, g * h.group + j], 0))
            pl.when(j == h.group)(lambda: finish(k_norm, lambda at: kv.at[at, g], 0))
            pl.when(j > h.group)(lambda: finish(None, lambda at: kv.at[at, g], h.dim, rotate=False))

        if b.heads == b.warpgroups:
            head(0, None)
        else:
            angles = turns()
            lax.fori_loop(0, b.heads // b.warpgroups, lambda i, _: head(i, angles), None)

    return plgpu.kernel(
        attn_prep,
        out_type=(
            jax.ShapeDtypeStruct((tokens, h.kv_heads * h.group, h.dim), qkv.dtype),
            jax.ShapeDtypeStruct((tokens, h.kv_heads, 2 * h.dim), qkv.dtype),
        ),
        grid=(h.count // b.heads, tokens // b.tokens),
        grid_names=("head", "tile"),
        num_threads=b.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(qkv, *present, rope, positions)
