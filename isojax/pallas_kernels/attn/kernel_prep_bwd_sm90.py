"""Hopper kernel of attn.prep's gradients: a warpgroup takes some tiles of 16 tokens, head after head.

Heads stream through a ring in shared memory; the rows of the rope table lie there too, each where its thread left it.
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
from isojax.pallas_kernels.attn.prep_heads_sm90 import TOKENS, Heads, f32
from isojax.pallas_kernels.attn.reference import whole_heads
from isojax.pallas_kernels.columns import add_chunks, partials
from isojax.pallas_kernels.fused import fma
from isojax.pallas_kernels.interpretable import let_next_start

TILES = 4  # 16-token tiles whose gradients are added before they leave the chip: part of the order, not tunable
MOST_TOKENS = 1 << 17  # add_chunks's sums have to fit in the shared memory of one block


def prep_bwd_supports(qkv, bias, q_norm, k_norm, rope, positions, dq, dkv, *, kv_heads, head_dim, eps, zero_centered):
    whole_heads("attn.prep_bwd", qkv, kv_heads, head_dim)
    params = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "dq": dq, "dkv": dkv}
    walk.check("attn.prep_bwd", qkv, params, rope, head_dim, TILES * TOKENS)
    if qkv.shape[0] > MOST_TOKENS:
        raise Unsupported("attn.prep_bwd", f"{qkv.shape[0]} rows", f"at most {MOST_TOKENS}", "split the batch")


def shares(heads: int, bias: bool, norm: bool) -> tuple[int, int, int]:
    """(tiles, heads) of a block and the heads in flight: measured; tiles are TILES wherever something is summed."""
    if norm:
        return TILES, 24 if heads % 24 == 0 else math.gcd(heads, 16), 2
    return (TILES, math.gcd(heads, 24), 3) if bias else (2, heads, 3)


def prep_bwd(qkv, bias, q_norm, k_norm, rope, positions, dq, dkv, *, kv_heads, head_dim, eps, zero_centered):
    count = qkv.shape[0]
    h = walk.heads_of(qkv, kv_heads, head_dim)
    arguments = (bias, q_norm, k_norm)
    present = [p for p in arguments if p is not None]
    normed = q_norm is not None
    tiles, heads, stages = shares(h.count, bias is not None, normed)
    stages, tokens = min(stages, heads), tiles * TOKENS

    def attn_prep_bwd(*refs):
        it = iter(refs)
        qkv = next(it)
        bias, q_norm, k_norm = (next(it) if p is not None else None for p in arguments)
        rope, positions, dq, dkv, dqkv = (next(it) for _ in range(5))
        dbias, dq_norm, dk_norm = (next(it) if p is not None else None for p in arguments)
        angles, cts, ct_arrived = (next(it) for _ in range(3))
        xs, x_arrived = (next(it), next(it)) if normed else (cts, ct_arrived)  # not used
        buffer = next(it) if present else None
        tile = lax.axis_index("tile")
        first = tile * tokens
        rows = pl.ds(first, tokens)
        placed = lambda i: lax.axis_index("head") * heads + i

        def fetch(i):
            n, slot = placed(i), lax.rem(i, stages)
            g, j = walk.place(h, n)

            @pl.when(j < h.group)
            def _():
                plgpu.copy_gmem_to_smem(dq.at[rows, g * h.group + j], cts.at[slot], ct_arrived.at[slot])

            @pl.when(j >= h.group)
            def _():
                column = pl.ds((j - h.group) * h.dim, h.dim)
                plgpu.copy_gmem_to_smem(dkv.at[rows, g, column], cts.at[slot], ct_arrived.at[slot])

            if normed:

                @pl.when(j <= h.group)
                def _():
                    plgpu.copy_gmem_to_smem(qkv.at[rows, pl.ds(n * h.dim, h.dim)], xs.at[slot], x_arrived.at[slot])

        for i in range(stages):
            fetch(jnp.int32(i))
        for t in range(0, tokens, TOKENS):
            h.store(angles.at[pl.ds(t, TOKENS)], 0, walk.angles(h, rope, positions, first + t))

        def head(i, _):
            n, slot = placed(i), lax.rem(i, stages)
            g, j = walk.place(h, n)
            column = n * h.dim

            def backward(norm, dnorm, index, rotate=True):
                gamma = [] if norm is None else h.gamma(norm, zero_centered)
                add = None if bias is None or norm is None else h.vector(bias, column)
                plgpu.barrier_wait(ct_arrived.at[slot])
                if norm is not None:
                    plgpu.barrier_wait(x_arrived.at[slot])

                def one(t, carry):
                    here, sums = pl.ds(t * TOKENS, TOKENS), list(carry)
                    d = [v.astype(f32) for v in h.load(cts.at[slot, here])]
                    if rotate:  # back: the rotation's transpose
                        cos, sin = h.load(angles.at[here])
                        d = [fma(d[0], cos, d[1] * sin, h.layout), fma(d[1], cos, -(d[0] * sin), h.layout)]
                    if norm is not None:
                        x = [v.astype(f32) for v in h.load(xs.at[slot, here])]
                        if add is not None:
                            x = [v + a for v, a in zip(x, add, strict=True)]
                        r = h.rstd(x, eps)
                        hat = [v * r for v in x]
                        sums[:2] = [fma(v, w, s, h.layout) for v, w, s in zip(d, hat, sums[:2], strict=True)]
                        d = [v * w for v, w in zip(d, gamma, strict=True)]
                        mean = plgpu.layout_cast(h.mean_product(d, hat), h.layout)
                        d = [r * fma(-w, mean, v, h.layout) for v, w in zip(d, hat, strict=True)]
                    h.store(dqkv.at[pl.ds(first + t * TOKENS, TOKENS)], column, d)
                    if bias is not None:
                        sums[-2:] = [s + v for s, v in zip(sums[-2:], d, strict=True)]
                    return tuple(sums)

                zero = plgpu.layout_cast(jnp.zeros(h.shape, f32), h.layout)
                sums = (zero,) * (2 * (norm is not None) + 2 * (bias is not None))
                sums = lax.fori_loop(0, tiles, one, sums)
                if dnorm is not None:
                    _sum(h, sums[:2], buffer, dnorm.at[index])
                if dbias is not None:
                    _sum(h, sums[-2:], buffer, dbias.at[tile, pl.ds(column, h.dim)])

            q, k = (tile * h.kv_heads + g) * h.group + j, tile * h.kv_heads + g
            pl.when(j < h.group)(lambda: backward(q_norm, dq_norm, q))
            pl.when(j == h.group)(lambda: backward(k_norm, dk_norm, k))
            pl.when(j > h.group)(lambda: backward(None, None, 0, rotate=False))

            @pl.when(i + stages < heads)
            def _():
                plgpu.commit_smem()  # the head has been read
                fetch(i + stages)

        lax.fori_loop(0, heads, head, None)
        if present:
            let_next_start()

    blocks = count // tokens
    q_rows, k_rows = blocks * h.kv_heads * h.group, blocks * h.kv_heads
    shapes = [
        (n, d)
        for n, d, p in zip((blocks, q_rows, k_rows), (qkv.shape[1], h.dim, h.dim), arguments, strict=True)
        if p is not None
    ]
    # An explicit tiling, or layout inference swizzles the tiles.
    tiled = (plgpu.TilingTransform((1, h.half)),)  # pyright: ignore[reportAbstractUsage]
    ring = (
        plgpu.SMEM((stages, tokens, h.dim), qkv.dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )
    dqkv, *sums = plgpu.kernel(
        attn_prep_bwd,
        out_type=(jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), *[partials(*s) for s in shapes]),
        grid=(h.count // heads, blocks),
        grid_names=("head", "tile"),
        scratch_types=(
            plgpu.SMEM((tokens, h.dim), f32),
            *ring,
            *(ring if normed else ()),
            *((plgpu.SMEM((TOKENS, h.dim), f32),) if present else ()),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(qkv, *present, rope, positions, dq, dkv)
    chunks = [(s, n) for s, (n, _) in zip(sums, shapes, strict=True)]
    return dqkv, *(add_chunks(*chunks) if chunks else ())


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
