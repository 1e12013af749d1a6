"""linear.row for few rows: the leaves of a tile spread over the two blocks of a cluster, their sums meet on chip.

Few rows make few tiles. So that all SMs stream weights, each block of a cluster takes half of the leaves of one tile
and adds its subtree; then it sends one half of that sum's columns to the other block through distributed shared memory,
adds what comes from there to the other half, rounds once and stores it. Same leaves, same tree, same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.linear import gemm
from isojax.pallas_kernels.linear.tiles import Tiles

BLOCKS = 2


def row(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int, out_dtype: Any) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N]; `leaves` chains, two blocks to a tile, one rounding.

    leaves: even. t.n: a multiple of 16.
    """
    assert t.split == BLOCKS
    (rows, k), n = x.shape, len(weight)
    own, wide = leaves // BLOCKS, t.n // BLOCKS
    items, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))

    def locate(i):
        r, c = at(i)
        me = lax.axis_index("peer")
        return gemm.Item(r * t.rows, c * t.cols, me * (k // BLOCKS))

    def body(x, w, out, *rest):
        *post, s = rest
        land, landed, ready = s.meet
        wg, me = lax.axis_index("wg"), lax.axis_index("peer")

        @pl.when(wg < t.warpgroups)
        def _():
            plgpu.barrier_arrive(ready.at[wg])  # nothing lies in this block's landing area yet

        def finish(_, r, c, total):
            plgpu.barrier_wait(ready.at[wg])
            parts = total[:, :wide], total[:, wide:]
            place = lambda block, part: [p.at[block, pl.ds(r, t.m), pl.ds(c + part * wide, wide)] for p in post]
            for i in range(BLOCKS):
                there = 1 - i

                @pl.when(me == i)
                def _(i=i, there=there):
                    send(parts[there], land.at[wg], landed.at[wg], there, *place(i, there))

            plgpu.barrier_wait(landed.at[wg])
            for i in range(BLOCKS):

                @pl.when(me == i)
                def _(i=i):
                    (source,) = place(1 - i, i) or [land.at[wg]]
                    lower, upper = (parts[0], source[...]) if i == 0 else (source[...], parts[1])
                    gemm.store(out, s, r, c + i * wide, lower + upper)

            plgpu.barrier_arrive(ready.at[wg])  # `store` holds a barrier of the warpgroup: all have read by now

        steps = t.steps(k // leaves)
        gemm.product(x, w, s, t, items=items, locate=locate, steps=steps, leaves=own, finish=finish)

        @pl.when(wg < t.warpgroups)
        def _():
            plgpu.barrier_wait(ready.at[wg])  # no block may leave while peers still signal to it

    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    room, halves = t.warpgroups * t.m * wide * 4, t.halves(k // leaves)
    s = gemm.scratch(t, own, out_dtype, gemm.chunk(wide, n, out_dtype), reserved=room, halves=halves)
    land = plgpu.SMEM((t.warpgroups, t.m, wide), jnp.float32, transforms=gemm.tiled(wide, jnp.float32))
    every = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=t.warpgroups)
    landed = every if interpreting() else plgpu.Barrier(num_arrivals=1, num_barriers=t.warpgroups)
    s = s._replace(meet=(land, landed, every))
    if not interpreting():
        return gemm.launch(body, out, t, items, s)(x, weight)
    post = jax.ShapeDtypeStruct((BLOCKS, rows, n), jnp.float32)
    return gemm.launch(body, (out, post), t, items, s)(x, weight)[0]


def send(part: jax.Array, land: Any, landed: Any, block: int, post: Any = None) -> None:
    """part into the landing area of a block of this cluster.

    Mosaic's interpreter has no distributed shared memory: there it goes to `post` in global memory.
    """
    if post is not None:
        post[...] = part
        plgpu.barrier_arrive(landed)
        return
    plgpu.async_store_smem(part, land, landed, cluster_idx=jnp.int32(block), cluster_dim="peer")
