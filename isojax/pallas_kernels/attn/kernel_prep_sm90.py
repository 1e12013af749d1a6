"""Hopper kernel of attn.prep: a warpgroup prepares 16 tokens of one KV head's group, head after head.

A token's head lies in 8 lanes of one warp, as two halves of 16-byte (head size 64: 8-byte) accesses. The tile height is
fixed, so a norm's sum is the same tree in any batch: 8 elements of each half in a lane, then 3 shuffles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported

f32 = jnp.float32
TOKENS = 16
HEAD_DIMS = (64, 128)


def prep_supports(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    def refuse(given, allowed, mend):
        raise Unsupported("attn.prep", given, allowed, mend)

    if head_dim not in HEAD_DIMS:
        refuse(f"head_dim {head_dim}", f"{HEAD_DIMS} on sm90", "use the cpu arch")
    if qkv.shape[0] % TOKENS:
        refuse(f"{qkv.shape[0]} rows", f"a multiple of {TOKENS}", "pad the rows (padding rows change nothing)")
    for name, a in (("qkv", qkv), ("bias", bias), ("q_norm", q_norm), ("k_norm", k_norm)):
        if a is not None and a.dtype != jnp.bfloat16:
            refuse(f"{name} of {a.dtype}", "bfloat16 on sm90", "cast weights when loading them")
    if rope.dtype != f32 or rope.shape[1] != head_dim:
        refuse(f"a rope table {rope.dtype}{list(rope.shape)}", f"float32[P, {head_dim}]", "use isojax.model.rope")


def _layout(half: int):
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TOKENS, half), (TOKENS // 4, half), (half // 8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def prep(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    tokens, width = qkv.shape
    group = width // (kv_heads * head_dim) - 2
    half = head_dim // 2
    layout = _layout(half)
    shape = (TOKENS, half)
    dtype = qkv.dtype
    present = [p for p in (bias, q_norm, k_norm) if p is not None]

    def halves(ref, start):
        """Two [16, D/2] tiles from column `start` of a [16, ..] ref."""
        return [plgpu.load(ref.at[:, pl.ds(start + o, half)], layout=layout, optimized=False) for o in (0, half)]

    def vector_halves(ref, start):
        """The same of a vector, broadcast over the tokens, in fp32."""
        return [
            lax.broadcast_in_dim(
                plgpu.load(ref.at[pl.ds(start + o, half)], layout=layout.reduce(0), optimized=False).astype(f32),
                shape,
                [1],
            )
            for o in (0, half)
        ]

    def attn_prep(qkv, *refs):
        params, (rope, positions, q, kv, angles, arrived) = refs[: len(present)], refs[len(present) :]
        it = iter(params)
        bias_ref, *norms = (next(it) if p is not None else None for p in (bias, q_norm, k_norm))
        first, h = lax.axis_index("tile") * TOKENS, lax.axis_index("kv_head")
        for r in range(TOKENS):
            row = pl.ds(positions[first + r], 1)
            plgpu.copy_gmem_to_smem(rope.at[row], angles.at[pl.ds(r, 1)], arrived)
        rows = pl.ds(first, TOKENS)
        column = lambda j: (h * (group + 2) + j) * head_dim

        ahead = halves(qkv.at[rows], column(0))
        gammas = [None if n is None else vector_halves(n, 0) for n in norms]
        if zero_centered:
            gammas = [g and [x + 1.0 for x in g] for g in gammas]
        plgpu.barrier_wait(arrived)
        cos, sin = halves(angles, 0)

        for j in range(group + 2):
            now = [x.astype(f32) for x in ahead]
            if j < group + 1:
                ahead = halves(qkv.at[rows], column(j + 1))  # in flight while this head is computed
            if bias_ref is not None:
                now = [x + b for x, b in zip(now, vector_halves(bias_ref, column(j)), strict=True)]
            if j <= group:
                gamma = gammas[0] if j < group else gammas[1]
                if gamma is not None:
                    square = jnp.sum(now[0] * now[0] + now[1] * now[1], axis=1)
                    rstd = lax.rsqrt(square * (1.0 / head_dim) + eps)
                    rstd = lax.broadcast_in_dim(rstd, shape, [0])
                    now = [x * rstd * g for x, g in zip(now, gamma, strict=True)]
                a, b = now
                now = [a * cos - b * sin, b * cos + a * sin]
            out = q.at[rows, h * group + j] if j < group else kv.at[rows, h]
            at = max(0, j - group) * head_dim
            for o, x in zip((at, at + half), now, strict=True):
                out[:, pl.ds(o, half)] = x.astype(dtype)

    # An explicit tiling, or layout inference swizzles what is written one row at a time.
    tiled = (plgpu.TilingTransform((1, half)),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.kernel(
        attn_prep,
        out_type=(
            jax.ShapeDtypeStruct((tokens, kv_heads * group, head_dim), dtype),
            jax.ShapeDtypeStruct((tokens, kv_heads, 2 * head_dim), dtype),
        ),
        grid=(tokens // TOKENS, kv_heads),
        grid_names=("tile", "kv_head"),
        scratch_types=[
            plgpu.SMEM((TOKENS, head_dim), f32, transforms=tiled),
            plgpu.Barrier(num_arrivals=TOKENS),
        ],
    )(qkv, *present, rope, positions)
