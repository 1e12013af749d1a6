"""The first kernel of attn.core_bwd: statistics of each row and head, and the list of work for the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn.bwd_tiles_sm90 import PANEL, TILE, Shape, f32, i32, span

TOKENS = 16  # of one program


def tiles_of(cu_q: Any, request: jax.Array) -> jax.Array:
    """Tiles of a real request."""
    return lax.div(cu_q[request + 1] - cu_q[request] + (TILE - 1), i32(TILE))


def list_level(s: Shape, cu_q: Any, work: Any, level: jax.Array) -> None:
    """Write the items of one level: those of all higher levels lie before them. Level 0: padding, then no work."""

    def before(r, count):
        return count + lax.max(tiles_of(cu_q, r) - level, i32(0))

    first = lax.fori_loop(0, s.requests, before, i32(0))

    def put(at, request, value):
        work[at, 0] = request
        work[at, 1] = value

    @pl.when(level > 0)
    def _():
        def place(r, at):
            fits = tiles_of(cu_q, r) >= level
            pl.when(fits)(lambda: put(at, r, level))
            return at + fits.astype(i32)

        lax.fori_loop(0, s.requests, place, first)

    @pl.when(level == 0)
    def _():
        rest = span(s, cu_q, i32(s.requests)).tiles
        pl.loop(0, rest)(lambda i: put(first + i, i32(s.requests), i + 1))
        pl.loop(first + rest, s.items)(lambda i: put(i, i32(-1), i32(0)))


def prepare(s: Shape):
    """-> stats [Hq, 2, 2, ..] fp32 (log-sum-exp, then delta, of each token: see Shape.stats) and work [items, 2].

    A row's delta lies in 8 lanes of one warp, in a tile of fixed height: the same tree in any batch.
    """
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((TOKENS, PANEL), (TOKENS // 4, PANEL), (PANEL // 8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    row = layout.reduce(1)
    levels = s.levels + 1
    at_once = next(n for n in (4, 3, 2, 1) if s.q_heads % n == 0)  # heads of one program, all in flight together
    parts = s.q_heads // at_once

    def body(out, lse, ct, cu_q, stats, work):
        block = lax.axis_index("block")
        pl.when(block < levels)(lambda: list_level(s, cu_q, work, block))

        @pl.when(block >= levels)
        def _():
            chunk, part = lax.div(block - levels, i32(parts)), lax.rem(block - levels, i32(parts))
            rows, heads = pl.ds(chunk * TOKENS, TOKENS), [part * at_once + i for i in range(at_once)]

            def load(ref, h):
                columns = [pl.ds(h * s.head_dim + c * PANEL, PANEL) for c in range(s.panels)]
                return [plgpu.load(ref.at[rows, c], layout=layout, optimized=False) for c in columns]

            loaded = [(load(out, h), load(ct, h)) for h in heads]
            for h, pair in zip(heads, loaded, strict=True):
                delta = sum(a.astype(f32) * b.astype(f32) for a, b in zip(*pair, strict=True))
                values = plgpu.load(lse.at[rows, h], layout=row, optimized=False), jnp.sum(delta, axis=1)
                for kind, value in enumerate(values):
                    stats[h, kind, 0, rows] = value
                    stats[h, kind, 1, pl.ds(rows.start + 1, TOKENS)] = value

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(s.stats, f32), jax.ShapeDtypeStruct((s.items, 2), i32)),
        grid=(levels + s.tokens // TOKENS * parts,),
        grid_names=("block",),
    )
