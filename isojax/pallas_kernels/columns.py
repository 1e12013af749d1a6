"""Sums over the rows of a batch in a fixed order: how row-wise regions reduce the gradients of their weights on sm90.

A kernel adds the rows of a chunk in ascending order and writes one fp32 partial row per chunk; `add_chunks` adds the
partials, in groups of GROUP, each group ascending, then the groups ascending. The order is a function of the row's
index alone, not of grid, batch or device, and zero rows appended to a batch change nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.schedule import padded

f32 = jnp.float32
GROUP = 32  # partials of a group: their loads are in flight together
WARPS = 4  # of a warpgroup, each of which adds a group
COLUMNS = 32  # that a warp adds: one a lane
WARPGROUPS = 8  # most of a block
TILE = (WARPS, COLUMNS)
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling((TILE, (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def partials(chunks: int, n: int) -> jax.ShapeDtypeStruct:
    """Where a kernel writes its partial rows, for add_chunks to read: [at least `chunks`, n] fp32."""
    return jax.ShapeDtypeStruct((padded(chunks, WARPS * GROUP), n), f32)


def add_chunks(partial: jax.Array, chunks: int) -> jax.Array:
    """[C, N] fp32, of which `chunks` rows count -> [N]: their sum. N is a multiple of 32, C as `partials` has it."""
    n = partial.shape[1]
    groups = padded(-(-chunks // GROUP), WARPS)
    warpgroups = min(WARPGROUPS, groups // WARPS)
    full = chunks % (WARPS * GROUP) == 0

    def body(partial, out, sums, done):
        wg, cols = lax.axis_index("wg"), pl.ds(lax.axis_index("tile") * COLUMNS, COLUMNS)

        def four(i, _):
            first = (i * warpgroups + wg) * WARPS
            rows = [partial.at[pl.ds(first, WARPS), k, cols] for k in range(GROUP)]
            values = [plgpu.load(r, layout=LAYOUT, optimized=False) for r in rows]
            if not full:
                group = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=LAYOUT) + first
                values = [jnp.where(group * GROUP + k < chunks, v, 0.0) for k, v in enumerate(values)]
            sums[pl.ds(first, WARPS)] = functools.reduce(jnp.add, values)

        lax.fori_loop(0, lax.div(groups // WARPS - wg + warpgroups - 1, warpgroups), four, None)
        plgpu.barrier_arrive(done)

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(done)
            rows = [plgpu.load(sums.at[g], layout=LAYOUT.reduce(0), optimized=False) for g in range(groups)]
            out[cols] = functools.reduce(jnp.add, rows)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n,), f32),
        scratch_types=(plgpu.SMEM((groups, COLUMNS), f32), plgpu.Barrier(num_arrivals=warpgroups)),
        grid=(n // COLUMNS,),
        grid_names=("tile",),
        num_threads=warpgroups,
        thread_name="wg",
    )(partial.reshape(-1, GROUP, n))
