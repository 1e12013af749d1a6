"""Sums over the rows of a batch in a fixed order: how row-wise regions reduce the gradients of their weights on sm90.

A kernel adds the rows of a chunk in ascending order and writes one fp32 partial row per chunk; `add_chunks` adds the
partials, in groups of GROUP, each group ascending, then the groups ascending. The order is a function of the row's
index alone, not of grid, batch or device, and zero rows appended to a batch change nothing.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.interpretable import await_previous
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


def add_chunks(*sums: tuple[jax.Array, int]) -> list[jax.Array]:
    """Of each pair ([C, N] fp32, how many of its rows count) the sum [N].

    N is a multiple of 32, C as `partials` has it. One launch for all, which starts while the kernel before it ends if
    that one calls interpretable.let_next_start.
    """
    shapes = [(p.shape[1], chunks) for p, chunks in sums]
    groups = [padded(-(-chunks // GROUP), WARPS) for _, chunks in shapes]
    warpgroups = min(WARPGROUPS, max(groups) // WARPS)
    starts = list(itertools.accumulate((n // COLUMNS for n, _ in shapes), initial=0))  # blocks of each sum

    def body(*refs):
        partials, outs, (kept, done) = refs[: len(sums)], refs[len(sums) : -2], refs[-2:]
        tile, wg = lax.axis_index("tile"), lax.axis_index("wg")
        await_previous()

        def add(k):
            chunks, cols = shapes[k][1], pl.ds((tile - starts[k]) * COLUMNS, COLUMNS)

            def four(i, _):
                first = (i * warpgroups + wg) * WARPS
                rows = [partials[k].at[pl.ds(first, WARPS), j, cols] for j in range(GROUP)]
                values = [plgpu.load(r, layout=LAYOUT, optimized=False) for r in rows]
                if chunks % (WARPS * GROUP):
                    group = plgpu.broadcasted_iota(jnp.int32, TILE, 0, layout=LAYOUT) + first
                    values = [jnp.where(group * GROUP + j < chunks, v, 0.0) for j, v in enumerate(values)]
                kept[pl.ds(first, WARPS)] = functools.reduce(jnp.add, values)

            trips = lax.div(jnp.maximum(groups[k] // WARPS - wg + warpgroups - 1, 0), warpgroups)
            lax.fori_loop(0, trips, four, None)
            plgpu.barrier_arrive(done)

            @pl.when(wg == 0)
            def _():
                plgpu.barrier_wait(done)
                rows = [plgpu.load(kept.at[g], layout=LAYOUT.reduce(0), optimized=False) for g in range(groups[k])]
                outs[k][cols] = functools.reduce(jnp.add, rows)

        for k in range(len(sums)):
            pl.when((tile >= starts[k]) & (tile < starts[k + 1]))(functools.partial(add, k))

    return list(
        plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct((n,), f32) for n, _ in shapes),
            scratch_types=(plgpu.SMEM((max(groups), COLUMNS), f32), plgpu.Barrier(num_arrivals=warpgroups)),
            grid=(starts[-1],),
            grid_names=("tile",),
            num_threads=warpgroups,
            thread_name="wg",
        )(*[p.reshape(-1, GROUP, p.shape[1]) for p, _ in sums])
    )
