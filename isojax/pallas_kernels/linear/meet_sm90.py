"""linear.row for few rows: the leaves of a tile spread over the blocks of a cluster, their sums meet on chip.

Few rows make few tiles. So that all SMs stream weights, each block of a cluster takes an equal run of leaves of one
tile and adds its subtree; then block j of the cluster gets the j-th slice of columns of every block's sum through
distributed shared memory, adds the upper tree, rounds once and stores its slice. Same leaves, same tree, same bits.
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
from isojax.schedule import tree


def row(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int, out_dtype: Any) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N]; `leaves` chains, t.split blocks to a tile, one rounding.

    leaves: a multiple of t.split. t.n / t.split: a multiple of 8.
    """
    (rows, k), n = x.shape, len(weight)
    own, wide = leaves // t.split, t.n // t.split
    items, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))

    def locate(i):
        r, c = at(i)
        me = lax.axis_index("peer")
        return gemm.Item(r * t.rows, c * t.cols, me * (k // t.split))

    def body(x, w, out, *rest):
        *post, s = rest
        land, landed, ready = s.meet
        wg, me = lax.axis_index("wg"), lax.axis_index("peer")

        @pl.when(wg < t.warpgroups)
        def _():
            plgpu.barrier_arrive(ready.at[wg])  # nothing lies in this block's landing area yet

        def finish(_, r, c, total):
            plgpu.barrier_wait(ready.at[wg])
            send(total, land.at[wg], landed.at[wg], t.split, *[p.at[:, pl.ds(r, t.m), pl.ds(c, t.n)] for p in post])
            plgpu.barrier_wait(landed.at[wg])
            source = land.at[wg] if not post else post[0].at[:, pl.ds(r, t.m), pl.ds(c + me * wide, wide)]
            total = tree([source[i] for i in range(t.split)], jnp.add)
            gemm.store(out, s, r, c + me * wide, total)  # it holds a barrier of the warpgroup: all have read by now
            plgpu.barrier_arrive(ready.at[wg])

        steps = k // leaves // t.k
        gemm.product(x, w, s, t, items=items, locate=locate, steps=steps, leaves=own, finish=finish)

        @pl.when(wg < t.warpgroups)
        def _():
            plgpu.barrier_wait(ready.at[wg])  # no block may leave while peers still signal to it

    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    s = gemm.scratch(t, own, out_dtype, gemm.chunk(wide, n, out_dtype), reserved=t.warpgroups * t.m * t.n * 4)
    land = plgpu.SMEM((t.warpgroups, t.split, t.m, wide), jnp.float32, transforms=gemm.tiled(wide, jnp.float32))
    every = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=t.warpgroups)
    landed = every if interpreting() else plgpu.Barrier(num_arrivals=t.split, num_barriers=t.warpgroups)
    s = s._replace(meet=(land, landed, every))
    if not interpreting():
        return gemm.launch(body, out, t, items, s)(x, weight)
    post = jax.ShapeDtypeStruct((t.split, rows, n), jnp.float32)
    return gemm.launch(body, (out, post), t, items, s)(x, weight)[0]


def send(value: jax.Array, land: Any, landed: Any, peers: int, post: Any = None) -> None:
    """The j-th slice of columns of value into row `me` of block j's landing area, for each of `peers` blocks.

    Mosaic's interpreter has no distributed shared memory: there the value goes to `post` in global memory, from where
    the peers read it.
    """
    me = lax.axis_index("peer")
    if post is not None:
        post[me] = value
        plgpu.barrier_arrive(landed)
        return
    wide = value.shape[1] // peers
    for j in range(peers):
        part = value[:, j * wide : (j + 1) * wide]
        plgpu.async_store_smem(part, land.at[me], landed, cluster_idx=jnp.int32(j), cluster_dim="peer")
